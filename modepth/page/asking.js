// Asking the server: what it answers, in one piece or in events, and what kept it from answering.

class Trouble extends Error {
  constructor(kind, message, seconds = 2) {
    super(message);
    Object.assign(this, { kind, seconds });
  }
}

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

async function askValue(path, options = {}) {
  const response = await ask(path, options);
  try {
    return await response.json();
  } catch (error) {
    throw options.signal?.aborted ? error : new Trouble("gone", ""); // stopped midway
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
