// A verified step as a tree of items with their places. Knows no page.

export const ROOT = "root";
export const ACCEPTED = "accepted";
export const REJECTED = "rejected";
export const UNREACHED = "unreached"; // below a rejected one: the target's choice had left the tree before
export const BONUS = "bonus";
export const TARGET = "target";

// The items of a step from top to bottom, each above its children. The first is the newest token that was committed
// before the step; the target's own token hangs where it was drawn.
export function treeItems(step, before) {
  const root = makeItem(before ?? { text: "…" }, null, ROOT);
  const made = [];
  for (const node of step.tree?.nodes ?? []) {
    const parent = node.parent < 0 ? root : made[node.parent];
    made.push(makeItem(node, parent, verdictOf(node, parent)));
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

function verdictOf(node, parent) {
  if (node.accepted) return ACCEPTED;
  return parent.verdict === ROOT || parent.verdict === ACCEPTED ? REJECTED : UNREACHED;
}

function inOrder(item) {
  return [item, ...item.children.flatMap(inOrder)];
}
