// Small charts as inline SVG, each with its figures in words.

import { element, svg } from "./dom.js";

const WIDTH = 190;
const HEIGHT = 96;
const LEFT = 28;
const BOTTOM = 16;
const TOP = 8;
const PLOT_WIDTH = WIDTH - LEFT - 4;
const PLOT_HEIGHT = HEIGHT - BOTTOM - TOP;
const TOO_SHORT = "Too few tokens to tell.";

// A bar for each step and the mean so far as a line.
export function drawAcceptLengths(box, lengths, mean) {
  if (!lengths.length) return box.replaceChildren();
  const top = Math.max(...lengths, 2);
  const wide = PLOT_WIDTH / lengths.length;
  const bars = lengths.map((length, index) => {
    const high = (length / top) * PLOT_HEIGHT;
    return `M${(LEFT + index * wide).toFixed(1)} ${TOP + PLOT_HEIGHT}v${-high.toFixed(1)}h${(wide * 0.8).toFixed(1)}v${high.toFixed(1)}z`;
  });
  const means = [];
  lengths.reduce((sum, length, index) => {
    means.push({ x: (index + 0.4) * wide, y: (sum + length) / (index + 1) });
    return sum + length;
  }, 0);
  const label = `Accept length by step: mean ${mean.toFixed(2)}, most ${Math.max(...lengths)}, ${lengths.length} steps`;
  return frame(
    box, label, top, `${lengths.length} steps`,
    svg("path", { class: "bars", d: bars.join("") }),
    svg("path", { class: "line mean", d: line(means, PLOT_WIDTH, top) }),
  );
}

// Lines over seconds: [{name, points: [{x, y}]}].
export function drawSpeeds(box, series) {
  const all = series.flatMap(({ points }) => points);
  if (!all.length) return box.replaceChildren(element("p", { class: "muted" }, TOO_SHORT));
  const top = Math.max(...all.map(({ y }) => y));
  const right = Math.max(...all.map(({ x }) => x));
  const told = series.filter(({ points }) => points.length);
  const ends = told.map(({ name, points }) => `${name} ${points.at(-1).y.toFixed(0)} at the end`).join(", ");
  return frame(
    box, `Tokens per second over ${right.toFixed(1)} seconds: ${ends}`, top, `${right.toFixed(1)} s`,
    ...told.flatMap(({ name, points }) => {
      const [x, y] = placeOf(points.at(-1), right, top);
      return [
        svg("path", { class: `line ${name}`, d: line(points, right, top) }),
        svg("text", { x, y: y < TOP + 10 ? y + 12 : y - 4, "text-anchor": "end" }, name),
      ];
    }),
  );
}

function frame(box, label, top, below, ...shapes) {
  const y = TOP + PLOT_HEIGHT;
  box.replaceChildren(svg(
    "svg", { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": label },
    svg("path", { class: "axis", d: `M${LEFT} ${TOP}V${y}H${LEFT + PLOT_WIDTH}` }),
    svg("text", { x: LEFT - 4, y: TOP + 6, "text-anchor": "end" }, top >= 10 ? top.toFixed(0) : top.toFixed(1)),
    svg("text", { x: LEFT - 4, y, "text-anchor": "end" }, "0"),
    svg("text", { x: LEFT + PLOT_WIDTH, y: HEIGHT - 3, "text-anchor": "end" }, below),
    ...shapes,
  ));
}

function line(points, right, top) {
  const at = (point) => placeOf(point, right, top).map((number) => number.toFixed(1)).join(" ");
  return points.length ? `M${points.map(at).join("L")}` : "";
}

function placeOf({ x, y }, right, top) {
  return [LEFT + (x / (right || 1)) * PLOT_WIDTH, TOP + PLOT_HEIGHT * (1 - y / top)];
}
