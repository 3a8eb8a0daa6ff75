// What is known of one answer while it streams: its text, its steps with their trees, when tokens came. No page here.

const SPEED_WINDOW_MS = 1000;
const SPEED_MIN_EVENTS = 4; // so that a slow stream's speed is not one gap between two tokens

export class Run {
  constructor({ speculation }) {
    this.speculation = speculation; // whether it was asked for
    this.content = "";
    this.reasoning = "";
    this.steps = []; // by number; [0] is the prefill's, which has one token and no tree
    this.arrivals = []; // {atMs, tokens}: tokens so far
    this.numTokens = 0;
    this.usage = null;
    this.finishReason = null;
    this.beganMs = performance.now();
  }

  // Takes one chunk in. Gives what is to be shown of it: [{kind, text, token}], token null where nothing is told.
  add(chunk, atMs) {
    if (chunk.usage) this.usage = chunk.usage;
    const told = chunk.outrider ?? {};
    if (told.tree) this.#step(told.tree.step).tree = told.tree;
    const tokens = told.tokens ?? [];
    for (const token of tokens) {
      if (token.id !== null) this.#step(token.step).tokens.push(token);
    }
    const count = tokens.filter((token) => token.id !== null).length;
    if (count) {
      this.numTokens += count;
      this.arrivals.push({ atMs, tokens: this.numTokens });
    }
    const choice = chunk.choices[0];
    if (!choice) return [];
    this.finishReason = choice.finish_reason ?? this.finishReason;
    return this.#shown(choice.delta, tokens);
  }

  #step(number) {
    while (this.steps.length <= number) this.steps.push({ tokens: [], tree: null });
    return this.steps[number];
  }

  #shown(delta, tokens) {
    const shown = [];
    for (const kind of ["reasoning", "content"]) {
      const text = delta[kind === "content" ? "content" : "reasoning_content"];
      if (!text) continue;
      this[kind] += text;
      // Marks around reasoning are tokens too, but no part of the text: then it is shown plainly.
      const whole = tokens.map((token) => token.text).join("") === text;
      const pieces = whole ? tokens.map((token) => ({ kind, text: token.text, token })) : [{ kind, text, token: null }];
      shown.push(...pieces);
    }
    return shown;
  }

  // Tokens committed by each verify step; the prefill is none.
  acceptLengths() {
    return this.steps.slice(1).map((step) => step.tokens.length).filter((length) => length > 0);
  }

  // The server's own count once it is told, else what was seen. Null before the first step.
  acceptLength() {
    const told = this.usage?.speculation?.accept_length;
    if (told) return told;
    const lengths = this.acceptLengths();
    return lengths.length ? lengths.reduce((sum, length) => sum + length, 0) / lengths.length : null;
  }

  // Tokens per second from the first token to the newest, so that prefill and queueing are left out. Null if unknown.
  speed() {
    const [first, last] = [this.arrivals[0], this.arrivals.at(-1)];
    if (!first || last.atMs <= first.atMs) return null;
    return ((last.tokens - first.tokens) * 1000) / (last.atMs - first.atMs);
  }

  // [{x: seconds since the first token, y: tokens per second over the last second}]
  speeds() {
    const points = [];
    let from = 0;
    for (let index = 1; index < this.arrivals.length; index++) {
      const newest = this.arrivals[index];
      while (newest.atMs - this.arrivals[from].atMs > SPEED_WINDOW_MS && from < index - SPEED_MIN_EVENTS) from++;
      const gapMs = newest.atMs - this.arrivals[from].atMs;
      if (gapMs <= 0 || index < SPEED_MIN_EVENTS) continue;
      const y = ((newest.tokens - this.arrivals[from].tokens) * 1000) / gapMs;
      points.push({ x: (newest.atMs - this.arrivals[0].atMs) / 1000, y });
    }
    return points;
  }

  firstTokenMs() {
    return this.arrivals.length ? this.arrivals[0].atMs - this.beganMs : null;
  }
}
