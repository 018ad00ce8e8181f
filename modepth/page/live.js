// The served page: asks the server for the depth of the text in the box, lets it generate, follows a run that trains.
// One task at a time: a new one ends the one before. What the server cannot do now is tried again, and said.

const EXAMPLES = {
  "A function": `def read_lines(path, encoding="utf-8"):
    """Return the lines of a file."""
    with open(path, encoding=encoding) as file:
        return [line.rstrip("\\n") for line in file]
`,
  "A class": `class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)
`,
  English: "The router looks at each token and decides whether the next layer should spend anything on it.",
  Repetition: "one two three one two three one two three one two three one two three",
  Numbers: "1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048",
};
const TYPING_PAUSE = 250; // milliseconds
const FOLLOW_PAUSE = 2000;
const WORDS = {
  busy: "The server is busy with other requests. Trying again",
  loading: "The server is still loading the model. Trying again",
  gone: "The server cannot be reached: it may have been stopped. Trying again",
};

const find = (id) => document.getElementById(id);
const view = new DepthView(find("shown"), "The text");
const curves = new CurvesView(find("curves"));
let facts = null; // what /v1/models says of the model
let thresholds = []; // of the routed layers, at the setting of the dial
let task = new AbortController();
let timer = null;

class Trouble extends Error {
  constructor(kind, message, seconds = 2) {
    super(message);
    Object.assign(this, { kind, seconds });
  }
}

// -- asking

async function ask(path, { body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : {};
  let response;
  try {
    response = await fetch(path, { ...options, signal });
  } catch (error) {
    throw signal?.aborted ? error : new Trouble("gone", "");
  }
  if (response.ok) return response;
  const told = await response.json().catch(() => null);
  const kind = { 429: "busy", 503: "loading" }[response.status] ?? "refused";
  const message = told?.error?.message ?? `The server answered ${response.status}.`;
  throw new Trouble(kind, message, Number(response.headers.get("Retry-After")) || 2);
}

// Do it, again where that may help, until it is done or something else is asked for.
async function persist(signal, attempt) {
  for (;;) {
    try {
      const result = await attempt();
      say("");
      return result;
    } catch (error) {
      if (signal.aborted) return null;
      if (!(error instanceof Trouble) || !(error.kind in WORDS)) {
        say(error.message, "refused");
        return null;
      }
      say(`${WORDS[error.kind]} in ${error.seconds} s.`, error.kind);
      await new Promise((done) => setTimeout(done, 1000 * error.seconds));
      if (signal.aborted) return null;
    }
  }
}

function say(text, kind = "") {
  const place = find("message");
  place.hidden = !text;
  if (place.textContent !== text) place.textContent = text; // or it would be read aloud again
  place.dataset.kind = kind;
}

function newTask() {
  clearTimeout(timer);
  task.abort();
  task = new AbortController();
  find("stop").disabled = true;
  return task.signal;
}

// -- the depth of the text

async function measure() {
  const signal = newTask();
  const text = find("text").value;
  const busy = find("shown");
  if (!text) {
    view.begin({ ...facts, thresholds: [] });
    showTotals(null, 0);
    find("count").textContent = "Type a text, or take an example.";
    return;
  }
  busy.setAttribute("aria-busy", "true");
  const start = performance.now();
  const body = { text, capacity: capacity() };
  const depth = await persist(signal, async () => (await ask("/v1/depth", { body, signal })).json());
  if (signal.aborted) return;
  busy.setAttribute("aria-busy", "false");
  if (!depth) return;
  thresholds = depth.thresholds;
  view.show(depth);
  find("count").textContent = `${depth.tokens.length} of ${facts.max_length} tokens`;
  showTotals(depth.cost, (1000 * depth.tokens.length) / (performance.now() - start), "read");
}

function capacity() {
  const value = document.querySelector("#dial input:checked")?.value;
  return value ? Number(value) : null;
}

function showTotals(cost, speed, how = "") {
  const share = view.routedShare();
  find("flops").textContent = cost ? percent(cost.flops_share) : "–";
  find("cache").textContent = cost ? bytes(cost.cache_bytes) : "–";
  find("cache-share").textContent = cost
    ? `${percent(cost.cache_bytes / cost.dense_cache_bytes)} of ${bytes(cost.dense_cache_bytes)} dense`
    : "of the dense model's";
  find("routed").textContent = share === null ? "–" : percent(share);
  find("speed").textContent = speed ? compact(Number(speed.toPrecision(3))) : "–";
  find("speed-of").textContent = how || "here, on this server";
}

// -- generating

async function generate() {
  const signal = newTask();
  const prompt = find("text").value || "\n";
  const body = {
    prompt,
    max_tokens: Number(find("most").value),
    temperature: Number(find("temperature").value),
    capacity: capacity(),
    stream: true,
    depth: true,
  };
  find("stop").disabled = false;
  find("shown").setAttribute("aria-busy", "true");
  const response = await persist(signal, () => ask("/v1/completions", { body, signal }));
  if (response) await follow(response, signal);
  if (signal.aborted) return;
  find("stop").disabled = true;
  find("shown").setAttribute("aria-busy", "false");
}

async function follow(response, signal) {
  view.begin({ ...facts, thresholds });
  let [count, first, last, done] = [0, 0, 0, false];
  try {
    for await (const event of events(response)) {
      if (signal.aborted) return;
      if (event === "[DONE]") {
        done = true;
        break;
      }
      const { error, choices } = JSON.parse(event);
      if (error) throw new Trouble("refused", error.message);
      const [{ depth }] = choices;
      const numPrompt = count ? 0 : depth.tokens.length - 1;
      view.add(depth.tokens.slice(0, numPrompt));
      view.add(depth.tokens.slice(numPrompt), true);
      view.fill(depth.layers, depth.scores);
      count += depth.tokens.length - numPrompt;
      last = performance.now();
      first ||= last;
      showTotals(depth.cost, count > 1 ? (1000 * (count - 1)) / (last - first) : 0, "generated");
      find("count").textContent = `${view.items.length} of ${facts.max_length} tokens, ${count} of them new`;
    }
    if (!done) throw new Trouble("gone", "");
  } catch (error) {
    if (signal.aborted) return;
    if (error.kind === "refused") return say(error.message, "refused");
    say("The server stopped in the middle of the answer. What came until then is shown. Waiting for it.", "gone");
    await untilBack(signal);
  }
}

// The data of server-sent events, as they come.
async function* events(response) {
  let rest = "";
  for await (const piece of response.body.pipeThrough(new TextDecoderStream())) {
    const lines = (rest + piece).split("\n\n");
    rest = lines.pop();
    for (const line of lines) yield line.replace(/^data: /, "");
  }
}

async function untilBack(signal) {
  while (!signal.aborted) {
    await new Promise((done) => setTimeout(done, 1000));
    if (await ask("/ready").then(() => true, () => false)) return signal.aborted || say("The server is back.", "back");
  }
}

function stop() {
  newTask();
  find("shown").setAttribute("aria-busy", "false");
}

// -- a run that trains

async function followRun() {
  const never = new AbortController().signal;
  let [rows, log, name] = [[], "", ""];
  for (;;) {
    if (!find("training").hidden) {
      const news = await persist(never, async () => (await ask(`/v1/run?start=${rows.length}&log=${log}`)).json());
      if (!news) return;
      const changed = news.rows.length > 0 || log !== news.log;
      rows = [...rows.slice(0, news.start), ...news.rows];
      ({ log, run: name } = news);
      if (changed) curves.show({ [name]: rows });
      const last = rows.at(-1);
      const ago = news.seconds_since === null ? "" : `, written ${Math.round(news.seconds_since)} s ago`;
      find("progress").textContent = last
        ? `${name}: step ${last.step}${ago}. New rows appear as they are logged.`
        : `${name}: no rows yet.`;
    }
    await new Promise((done) => setTimeout(done, FOLLOW_PAUSE));
  }
}

function choose(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    find(each.getAttribute("aria-controls")).hidden = !chosen;
  }
  tab.focus();
}

// -- the controls

function showModel(card) {
  facts = card.modepth;
  const routed = facts.routed_layers.length;
  const layers = `${facts.num_layers} layers, ${routed ? `${routed} of them` : "none"} routed`;
  const size = `${compact(facts.num_parameters)} parameters, context of ${facts.max_length} tokens`;
  find("model").textContent = `Model ${card.id}: ${layers}, ${size}`;
  find("most").max = facts.max_length;
  const settings = [["", facts.capacity === null ? "dense" : `as trained (${percent(facts.capacity)})`]];
  settings.push(...facts.dial.map((share) => [share, percent(share)]));
  find("dial").append(
    ...settings.map(([value, text], number) =>
      element(
        "label",
        {},
        element("input", { type: "radio", name: "capacity", value, checked: number === 0, onchange: measure }),
        element("span", { text }),
      ),
    ),
  );
  find("dial").hidden = settings.length < 2;
  find("views").hidden = !facts.log;
  if (facts.log) followRun();
}

function later() {
  newTask();
  timer = setTimeout(measure, TYPING_PAUSE);
}

async function begin() {
  for (const [name, text] of Object.entries(EXAMPLES)) {
    const take = () => {
      find("text").value = text;
      measure();
    };
    find("examples").append(element("button", { text: name, type: "button", onclick: take }));
  }
  find("text").value ||= Object.values(EXAMPLES)[0];
  const card = await persist(task.signal, async () => (await (await ask("/v1/models")).json()).data[0]);
  if (!card) return;
  showModel(card);
  find("text").addEventListener("input", later);
  find("generate").addEventListener("click", generate);
  find("stop").addEventListener("click", stop);
  document.addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) generate();
    if (event.key === "Escape" && !find("stop").disabled) stop();
  });
  for (const tab of document.querySelectorAll("[role=tab]")) {
    tab.addEventListener("click", () => choose(tab));
    tab.addEventListener("keydown", (event) => {
      if (["ArrowLeft", "ArrowRight"].includes(event.key)) choose(tab.nextElementSibling ?? tab.previousElementSibling);
    });
  }
  measure();
}

begin();
