// Joins the parts: what is asked, answered, stopped, and what goes wrong.

import { ApiError, fetchModel, streamChat } from "./api.js";
import { Conversation } from "./conversation.js";
import { byId } from "./dom.js";
import { Inspector } from "./inspector.js";
import { Run } from "./run.js";
import { chatBody, readSettings, withSeed } from "./settings.js";

const KEY = "outrider-key";
const WIDE = "(min-width: 64rem)";

const [prompt, send, stop, log] = ["prompt", "send", "stop", "log"].map(byId);
const settingsForm = byId("settings");
const runs = new WeakMap(); // by the view that shows it: {run, other}
const inspector = new Inspector();
const conversation = new Conversation(log, (view, step) => {
  const { run, other } = runs.get(view);
  inspector.showStep(run, view, other, step);
});

let model = "default"; // until its name is known
let messages = []; // the conversation as it is sent
let running = null; // AbortController of what streams now
let key = readKey();
let waiting = 0; // for a server that is away

// Asks which model there is, again and again while the server is away.
async function begin() {
  clearTimeout(waiting);
  try {
    const name = await fetchModel(key);
    if (model !== "default" && model !== name) byId("status").textContent = `The server now serves ${name}.`;
    byId("model").textContent = model = name;
    byId("key-form").hidden = true;
    keepKey();
    return true;
  } catch (error) {
    if (error.isAway) {
      byId("model").textContent = error.message;
      waiting = setTimeout(begin, 1000 * (error.retryAfterS || 1));
    } else {
      showError(error);
    }
    return false;
  }
}

async function answer() {
  const text = prompt.value.trim();
  if (!text || running) return;
  byId("error").textContent = "";
  if (!settingsAreValid()) return;
  const mode = new FormData(byId("composer")).get("mode");
  const settings = mode === "compare" ? withSeed(readSettings(settingsForm)) : readSettings(settingsForm);
  const before = messages;
  const asked = [...before, { role: "user", content: text }];
  prompt.value = "";
  setRunning(new AbortController());
  const question = conversation.addUser(text);
  const titles = mode === "compare" ? ["With speculation", "Without speculation"] : ["Answer"];
  const { turn, answers } = conversation.addAnswers(titles);
  const first = { run: new Run({ speculation: mode !== "off" }), view: answers[0] };
  let failure = null;
  try {
    byId("status").textContent = mode === "compare" ? "Answering with speculation…" : "Answering…";
    runs.set(first.view, { run: first.run, other: null });
    inspector.begin(first.run, first.view);
    await stream(first, settings, asked);
    if (mode === "compare") await compare(first, answers[1], settings, asked);
    byId("status").textContent = summaryOf(first.run);
  } catch (error) {
    failure = error;
  }
  answers.forEach((view) => view.end()); // one may never have begun
  setRunning(null);
  if (failure?.isAway) void begin(); // it may come back with another model
  if (messages !== before) return; // a new chat has begun meanwhile
  if (first.run.content || !failure) { // what is shown is sent on, an empty answer too
    messages = [...asked, { role: "assistant", content: first.run.content }];
  } else { // nothing came of it: the question may be asked again
    question.remove();
    turn.remove();
    prompt.value ||= text;
  }
  if (failure) showError(failure);
}

// Answers again without speculation: afterwards, for at the same time they would slow each other.
async function compare(first, view, settings, asked) {
  const second = { run: new Run({ speculation: false }), view };
  byId("status").textContent = "Answering without speculation…";
  runs.set(first.view, { run: first.run, other: second.run });
  runs.set(view, { run: second.run, other: null });
  inspector.select(first.run, first.view, second.run);
  await stream(second, settings, asked);
  conversation.addNote(comparison(first.run, second.run));
}

// Streams one answer into its column.
async function stream({ run, view }, settings, asked) {
  let ending = "";
  try {
    for await (const chunk of chunksOf(settings, asked, run.speculation)) {
      const pieces = run.add(chunk, performance.now());
      if (pieces.length) view.show(pieces);
      inspector.update();
    }
    if (run.finishReason === "length") ending = "cut at its length";
  } catch (error) {
    ending = error.name === "AbortError" ? "stopped" : "broken off";
    throw error;
  } finally {
    view.end([summaryOf(run), ending].filter(Boolean).join("; "));
    inspector.update({ finished: true });
  }
}

// The chunks of an answer, by the model that is served now where it is not the one that was.
async function* chunksOf(settings, asked, speculation) {
  const chunks = () => streamChat(chatBody(settings, asked, model, speculation), key, running.signal);
  const before = model;
  try {
    yield* chunks();
  } catch (error) {
    if (error.status !== 404 || !(await begin()) || model === before) throw error;
    yield* chunks();
  }
}

function summaryOf(run) {
  const [speed, length] = [run.speed(), run.acceptLength()];
  return [
    `${run.numTokens} ${run.numTokens === 1 ? "token" : "tokens"}`,
    speed && `${speed.toFixed(1)} tokens/s`,
    run.speculation && length && `accept length ${length.toFixed(2)}`,
  ].filter(Boolean).join(", ");
}

function comparison(first, second) {
  const same = first.content === second.content && first.reasoning === second.reasoning;
  const texts = same ? "Both answers are identical" : "The answers differ";
  const [quick, plain] = [first.speed(), second.speed()];
  return quick && plain ? `${texts}; speculation was ${(quick / plain).toFixed(2)} times as fast.` : `${texts}.`;
}

function showError(error) {
  if (error.name === "AbortError") {
    byId("status").textContent = "Stopped.";
    return;
  }
  if (!(error instanceof ApiError)) console.error(error);
  byId("status").textContent = "";
  const wait = error.retryAfterS ? ` Try again in ${error.retryAfterS} s.` : "";
  byId("error").textContent = `${error.message}${wait}`;
  if (error.status === 401) {
    byId("error").textContent = key ? "The server does not know this API key." : "";
    byId("key-form").hidden = false;
    byId("key").focus();
  }
}

function setRunning(controller) {
  const focused = document.activeElement;
  running = controller;
  stop.disabled = !controller;
  send.disabled = Boolean(controller);
  if (controller && focused === send) stop.focus(); // a disabled button would drop the focus
  if (!controller && (focused === stop || focused === document.body)) prompt.focus();
}

function settingsAreValid() {
  if (!settingsForm.checkValidity()) byId("settings-box").open = true; // what is wrong has to be seen
  return settingsForm.reportValidity();
}

function readKey() {
  try {
    return sessionStorage.getItem(KEY) ?? "";
  } catch {
    return ""; // storage is switched off: the key lasts as long as the page
  }
}

function keepKey() {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    return;
  }
}

byId("composer").addEventListener("submit", (event) => {
  event.preventDefault();
  void answer();
});
prompt.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  void answer();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") running?.abort();
});
stop.addEventListener("click", () => running?.abort());
byId("clear").addEventListener("click", () => {
  running?.abort();
  messages = [];
  conversation.clear();
  inspector.clear();
  byId("error").textContent = byId("status").textContent = "";
  prompt.focus();
});
byId("key-form").addEventListener("submit", async (event) => {
  event.preventDefault();
  key = byId("key").value.trim();
  byId("error").textContent = "";
  if (await begin()) prompt.focus();
});
settingsForm.addEventListener("submit", (event) => event.preventDefault());
byId("colours").addEventListener("change", ({ target }) => log.classList.toggle("plain", !target.checked));
byId("settings-box").open = window.matchMedia(WIDE).matches;
void begin();
