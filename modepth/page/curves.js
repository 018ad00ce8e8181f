// The curves of runs, from the rows of their logs: loss, what each routed layer did, speed. Several runs share a chart
// of losses; layers are drawn run by run.

const RUN_COLOURS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#888888"];

class CurvesView {
  // Over steps as a run goes on; over FLOPs where runs are compared.
  constructor(place, over = "step") {
    this.runs = {};
    this.charts = {};
    this.over = over;
    this.grid = element("div", { class: "charts" });
    this.events = element("ul", { class: "events" });
    const name = `over-${CurvesView.count++}`;
    const choice = (value, text) =>
      element(
        "label",
        {},
        element("input", { type: "radio", name, value, checked: value === over, onchange: () => this.overBy(value) }),
        element("span", { text }),
      );
    this.choice = element(
      "fieldset",
      { class: "choice" },
      element("legend", { text: "Drawn over" }),
      choice("step", "steps"),
      choice("flops", "training FLOPs"),
    );
    place.replaceChildren(this.choice, this.grid, this.events);
  }

  overBy(value) {
    this.over = value;
    Object.values(this.charts).forEach((chart) => (chart.at = null));
    this.draw();
  }

  show(runs) {
    this.runs = runs;
    this.draw();
  }

  draw() {
    const xName = this.over === "step" ? "step" : "FLOPs";
    const names = Object.keys(this.runs);
    const colour = (number) => RUN_COLOURS[number % RUN_COLOURS.length];
    const losses = names.flatMap((name, number) => this.losses(name, colour(number), names.length > 1));
    const firstMeasured = losses.filter((each) => each.marked).map((each) => each.points[1]?.[0] ?? null);
    const from = firstMeasured.length && firstMeasured.every((x) => x !== null) ? Math.min(...firstMeasured) : null;
    this.chart("Language-model loss").show(losses, xName, from);
    for (const name of names) {
      const of = names.length > 1 ? ` of ${name}` : "";
      this.chart(`Share of tokens routed, by layer${of}`).show(this.byLayer(name, "share"), xName);
      this.chart(`Mean gate, by layer${of}`).show(this.byLayer(name, "gate"), xName);
    }
    const each = (field) =>
      names.map((name, number) => ({
        name: names.length > 1 ? name : field.replaceAll("_", " "),
        points: this.points(name, (row) => row[field]),
        colour: colour(number),
      }));
    this.chart("Gradient norm").show(each("gradient_norm"), xName);
    this.chart("Training tokens per second").show(each("tokens_per_second"), xName);
    const events = names.flatMap((name) =>
      this.runs[name]
        .filter((row) => row.event)
        .map((row) => element("li", { text: `${name}, step ${row.step}: ${row.event}: ${row.reason ?? ""}` })),
    );
    this.events.replaceChildren(...events.slice(-8));
  }

  chart(title) {
    if (!this.charts[title]) {
      this.charts[title] = new Chart(title, this.over);
      this.grid.append(this.charts[title].root);
    }
    return this.charts[title];
  }

  points(name, value) {
    return this.runs[name]
      .map((row) => [row[this.over], value(row)])
      .filter(([x, y]) => Number.isFinite(x) && Number.isFinite(y));
  }

  losses(name, colour, several) {
    const of = several ? `${name}, ` : "";
    return [
      { name: `${of}training`, points: this.points(name, (row) => row.loss), colour, light: true },
      { name: `${of}validation`, points: this.points(name, (row) => row.validation?.loss), colour, marked: true },
    ];
  }

  byLayer(name, field) {
    const last = this.runs[name].findLast((row) => row.layers);
    return Object.keys(last?.layers ?? {})
      .sort((one, other) => one - other)
      .map((layer, number) => ({
        name: `layer ${layer}`,
        points: this.points(name, (row) => row.layers?.[layer]?.[field]),
        colour: RUN_COLOURS[number % RUN_COLOURS.length],
      }));
  }
}
CurvesView.count = 0;
