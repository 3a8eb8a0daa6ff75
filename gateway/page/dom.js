// Makes elements. Text only ever becomes text nodes: nothing that a model says is read as HTML.

const SVG = "http://www.w3.org/2000/svg";

export function element(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

export function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined) node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

export const byId = (id) => document.getElementById(id);

// Pairs of words and values in a description list.
export function showFigures(list, pairs) {
  const told = pairs.filter(([, value]) => value !== null && value !== undefined);
  list.replaceChildren(...told.map(([word, value]) => (
    element("div", {}, element("dt", {}, word), element("dd", {}, String(value))))));
}

// A token's text with its white space to be seen.
export function visible(text) {
  if (text === "") return "(no text)";
  return text.replaceAll("\n", "⏎").replaceAll("\t", "⇥").replace(/^ +| +$/g, (spaces) => "␣".repeat(spaces.length));
}
