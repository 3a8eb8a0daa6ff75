// A verified step as a tree of items with their places. Knows no page.

export const ROOT = "root";
export const ACCEPTED = "accepted";
export const REJECTED = "rejected";
export const UNREACHED = "unreached"; // below a rejected one: the target's choice had left the tree before
export const BONUS = "bonus";
export const TARGET = "target";

// The items of a step, parents before children. The first is the newest token that was committed before it; the
// target's own token hangs where it was drawn. Each has `row` and `depth` as its place.
export function treeItems(step, before) {
  const root = makeItem(before ?? { text: "…" }, null, ROOT);
  const items = [root];
  const nodes = (step.tree?.nodes ?? []).map((node, index) => ({ ...node, index }));
  const made = [];
  for (const node of nodes) {
    const parent = node.parent < 0 ? root : made[node.parent];
    made.push(makeItem(node, parent, verdictOf(node, parent)));
  }
  items.push(...made);
  for (const item of items) item.children.forEach((child, index) => Object.assign(child, { rank: index + 1 }));
  for (const item of made) item.siblings = item.parent.children.length;
  const own = step.tokens.find((token) => token.origin !== "accepted");
  if (own) items.push(makeItem(own, made.findLast((item) => item.verdict === ACCEPTED) ?? root, own.origin));
  placeRows(root, 0);
  return items;
}

function makeItem(token, parent, verdict) {
  const item = {
    id: token.id ?? null, text: token.text, index: token.index ?? null, probability: token.probability ?? null,
    parent, verdict, rank: null, siblings: null, children: [], depth: parent ? parent.depth + 1 : 0, row: 0,
  };
  parent?.children.push(item);
  return item;
}

function verdictOf(node, parent) {
  if (node.accepted) return ACCEPTED;
  return parent.verdict === ROOT || parent.verdict === ACCEPTED ? REJECTED : UNREACHED;
}

// A parent stands in the row of its first child; gives the first row that is free below.
function placeRows(item, row) {
  item.row = row;
  if (!item.children.length) return row + 1;
  return item.children.reduce((next, child) => placeRows(child, next), row);
}
