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

let model = "default";
let messages = []; // the conversation as it is sent
let running = null; // AbortController of what streams now
let key = readKey();

async function begin() {
  try {
    model = await fetchModel(key);
    byId("model").textContent = model;
    byId("key-form").hidden = true;
    return true;
  } catch (error) {
    showError(error);
    return false;
  }
}

async function answer() {
  const text = prompt.value.trim();
  if (!text || running || !settingsAreValid()) return;
  const mode = new FormData(byId("composer")).get("mode");
  const settings = mode === "compare" ? withSeed(readSettings(settingsForm)) : readSettings(settingsForm);
  const asked = [...messages, { role: "user", content: text }];
  byId("error").textContent = "";
  prompt.value = "";
  setRunning(new AbortController());
  const question = conversation.addUser(text);
  const titles = mode === "compare" ? ["With speculation", "Without speculation"] : ["Answer"];
  const { turn, answers } = conversation.addAnswers(titles);
  const first = new Run({ speculation: mode !== "off" });
  let failure = null;
  try {
    byId("status").textContent = mode === "compare" ? "Answering with speculation…" : "Answering…";
    await stream(first, answers[0], settings, asked, null);
    if (mode === "compare") {
      // One after the other: side by side they would slow each other.
      byId("status").textContent = "Answering without speculation…";
      const second = new Run({ speculation: false });
      await stream(second, answers[1], settings, asked, first);
      inspector.select(first, answers[0], second);
      conversation.addNote(comparison(first, second));
    }
    byId("status").textContent = summaryOf(first);
  } catch (error) {
    failure = error;
  }
  answers.filter((view) => view.root.ariaBusy === "true").forEach((view) => view.finish("")); // never begun
  setRunning(null);
  if (first.content) {
    messages = [...asked, { role: "assistant", content: first.content }];
  } else if (failure) { // nothing came of it: the question may be asked again
    question.remove();
    turn.remove();
    prompt.value ||= text;
  }
  if (failure) showError(failure);
}

// Streams one answer into its column. `beside` is the run that it is compared with, and which stays in sight.
async function stream(run, view, settings, asked, beside) {
  runs.set(view, { run, other: null });
  if (beside) inspector.select(beside, inspector.view, run);
  else inspector.begin(run, view);
  let ending = "stopped";
  try {
    for await (const chunk of streamChat(chatBody(settings, asked, model, run.speculation), key, running.signal)) {
      const pieces = run.add(chunk, performance.now());
      if (pieces.length) view.show(pieces);
      inspector.update();
    }
    ending = run.finishReason === "length" ? "cut at its length" : "";
  } finally {
    view.finish([summaryOf(run), ending].filter(Boolean).join("; "));
    inspector.update({ finished: true });
    if (beside) runs.set(inspector.view, { run: beside, other: run });
  }
}

function summaryOf(run) {
  const [speed, length] = [run.speed(), run.acceptLength()];
  return [
    `${run.numTokens} tokens`,
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
  if (!await begin()) return;
  keepKey();
  prompt.focus();
});
settingsForm.addEventListener("submit", (event) => event.preventDefault());
byId("colours").addEventListener("change", ({ target }) => log.classList.toggle("plain", !target.checked));
byId("settings-box").open = window.matchMedia(WIDE).matches;
void begin();
