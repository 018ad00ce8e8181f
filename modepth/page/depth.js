// The depth of a text: its tokens shaded by how many routed layers computed them, and the map of tokens and layers.
// A depth is what /v1/depth answers; a stream adds tokens, and fills in what the layers did once a token was read.

const LABEL_LETTERS = 10;
const PART = "◦"; // where a character takes several tokens, all but its last one are without text

// What was spent, by the names of the cards that say it.
function costTexts(cost, routedShare) {
  return {
    flops: cost ? percent(cost.flops_share) : "–",
    cache: cost ? bytes(cost.cache_bytes) : "–",
    "cache-share": cost
      ? `${percent(cost.cache_bytes / cost.dense_cache_bytes)} of ${bytes(cost.dense_cache_bytes)} dense`
      : "of the dense model's",
    routed: routedShare === null ? "–" : percent(routedShare),
  };
}

class DepthView {
  constructor(place, label) {
    this.tokens = element("div", { class: "tokens", role: "group", "aria-label": `${label}: tokens shaded by depth` });
    this.legend = element("p", { class: "legend" });
    this.readout = element("p", { class: "readout", role: "status" });
    this.names = element("div", { class: "layer-names", "aria-hidden": "true" });
    this.columns = element("div", { class: "columns", "aria-hidden": "true" });
    this.map = element(
      "div",
      {
        class: "map",
        tabindex: "0",
        role: "application",
        "aria-label": `${label}: map of tokens and layers. Arrow keys move, Home and End jump.`,
        onkeydown: (event) => this.press(event),
        onfocus: () => this.point(this.at ?? { place: 0, layer: this.top() }),
      },
      this.names,
      this.columns,
    );
    this.tokens.addEventListener("pointerover", (event) => this.over(event.target.closest(".token"), null));
    this.tokens.addEventListener("click", (event) => this.over(event.target.closest(".token"), null, true));
    for (const kind of ["pointerover", "click"]) {
      this.columns.addEventListener(kind, (event) => this.overMap(event.target));
    }
    place.replaceChildren(this.tokens, this.legend, this.readout, this.map);
    this.begin({ num_layers: 0, routed_layers: [], thresholds: [] });
  }

  // -- what is shown

  begin(model) {
    this.model = model;
    this.items = [];
    this.numFilled = 0;
    this.at = null;
    this.tokens.replaceChildren();
    this.columns.replaceChildren();
    const layers = Array.from({ length: model.num_layers }, (_, number) => model.num_layers - 1 - number);
    this.kinds = layers.map((layer) => (model.routed_layers.includes(layer) ? "routed" : "dense"));
    const name = (layer, kind) => element("span", { class: kind, text: kind === "routed" ? `L${layer}` : "" });
    this.names.replaceChildren(...layers.map((layer, row) => name(layer, this.kinds[row])));
    this.showLegend();
    this.say("");
  }

  show(depth) {
    this.begin(depth);
    this.add(depth.tokens.map((token) => token.text));
    this.fill(depth.tokens.map((token) => token.layers), depth.tokens.map((token) => token.scores));
  }

  // The totals of a depth that is shown, above it; of `num_read` tokens, where only the last of them are shown.
  showTotals({ cost, tokens, num_read: count = tokens.length }) {
    const texts = costTexts(cost, this.routedShare());
    const card = (name, value, of) => {
      const under = element("dd", { class: "quiet", text: of });
      return element("div", {}, element("dt", { text: name }), element("dd", { text: value }), under);
    };
    const cards = element(
      "dl",
      { class: "totals" },
      card("FLOPs spent", texts.flops, "of the dense model's"),
      card("Cache", texts.cache, texts["cache-share"]),
      card("Routed", texts.routed, "of tokens, in routed layers"),
    );
    const all = `FLOPs and cache are those of all ${count} tokens that were read. The last ${tokens.length} are shown.`;
    this.tokens.before(cards, ...(count > tokens.length ? [element("p", { class: "quiet", text: all })] : []));
  }

  // New tokens, which no layer has read yet; `made`: by the model.
  add(texts, made = false) {
    const spans = document.createDocumentFragment();
    const columns = document.createDocumentFragment();
    for (const text of texts) {
      const place = this.items.length;
      const span = element("span", { class: `token unread${made ? " made" : ""}`, "data-place": place });
      span.textContent = text.replaceAll("\n", "⏎\n");
      const label = element("span", { class: "label", text: visible(text, LABEL_LETTERS) || PART });
      const column = element("div", { class: "column unread", "data-place": place });
      column.append(...this.kinds.map((kind) => element("i", { class: kind })), label);
      this.items.push({ text, span, column, layers: null, scores: null });
      spans.append(span);
      columns.append(column);
    }
    const following = this.map.scrollLeft + this.map.clientWidth >= this.map.scrollWidth - 40;
    this.tokens.append(spans);
    this.columns.append(columns);
    if (made) this.legend.querySelector(".generated")?.removeAttribute("hidden");
    if (made && following) this.map.scrollLeft = this.map.scrollWidth;
  }

  // What the layers did with the next tokens: those that computed each, and the scores of the routed ones.
  fill(layers, scores) {
    const { routed_layers: routed, num_layers: count } = this.model;
    layers.forEach((used, number) => {
      const item = this.items[this.numFilled++];
      item.layers = used;
      item.scores = scores?.[number] ?? null;
      const share = routed.length ? routed.filter((layer) => used.includes(layer)).length / routed.length : 1;
      item.span.classList.remove("unread");
      item.column.classList.remove("unread");
      item.span.dataset.depth = used.length;
      item.span.style.setProperty("--depth", share);
      this.kinds.forEach((kind, row) => {
        const computed = used.includes(count - 1 - row);
        // A layer without a router may skip too, where a router before it decides for all that follow.
        item.column.children[row].className = `${kind} ${!computed ? "skipped" : kind === "dense" ? "all" : "computed"}`;
      });
    });
    if (this.at) this.point(this.at);
  }

  // The share of tokens that the routed layers computed, of those that were read.
  routedShare() {
    const { routed_layers: routed } = this.model;
    const read = this.items.slice(0, this.numFilled);
    if (!routed.length || !read.length) return null;
    const computed = read.flatMap((item) => routed.filter((layer) => item.layers.includes(layer))).length;
    return computed / (routed.length * read.length);
  }

  showLegend() {
    const count = this.model.routed_layers.length;
    if (!this.model.num_layers) return this.legend.replaceChildren();
    if (!count) return this.legend.replaceChildren("A dense model: every layer computes every token.");
    const steps = count <= 6 ? [...Array(count + 1).keys()] : [0, Math.round(count / 2), count];
    const swatches = steps.map((step) => {
      const swatch = element("span", { class: "swatch", text: step });
      swatch.style.setProperty("--depth", step / count);
      return swatch;
    });
    const key = (kind, text) => element("span", { class: "key" }, element("i", { class: kind }), text);
    this.legend.replaceChildren(
      element("span", { class: "key" }, "computed by ", ...swatches, ` of ${count} routed layer${count > 1 ? "s" : ""}`),
      key("computed", "computed"),
      key("skipped", "skipped"),
      key("all", "no router"),
      element("span", { class: "key generated", text: "underlined: generated", hidden: true }),
    );
  }

  // -- looking closer

  top() {
    return this.model.routed_layers.at(-1) ?? this.model.num_layers - 1;
  }

  over(span, layer, scroll = false) {
    if (!span) return;
    this.point({ place: Number(span.dataset.place), layer }, scroll);
  }

  overMap(target) {
    const column = target.closest(".column");
    if (!column) return;
    const row = [...column.children].indexOf(target);
    const layer = row >= 0 && row < this.model.num_layers ? this.model.num_layers - 1 - row : null;
    this.point({ place: Number(column.dataset.place), layer });
  }

  press(event) {
    const along = { ArrowLeft: -1, ArrowRight: 1, Home: -1e9, End: 1e9 }[event.key] ?? 0;
    const upward = { ArrowUp: 1, ArrowDown: -1 }[event.key] ?? 0;
    if (!(along || upward) || !this.items.length) return;
    event.preventDefault();
    const within = (value, count) => Math.max(0, Math.min(count - 1, value));
    const at = { place: 0, ...this.at, layer: this.at?.layer ?? this.top() };
    const place = within(at.place + along, this.items.length);
    this.point({ place, layer: within(at.layer + upward, this.model.num_layers) }, true);
  }

  point(at, scroll = false) {
    const item = this.items[at.place];
    if (!item) return;
    for (const old of [this.tokens, this.columns]) {
      old.querySelectorAll(".here").forEach((each) => each.classList.remove("here"));
    }
    this.at = at;
    item.span.classList.add("here");
    const cell = at.layer === null ? item.column : item.column.children[this.model.num_layers - 1 - at.layer];
    cell.classList.add("here");
    if (scroll) {
      const [left, width, start] = [item.column.offsetLeft, this.map.clientWidth, this.map.scrollLeft];
      if (left < start + 48 || left > start + width - 48) this.map.scrollLeft = left - width / 2;
    }
    this.say(this.describe(at, item));
  }

  describe({ place, layer }, item) {
    const token = `Token ${place + 1} ${item.text ? `“${visible(item.text)}”` : "(a part of a character)"}`;
    const { routed_layers: routed, num_layers: count } = this.model;
    if (item.layers === null) return `${token}: not read yet, so no layer has computed it.`;
    const used = item.layers;
    if (layer === null) return `${token}: computed by ${used.length} of ${count} layers (${used.join(", ")}).`;
    const number = routed.indexOf(layer);
    const done = used.includes(layer) ? "computed" : "skipped";
    if (number < 0) return `${token}, layer ${layer}: not a routed layer, ${done}.`;
    const score = item.scores?.[number];
    const threshold = this.model.thresholds?.[number];
    let why = "";
    if (score !== undefined && score !== null) {
      why = `, score ${score.toFixed(2)}`;
      if (threshold !== null && threshold !== undefined) why += ` (threshold ${threshold.toFixed(2)})`;
    }
    return `${token}, layer ${layer}${why}: ${done === "computed" ? "routed" : "not routed"}, ${done}.`;
  }

  say(text) {
    this.readout.textContent = text || "Point at a token or a cell, or move over the map with the arrow keys.";
  }
}
