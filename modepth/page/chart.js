// One chart: lines over a common x, read out by pointer or arrow keys. Drawn at the width that it has.
// A series is {name, points: [[x, y], ...], colour, marked, light}.

const CHART_HEIGHT = 220;
const MARGIN = { left: 52, right: 12, top: 10, bottom: 26 };
const MOST_POINTS = 1200; // of one line: more are not seen

class Chart {
  constructor(title, xName) {
    this.title = title;
    this.series = [];
    this.xName = xName;
    this.at = null;
    this.inside = `inside-${Chart.count++}`; // what clips this chart and no other
    this.place = element("div", {
      class: "plot",
      tabindex: "0",
      role: "application",
      "aria-label": `${title}: a chart. Arrow keys move along it.`,
      onkeydown: (event) => this.press(event),
      onpointermove: (event) => this.hover(event),
      onpointerdown: (event) => this.hover(event),
    });
    this.readout = element("p", { class: "readout", role: "status" });
    this.key = element("p", { class: "legend" });
    const caption = element("figcaption", { text: title });
    this.root = element("figure", { class: "chart" }, caption, this.key, this.place, this.readout);
    new ResizeObserver(() => this.draw()).observe(this.place);
  }

  show(series, xName, from = null) {
    this.series = series.filter((each) => each.points.length);
    this.xName = xName;
    this.from = from;
    this.root.hidden = !this.series.length;
    this.key.replaceChildren(
      ...this.series.map((each) => {
        const swatch = element("i", { class: each.marked ? "line marked" : "line" });
        swatch.style.setProperty("--colour", each.colour);
        swatch.style.setProperty("--strength", each.light ? 0.45 : 1);
        return element("span", { class: "key" }, swatch, each.name);
      }),
    );
    this.draw();
  }

  draw() {
    const width = this.place.clientWidth;
    if (!width || !this.series.length) return;
    const all = this.series.flatMap((each) => each.points);
    // The fall from random weights would flatten all that follows.
    const seen = this.from === null ? all : all.filter(([x]) => x >= this.from);
    const xs = range(all.map(([x]) => x));
    const ys = padded(range((seen.length > 1 ? seen : all).map(([, y]) => y)));
    const [across, upward] = [width - MARGIN.left - MARGIN.right, CHART_HEIGHT - MARGIN.top - MARGIN.bottom];
    this.toX = (x) => MARGIN.left + ((x - xs[0]) / (xs[1] - xs[0] || 1)) * across;
    this.toY = (y) => CHART_HEIGHT - MARGIN.bottom - ((y - ys[0]) / (ys[1] - ys[0] || 1)) * upward;
    const parts = [];
    for (const y of ticks(ys, 4)) {
      const place = this.toY(y);
      parts.push(`<line class="grid" x1="${MARGIN.left}" x2="${width - MARGIN.right}" y1="${place}" y2="${place}"/>`);
      parts.push(`<text x="${MARGIN.left - 8}" y="${place + 4}" text-anchor="end">${compact(y)}</text>`);
    }
    for (const x of ticks(xs, Math.max(2, Math.floor(width / 90)))) {
      parts.push(`<text x="${this.toX(x)}" y="${CHART_HEIGHT - 6}" text-anchor="middle">${compact(x)}</text>`);
    }
    for (const each of this.series) parts.push(this.line(each));
    parts.push(`<g class="cursor"></g>`);
    const inside = `x="${MARGIN.left}" y="0" width="${width - MARGIN.left}" height="${CHART_HEIGHT - MARGIN.bottom + 4}"`;
    this.place.innerHTML =
      `<svg width="${width}" height="${CHART_HEIGHT}" aria-hidden="true">` +
      `<clipPath id="${this.inside}"><rect ${inside}/></clipPath>${parts.join("")}</svg>`;
    this.point(this.at);
  }

  // Numbers and colours of our own only: this becomes markup.
  line({ points, colour, marked, light }) {
    const step = Math.ceil(points.length / MOST_POINTS);
    const kept = points.filter((_, number) => number % step === 0 || number === points.length - 1);
    const places = kept.map(([x, y]) => [this.toX(x).toFixed(1), this.toY(y).toFixed(1)]);
    const dots = marked && kept.length <= 60 ? places.map(([x, y]) => `<circle cx="${x}" cy="${y}" r="3"/>`) : [];
    return (
      `<g clip-path="url(#${this.inside})" style="--colour: ${colour}; --strength: ${light ? 0.45 : 1}">` +
      `<polyline points="${places.join(" ")}"/>${dots.join("")}</g>`
    );
  }

  // -- looking closer

  hover(event) {
    const x = event.clientX - this.place.getBoundingClientRect().left;
    const places = this.places();
    if (!places.length) return;
    const far = (place) => Math.abs(this.toX(place) - x);
    this.point(places.reduce((best, each) => (far(each) < far(best) ? each : best)));
  }

  press(event) {
    const places = this.places();
    const moves = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 };
    if (!(event.key in moves) || !places.length) return;
    event.preventDefault();
    const now = this.at === null ? places.length - 1 : places.indexOf(this.at);
    this.point(places[Math.max(0, Math.min(places.length - 1, now + moves[event.key]))]);
  }

  places() {
    return [...new Set(this.series.flatMap((each) => each.points.map(([x]) => x)))].sort((one, other) => one - other);
  }

  point(x) {
    const cursor = this.place.querySelector(".cursor");
    if (x === null || !cursor) return;
    this.at = x;
    const near = this.series.map((each) => ({
      each,
      found: each.points.reduce((best, point) => (Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best)),
    }));
    const dots = near.map(({ each, found }) => {
      const place = `cx="${this.toX(found[0])}" cy="${this.toY(found[1])}"`;
      return `<circle style="--colour: ${each.colour}" clip-path="url(#${this.inside})" ${place} r="4"/>`;
    });
    const place = this.toX(x);
    const line = `<line x1="${place}" x2="${place}" y1="${MARGIN.top}" y2="${CHART_HEIGHT - MARGIN.bottom}"/>`;
    cursor.innerHTML = line + dots.join("");
    // 1.23K is no step that one finds in a log.
    const exact = this.xName === "step" ? x.toLocaleString("en") : compact(x);
    this.readout.textContent =
      `${this.xName} ${exact}: ` + near.map(({ each, found }) => `${each.name} ${compact(found[1])}`).join(", ");
  }
}
Chart.count = 0;

function range(values) {
  return values.reduce(([low, high], value) => [Math.min(low, value), Math.max(high, value)], [Infinity, -Infinity]);
}

function padded([low, high]) {
  const room = (high - low || Math.abs(high) || 1) * 0.06;
  return [low - room, high + room];
}

// Round numbers inside a range.
function ticks([low, high], count) {
  const rough = (high - low) / count || 1;
  const size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * size).find((each) => each >= rough);
  const found = [];
  for (let tick = Math.ceil(low / step) * step; tick <= high + step * 1e-9; tick += step) {
    found.push(Math.abs(tick) < step * 1e-9 ? 0 : tick);
  }
  return found;
}
