// Draws a step's tree, a row for each node. One tab stop: arrow keys go up, down, to parent and child, as in any tree.

import { svg, visible } from "./dom.js";
import { ACCEPTED, BONUS, REJECTED, ROOT, TARGET, UNREACHED, treeItems } from "./tree_model.js";

const HEIGHT = 22;
const ROW = 27;
const INDENT = 14;
const MARGIN = 4;
const CHAR = 7.3; // of the node's 12 px letters
const PADDING = 14;
const TOLD_WIDTH = 70; // for the probability beside the node
const LABEL_CHARS = 18;
const LEAST = 0.001; // of a probability that is told beside its node; the details have all
const MARKS = { [ROOT]: "●", [ACCEPTED]: "✓", [REJECTED]: "✗", [UNREACHED]: "–", [BONUS]: "+", [TARGET]: "●" };

export const VERDICTS = {
  [ROOT]: "committed before",
  [ACCEPTED]: "accepted",
  [REJECTED]: "rejected",
  [UNREACHED]: "not reached: the path ended above it",
  [BONUS]: "bonus: the target's own token",
  [TARGET]: "the target's own token; nothing was drafted",
};

export class TreeView {
  // `onNode` hears of the item that is hovered or focused.
  constructor(box, onNode) {
    this.box = box;
    this.onNode = onNode;
    this.items = [];
    this.shapes = [];
    this.current = 0;
    box.addEventListener("keydown", (event) => this.#key(event));
  }

  get busy() { // someone looks at a node: not the time to draw another tree
    return this.items.length > 0 && (this.box.contains(document.activeElement) || this.box.matches(":hover"));
  }

  draw(step, before, label) {
    const hadFocus = this.box.contains(document.activeElement);
    this.items = treeItems(step, before);
    const lastAccepted = this.items.findLastIndex((item) => item.verdict === ACCEPTED);
    this.current = Math.max(lastAccepted, 0);
    this.shapes = this.items.map((item, index) => this.#shape(item, index));
    const width = Math.max(...this.items.map((item) => leftOf(item) + widthOf(item))) + TOLD_WIDTH;
    const height = MARGIN * 2 + HEIGHT + ROW * (this.items.length - 1);
    const edges = this.items.slice(1).map((item) => edge(item, this.items));
    this.box.replaceChildren(svg(
      "svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "tree", "aria-label": label },
      svg("g", { "aria-hidden": "true" }, ...edges), ...this.shapes,
    ));
    if (hadFocus) this.shapes[this.current].focus();
    this.onNode(this.items[this.current]);
  }

  clear() {
    this.items = [];
    this.box.replaceChildren();
  }

  #shape(item, index) {
    const siblings = item.parent ? item.parent.children : [item];
    const shape = svg(
      "g",
      {
        class: `node ${item.verdict}`, transform: `translate(${leftOf(item)} ${topOf(index)})`, role: "treeitem",
        tabindex: index === this.current ? 0 : -1, "aria-label": words(item), "aria-level": item.depth + 1,
        "aria-setsize": siblings.length, "aria-posinset": siblings.indexOf(item) + 1,
      },
      svg("rect", { class: "row", width: widthOf(item) + TOLD_WIDTH, height: HEIGHT }),
      svg("rect", { class: "box", width: widthOf(item), height: HEIGHT, rx: 5 }),
      svg("text", { x: 7, y: 15, "aria-hidden": "true" }, labelOf(item)),
    );
    if (item.probability !== null) {
      const beside = { class: "told", x: widthOf(item) + 8, y: 15, "aria-hidden": "true" };
      shape.append(svg("text", beside, percent(item.probability)));
    }
    shape.style.setProperty("--depth", item.depth);
    shape.addEventListener("pointerenter", () => this.onNode(item));
    shape.addEventListener("focus", () => {
      this.#stop(index);
      this.onNode(item);
    });
    return shape;
  }

  #stop(index) { // the tab stop goes where the focus is
    this.shapes[this.current]?.setAttribute("tabindex", "-1");
    this.shapes[index].setAttribute("tabindex", "0");
    this.current = index;
  }

  #key(event) {
    const next = this.#neighbour(this.items[this.current], event.key);
    if (!next) return;
    event.preventDefault();
    this.shapes[this.items.indexOf(next)].focus();
  }

  #neighbour(item, key) {
    if (key === "ArrowRight") return item.children[0];
    if (key === "ArrowLeft") return item.parent;
    if (key === "Home") return this.items[0];
    if (key === "End") return this.items.at(-1);
    if (key !== "ArrowUp" && key !== "ArrowDown") return undefined;
    return this.items[this.current + (key === "ArrowDown" ? 1 : -1)];
  }
}

// What there is to tell of a node, as words and values.
export function nodeFigures(item) {
  return [
    ["Token", visible(item.text)],
    ["Id", item.id],
    ["Draft rank", item.rank === null || item.siblings === null ? null : `${item.rank} of ${item.siblings}`],
    ["Depth", item.depth || null],
    ["Target probability", item.probability === null ? null : item.probability.toPrecision(3)],
    ["Verdict", VERDICTS[item.verdict]],
  ];
}

// What is seen of a node goes first: by that it can be named aloud.
function words(item) {
  const seen = item.probability === null ? labelOf(item) : `${labelOf(item)} ${percent(item.probability)}`;
  const told = nodeFigures(item).filter(([word, value]) => word !== "Token" && value !== null);
  return [seen, ...told.map(([word, value]) => `${word} ${value}`)].join(", ");
}

function percent(probability) {
  return probability < LEAST ? `< ${LEAST * 100} %` : `${(probability * 100).toFixed(1)} %`;
}

function labelOf(item) {
  return `${MARKS[item.verdict]} ${short(visible(item.text))}`;
}

function widthOf(item) {
  return [...labelOf(item)].length * CHAR + PADDING;
}

function leftOf(item) {
  return MARGIN + item.depth * INDENT;
}

function topOf(index) {
  return MARGIN + index * ROW;
}

// From below the parent's corner down to the node's side.
function edge(item, items) {
  const [from, to] = [item.parent, item].map((end) => topOf(items.indexOf(end)));
  const x = leftOf(item.parent) + INDENT / 2;
  const path = svg("path", {
    class: `edge ${item.verdict}`, d: `M${x} ${from + HEIGHT}V${to + HEIGHT / 2}H${leftOf(item)}`,
  });
  path.style.setProperty("--depth", item.depth);
  return path;
}

function short(text) {
  const letters = [...text];
  return letters.length > LABEL_CHARS ? `${letters.slice(0, LABEL_CHARS - 1).join("")}…` : text;
}
