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
const pause = (milliseconds) => new Promise((done) => setTimeout(done, milliseconds));
const never = new AbortController().signal; // of what nothing else ends
const view = new DepthView(find("shown"), "The text");
const curves = new CurvesView(find("curves"));
let card = null; // what /v1/models says of the model
let facts = null; // the part of it that is ours
let missed = false; // the server went away since: it may come back with another model
let thresholds = {}; // of the routed layers, by the setting of the dial
let task = new AbortController();
let timer = null;

// Do it, again where that may help, until it is done or something else is asked for. What hinders is said in `place`:
// each view has its own, so that none wipes off what another has said.
async function persist(signal, attempt, place = "message") {
  for (;;) {
    try {
      if (missed) await askModel();
      const result = await attempt();
      say("", "", place);
      return result;
    } catch (error) {
      if (signal.aborted) return null;
      if (!(error instanceof Trouble) || !(error.kind in WORDS)) {
        say(error.message, "refused", place);
        return null;
      }
      missed ||= error.kind !== "busy";
      say(`${WORDS[error.kind]} in ${error.seconds} s.`, error.kind, place);
      await pause(1000 * error.seconds);
      if (signal.aborted) return null;
    }
  }
}

function say(text, kind = "", place = "message") {
  const message = find(place);
  message.hidden = !text;
  if (message.textContent !== text) message.textContent = text; // or it would be read aloud again
  message.dataset.kind = kind;
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
    say("");
    view.begin({ ...facts, thresholds: [] });
    showTotals(null, 0);
    find("count").textContent = "Type a text, or take an example.";
    return;
  }
  busy.setAttribute("aria-busy", "true");
  const start = performance.now();
  const depth = await persist(signal, () => askDepth(text, signal));
  if (signal.aborted) return;
  busy.setAttribute("aria-busy", "false");
  if (!depth) return;
  view.show(depth);
  find("count").textContent = `${depth.tokens.length} of ${facts.max_length} tokens`;
  showTotals(depth.cost, (1000 * depth.tokens.length) / (performance.now() - start), "read");
}

async function askDepth(text, signal) {
  const body = { text, capacity: capacity() };
  const depth = await askValue("/v1/depth", { body, signal });
  thresholds[body.capacity] = depth.thresholds;
  return depth;
}

function capacity() {
  const value = document.querySelector("#dial input:checked")?.value;
  return value ? Number(value) : null;
}

function showTotals(cost, speed, how = "") {
  for (const [name, text] of Object.entries(costTexts(cost, view.routedShare()))) find(name).textContent = text;
  find("speed").textContent = speed ? compact(Number(speed.toPrecision(3))) : "–";
  find("speed-of").textContent = how || "here, on this server";
}

// -- generating

async function generate() {
  const signal = newTask();
  const body = {
    prompt: find("text").value || "\n",
    max_tokens: Number(find("most").value),
    temperature: Number(find("temperature").value),
    stream: true,
    depth: true,
  };
  find("stop").disabled = false;
  find("shown").setAttribute("aria-busy", "true");
  const response = await persist(signal, async () => {
    body.capacity = capacity();
    // The answer does not tell the thresholds. They belong to the setting, whatever the text: one token has them too.
    if (!thresholds[body.capacity]) await askDepth("\n", signal);
    return ask("/v1/completions", { body, signal });
  });
  if (response) await follow(response, thresholds[body.capacity], signal);
  if (signal.aborted) return;
  find("stop").disabled = true;
  find("shown").setAttribute("aria-busy", "false");
}

async function follow(response, thresholds, signal) {
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

async function untilBack(signal) {
  while (!signal.aborted) {
    await pause(1000);
    if (await askModel().then(() => true, () => false)) return signal.aborted || say("The server is back.", "back");
  }
}

function stop() {
  newTask();
  say("");
  find("shown").setAttribute("aria-busy", "false");
}

// -- a run that trains

async function followRun() {
  let [rows, log, name] = [[], "", ""];
  for (;; await pause(FOLLOW_PAUSE)) {
    if (find("training").hidden) continue;
    const before = card;
    const news = await persist(never, () => askValue(`/v1/run?start=${rows.length}&log=${log}`), "run-message");
    if (card !== before) measure(); // or the other view would still show what another model made of the text
    if (news) {
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
  }
}

function choose(tab) {
  for (const each of document.querySelectorAll("[role=tab]")) {
    const chosen = each === tab;
    each.setAttribute("aria-selected", chosen);
    each.tabIndex = chosen ? 0 : -1;
    find(each.getAttribute("aria-controls")).hidden = !chosen;
  }
}

// -- the controls

async function askModel() {
  const found = (await askValue("/v1/models")).data[0];
  missed = false;
  if (JSON.stringify(found) === JSON.stringify(card)) return;
  card = found;
  facts = card.modepth;
  thresholds = {};
  showModel();
}

function showModel() {
  const routed = facts.routed_layers.length;
  const layers = `${facts.num_layers} layers, ${routed ? `${routed} of them` : "none"} routed`;
  const size = `${compact(facts.num_parameters)} parameters, context of ${facts.max_length} tokens`;
  find("model").textContent = `Model ${card.id}: ${layers}, ${size}`;
  find("most").max = facts.max_length;
  showDial([["", facts.capacity === null ? "dense" : `as trained (${percent(facts.capacity)})`]]);
  if (!facts.log) choose(find("tab-depth"));
  find("views").hidden = !facts.log;
}

// What was chosen stays so, where the model has that setting.
function showDial(settings) {
  const chosen = facts.dial.includes(capacity()) ? capacity() : "";
  settings.push(...facts.dial.map((share) => [share, percent(share)]));
  find("dial").replaceChildren(
    find("dial").querySelector("legend"),
    ...settings.map(([value, text]) =>
      element(
        "label",
        {},
        element("input", { type: "radio", name: "capacity", value, checked: value === chosen, onchange: measure }),
        element("span", { text }),
      ),
    ),
  );
  find("dial").hidden = settings.length < 2;
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
    find("examples").append(element("button", { text: name, type: "button", onclick: take, disabled: true }));
  }
  find("text").value ||= Object.values(EXAMPLES)[0];
  while (!card) {
    await persist(never, askModel);
    if (!card) await pause(FOLLOW_PAUSE);
  }
  document.querySelectorAll("#examples button, #generate").forEach((each) => (each.disabled = false));
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
      if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
      const other = tab.nextElementSibling ?? tab.previousElementSibling;
      choose(other);
      other.focus();
    });
  }
  measure();
  followRun();
}

begin();
