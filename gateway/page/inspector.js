// The right side: figures, the tree of a step, charts; of one answer at a time.

import { drawAcceptLengths, drawSpeeds } from "./charts.js";
import { byId, showFigures } from "./dom.js";
import { TreeView, nodeFigures } from "./tree.js";

const CHARTS_PACE_MS = 150;
const TREE_PACE_MS = 700; // a tree stays long enough to be seen drafted, then verified

export class Inspector {
  constructor() {
    this.run = null;
    this.other = null; // the run beside it, without speculation
    this.view = null;
    this.step = 0;
    this.chartsAtMs = this.treeAtMs = -Infinity;
    this.slider = byId("step");
    this.follow = byId("follow");
    this.invitation = byId("tree-caption").textContent;
    this.tree = new TreeView(byId("tree-box"), (item) => showFigures(byId("node"), nodeFigures(item)));
    this.slider.addEventListener("input", () => this.#choose(Number(this.slider.value)));
    byId("step-back").addEventListener("click", () => this.#choose(this.step - 1, Math.min(this.step, 1)));
    byId("step-on").addEventListener("click", () => this.#choose(this.step + 1));
    this.follow.addEventListener("change", () => this.update({ finished: true }));
  }

  // Shows an answer from its beginning.
  begin(run, view) {
    this.follow.checked = true;
    this.select(run, view);
  }

  // Shows an answer, and the one beside it if there is one.
  select(run, view, other = null) {
    if (run !== this.run) {
      this.view?.mark(-1);
      this.step = 0;
      this.tree.clear();
      showFigures(byId("node"), []);
      byId("tree-caption").textContent = "";
    }
    Object.assign(this, { run, view, other });
    this.update({ finished: true });
  }

  // Shows a step of an answer, and stays there.
  showStep(run, view, other, step) {
    if (run !== this.run) this.select(run, view, other);
    this.#choose(step, 0); // the first token is of the prefill, which slider and buttons leave out
  }

  clear() {
    Object.assign(this, { run: null, view: null, other: null, step: 0 });
    this.tree.clear();
    byId("tree-caption").textContent = this.invitation;
    for (const id of ["node", "figures", "accept-chart", "speed-chart"]) byId(id).replaceChildren();
    this.#steps(0);
  }

  // Draws what is new; while an answer streams, not more often than one can see.
  update({ finished = false } = {}) {
    if (!this.run) return;
    const nowMs = performance.now();
    if (finished || nowMs - this.chartsAtMs >= CHARTS_PACE_MS) {
      this.chartsAtMs = nowMs;
      this.#figures();
    }
    const newest = this.run.steps.length - 1;
    const due = finished || (newest !== this.step && nowMs - this.treeAtMs >= TREE_PACE_MS);
    if (this.follow.checked && due && newest > 0 && !this.tree.busy) {
      this.treeAtMs = nowMs;
      this.#draw(newest);
    }
  }

  #figures() {
    const { run, other } = this;
    const told = run.usage?.speculation;
    const mean = run.acceptLength();
    showFigures(byId("figures"), [
      ["Speed", rate(run)],
      ["Speed when off", other && rate(other)],
      ["Accept length", mean && mean.toFixed(2)],
      ["First token", run.firstTokenMs() && `${run.firstTokenMs().toFixed(0)} ms`],
      ["Tokens", run.numTokens],
      ["Steps", told?.verify_steps ?? (run.acceptLengths().length || null)],
      ["Drafted", told?.draft_tokens],
      ["Accepted", told?.accepted_tokens],
    ]);
    drawAcceptLengths(byId("accept-chart"), run.acceptLengths(), mean);
    const series = [{ name: run.speculation ? "on" : "off", points: run.speeds() }];
    if (other) series.push({ name: "off", points: other.speeds() });
    drawSpeeds(byId("speed-chart"), series);
    this.#steps(run.steps.length - 1);
  }

  #steps(count) {
    const most = Math.max(count, 0);
    this.slider.min = Math.min(this.step, 1, most);
    this.slider.max = most;
    this.slider.disabled = most < 1;
    this.slider.value = this.step;
    this.slider.setAttribute("aria-valuetext", `step ${this.step} of ${most}`);
    byId("step-back").setAttribute("aria-disabled", this.step <= 1); // `disabled` would drop the focus
    byId("step-on").setAttribute("aria-disabled", this.step >= most);
  }

  #choose(step, least = 1) {
    if (!this.run) return;
    const newest = this.run.steps.length - 1;
    this.follow.checked = false;
    this.#draw(Math.min(Math.max(step, Math.min(least, newest)), newest));
  }

  #draw(number) {
    this.step = number;
    const step = this.run.steps[number];
    const before = this.run.steps[number - 1]?.tokens.at(-1);
    byId("tree-caption").textContent = caption(number, step);
    this.tree.draw(step, before, `Tree of step ${number}`);
    this.view.mark(number);
    this.#steps(this.run.steps.length - 1);
  }
}

// Of an answer that came in one piece nothing can be said.
function rate(run) {
  const speed = run.speed();
  if (speed === null) return run.usage ? "came at once" : null;
  return `${speed.toFixed(1)} tokens/s`;
}

function caption(number, { tree }) {
  if (number === 0) return "The prompt was read, and the first token drawn.";
  if (!tree) return `Step ${number}: nothing was drafted.`;
  const accepted = tree.nodes.filter((node) => node.accepted).length;
  const times = `drafted in ${ms(tree.draft_us)}, step of ${ms(tree.verify_us)}`;
  return `Step ${number}, ${tree.drafter}: ${accepted} of ${tree.nodes.length} accepted; ${times}.`;
}

function ms(us) {
  return us < 1000 ? `${us} µs` : `${(us / 1000).toFixed(1)} ms`;
}
