// A verified step as a tree of items with their places. Knows no page.

export const ROOT = "root";
export const ACCEPTED = "accepted";
export const REJECTED = "rejected";
export const UNREACHED = "unreached"; // below a rejected one, or below the answer's end
export const BONUS = "bonus";
export const TARGET = "target";

// The items of a step from top to bottom, each above its children. The first is the newest token that was committed
// before the step; the target's own token hangs where it was drawn.
export function treeItems(step, before) {
  const root = makeItem(before ?? { text: "…" }, null, ROOT);
  const made = [];
  const nodes = step.tree?.nodes ?? [];
  const last = nodes.findLastIndex((node) => node.accepted);
  // An end token has no text and is not told: where a draft of it was accepted, nothing below was looked at.
  const ended = step.tokens.length < nodes.filter((node) => node.accepted).length;
  for (const node of nodes) {
    const parent = node.parent < 0 ? root : made[node.parent];
    made.push(makeItem(node, parent, verdictOf(node, parent, ended && node.parent === last)));
  }
  for (const item of made) {
    item.rank = item.parent.children.indexOf(item) + 1;
    item.siblings = item.parent.children.length;
  }
  const own = step.tokens.find((token) => token.origin !== "accepted");
  if (own) makeItem(own, made.findLast((item) => item.verdict === ACCEPTED) ?? root, own.origin);
  return inOrder(root);
}

function makeItem(token, parent, verdict) {
  const item = {
    id: token.id ?? null, text: token.text, probability: token.probability ?? null, parent, verdict,
    rank: null, siblings: null, children: [], depth: parent ? parent.depth + 1 : 0,
  };
  parent?.children.push(item);
  return item;
}

function verdictOf(node, parent, ended) {
  if (node.accepted) return ACCEPTED;
  if (ended) return UNREACHED;
  return parent.verdict === ROOT || parent.verdict === ACCEPTED ? REJECTED : UNREACHED;
}

function inOrder(item) {
  return [item, ...item.children.flatMap(inOrder)];
}
