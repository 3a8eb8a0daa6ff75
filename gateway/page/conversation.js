// The conversation as it is shown: turns, answers of one column or two, tokens by origin.

import { element, visible } from "./dom.js";

const NEAR_BOTTOM_PX = 40;

export class Conversation {
  // `onToken` hears which step's token of which answer was clicked.
  constructor(log, onToken) {
    this.log = log;
    this.onToken = onToken;
  }

  addUser(text) {
    const turn = element("article", { class: "turn user" }, element("h3", {}, "You"), element("p", {}, text));
    this.#append(turn);
    return turn;
  }

  // A turn with a column for each title.
  addAnswers(titles) {
    const answers = titles.map((title) => new AnswerView(this, title));
    const turn = element("article", { class: `turn columns-${titles.length}` }, ...answers.map(({ root }) => root));
    this.#append(turn);
    return { turn, answers };
  }

  addNote(text) {
    this.#append(element("p", { class: "note" }, text));
  }

  clear() {
    this.log.replaceChildren();
  }

  // Does `change`, and keeps the end in sight if it was.
  keepEnd(change) {
    const { scrollHeight, scrollTop, clientHeight } = this.log;
    const atEnd = scrollHeight - scrollTop - clientHeight < NEAR_BOTTOM_PX;
    change();
    if (atEnd) this.log.scrollTop = this.log.scrollHeight;
  }

  #append(node) {
    this.log.append(node);
    this.log.scrollTop = this.log.scrollHeight;
  }
}

export class AnswerView {
  constructor(conversation, title) {
    this.conversation = conversation;
    this.spans = []; // by step
    this.marked = -1; // the step whose tokens are marked
    this.waiting = []; // what is shown with the next frame
    this.places = {
      reasoning: element("div", { class: "text reasoning", hidden: "" }),
      content: element("div", { class: "text" }),
    };
    this.summary = element("p", { class: "muted summary" });
    this.root = element(
      "section", { class: "answer", "aria-busy": "true" },
      element("h3", {}, title), this.places.reasoning, this.places.content, this.summary,
    );
    this.root.addEventListener("click", ({ target }) => {
      const step = target.dataset?.step;
      if (step !== undefined) conversation.onToken(this, Number(step));
    });
  }

  // Shows what came, a frame's worth at a time: laying the page out for every token would slow a fast stream.
  show(pieces) {
    if (!this.waiting.length) requestAnimationFrame(() => this.#flush());
    this.waiting.push(...pieces);
  }

  // Nothing more comes. What is said below the answer stays if nothing is given.
  end(summary) {
    this.#flush();
    this.root.setAttribute("aria-busy", "false");
    if (summary) this.conversation.keepEnd(() => this.summary.replaceChildren(summary));
  }

  // Marks the tokens of one step; of -1, none.
  mark(step) {
    this.spans[this.marked]?.forEach((span) => span.classList.remove("current"));
    this.marked = step;
    this.spans[step]?.forEach((span) => span.classList.add("current"));
  }

  #flush() {
    const pieces = this.waiting.splice(0);
    if (!pieces.length) return;
    this.conversation.keepEnd(() => {
      for (const { kind, text, token } of pieces) {
        this.places[kind].hidden = false;
        this.places[kind].append(token ? this.#span(text, token) : text);
      }
    });
  }

  #span(text, token) {
    const drafter = token.drafter && token.origin === "accepted" ? `, ${token.drafter}` : "";
    const span = element("span", {
      class: `token ${token.origin}${token.step === this.marked ? " current" : ""}`, "data-step": token.step,
      title: `${visible(text)}: ${token.origin}, step ${token.step}${drafter}`,
    }, text);
    (this.spans[token.step] ??= []).push(span);
    return span;
  }
}
