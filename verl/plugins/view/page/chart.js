// One metric of some runs as curves.

import uPlot from "./vendor/uPlot.esm.js";
import { lineBackground } from "./colours.js";
import { h, short } from "./dom.js";
import { smoothed } from "./smoothing.js";

const HEIGHT = 190;
const TICK = 7;
/** Distances of the marks of an axis of steps: there is no half step. */
const WHOLE = [...Array(9).keys()].flatMap((power) => [1, 2, 5].map((digit) => digit * 10 ** power));

/**
 * Draw curves into an element; returns a function that removes them.
 *
 * curves: [{label, colour, dash, steps, times, values, low, high, marks: [{kind, step, time}]}]; low and high, of a mean of
 * several runs, are drawn as a band
 * options: {axis: "step" | "relative" | "wall", smoothing: 0..0.99}
 */
export function drawChart(element, name, curves, options) {
  const style = getComputedStyle(document.documentElement);
  const [ink, grid] = [style.getPropertyValue("--ink-2").trim(), style.getPropertyValue("--line").trim()];
  const marks = curves.flatMap((curve) => [...curve.marks, ...notFinite(curve)].map((mark) => ({ ...mark, x: abscissa(curve, options.axis, mark) })));
  const labels = withoutCommonBeginning(curves.map((curve) => curve.label));
  const lines = curves.flatMap((curve, place) => linesOf(curve, labels[place], options));
  const data = uPlot.join(lines.map(({ xs, ys }) => [xs, ys]));
  const bands = lines.flatMap(({ fill }, place) => (fill ? [{ series: [place + 1, place + 2], fill }] : []));
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
  const values = (_, splits) => splits.map((value) => xText(value, options.axis));
  const plot = new uPlot({
    width: Math.max(200, element.clientWidth),
    height: HEIGHT,
    scales: { x: { time: options.axis === "wall", range: (_, low, high) => rangeOfAbscissas(low, high, options.axis) }, y: { range: rangeOfValues } },
    axes: [
      { ...axis, ...(options.axis === "step" ? { incrs: WHOLE } : {}), ...(options.axis === "wall" ? {} : { size: 32, values }) },  // wall time has two lines, and the usual 50
      { ...axis, size: 56, values: (_, splits) => splits.map(short) },
    ],
    series: [{ label: options.axis, value: (_, value, __, row) => (row === null ? "last" : xText(value, options.axis)) }, ...lines],
    bands,
    legend: { show: true, live: true, markers: { width: 0, fill: (_, place) => (place ? lineBackground(lines[place - 1]) : "") } },
    cursor: { drag: { x: true, y: false }, sync: { key: "curves" } },
    hooks: { draw: [(drawn) => drawMarks(drawn, marks, ink)] },
  }, data, element);
  plot.root.setAttribute("role", "img");
  plot.root.setAttribute("aria-label", described(name, curves));
  const watcher = new ResizeObserver(() => plot.setSize({ width: Math.max(200, element.clientWidth), height: HEIGHT }));
  watcher.observe(element);
  return () => {
    watcher.disconnect();
    plot.destroy();
  };
}

/** The line of a curve as a series of uPlot, and before it the upper and lower edge of its band, if it has one. */
function linesOf(curve, label, options) {
  const xs = curve.steps.map((_, row) => abscissa(curve, options.axis, { step: curve.steps[row], time: curve.times[row] }));
  const look = { colour: curve.colour, dash: curve.dash };  // null is a gap; steps that other curves have are none
  const edge = (values) => {
    const [edges, ys] = ascending([xs, smoothed(values, options.smoothing)]);
    return { ...look, xs: edges, ys, class: "edge", width: 0, points: { show: false } };
  };
  const [rising, ys] = ascending([xs, smoothed(curve.values, options.smoothing)]);
  const last = ys.findLast((value) => value !== null);
  const line = {
    ...look, xs: rising, ys, label, stroke: curve.colour, width: 1.5,
    points: { show: ys.length < (curve.dash.length ? 2 : 40), size: 4 },
    value: (_, value, __, row) => short(row === null ? last : value),
  };
  return curve.high ? [{ ...edge(curve.high), fill: `${curve.colour}30` }, edge(curve.low), line] : [line];
}

/** The usual range but for a curve without height, which uPlot would draw at the bottom of 0 to 100 or twice its value. */
function rangeOfValues(_, low, high) {
  if (low === null) return [null, null];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const room = Math.abs(low) || 1;
  return [low - room, low + room];
}

/** From the first to the last point; one point is in the middle. */
function rangeOfAbscissas(low, high, axis) {
  if (low === null || low !== high) return [low, high];
  const room = axis === "step" ? 1 : 60;
  return [low - room, high + room];
}

function abscissa(curve, axis, point) {
  if (axis === "step") return point.step;
  return axis === "wall" ? point.time : point.time - curve.times[0];
}

/** uPlot wants rising abscissas: the points of steps that a resumed run made again replace the earlier ones. */
function ascending([xs, ys]) {
  const newest = new Map();
  xs.forEach((x, row) => x !== null && newest.set(x, ys[row]));
  const sorted = [...newest.keys()].sort((a, b) => a - b);
  return [sorted, sorted.map((x) => newest.get(x))];
}

/** Marks of the values that are not finite. */
function notFinite({ steps, times, values, colour }) {
  return values.flatMap((value, row) => (value === null ? [{ kind: "not finite", step: steps[row], time: times[row], colour }] : []));
}

/** A dashed line where a run was resumed, a tick at the bottom for a checkpoint (there may be very many), a cross at the top for a value that is not finite. */
function drawMarks(plot, marks, ink) {
  const { ctx, bbox } = plot;
  const bottom = bbox.top + bbox.height;
  ctx.save();
  ctx.strokeStyle = ink;
  ctx.font = `bold ${14 * devicePixelRatio}px system-ui`;
  ctx.textAlign = "center";
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.x, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
    if (mark.kind === "not finite") {
      ctx.fillStyle = mark.colour;
      ctx.fillText("×", x, bbox.top + 12 * devicePixelRatio);
      continue;
    }
    ctx.setLineDash(mark.kind === "resumed" ? [6, 3] : []);
    ctx.beginPath();
    ctx.moveTo(x, mark.kind === "resumed" ? bbox.top : bottom - TICK * devicePixelRatio);
    ctx.lineTo(x, bottom);
    ctx.stroke();
  }
  ctx.restore();
}

/** Names of which a legend has room for the beginning only, without the parts that all of them begin with. */
function withoutCommonBeginning(names) {
  if (names.length < 2) return names;
  let same = 0;
  while (same < names[0].length && names.every((name) => name[same] === names[0][same])) same += 1;
  const parts = names[0].slice(0, same).match(/^.*[-_/. ]/s)?.[0].length || 0;
  return parts < 8 ? names : names.map((name) => `…${name.slice(parts)}`);
}

function described(name, curves) {
  const ends = curves.map((curve) => {
    const known = curve.values.filter((value) => value !== null);
    const gaps = curve.values.length - known.length;
    return `${curve.label}: ${known.length} points, from ${short(known[0])} to ${short(known.at(-1))}${gaps ? `, ${gaps} not finite` : ""}`;
  });
  return `${name}. ${ends.join("; ")}`;
}

function xText(value, axis) {
  if (axis === "wall") return new Date(1000 * value).toLocaleString();
  return axis === "relative" ? duration(value) : short(value);
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** A box for one chart with its name, and a button that puts it before the others. */
export function chartBox(name, isPinned, pin) {
  return h("figure", { class: "chart", "data-metric": name },
    h("figcaption", {}, name, h("button", {
      type: "button", class: "pin", "aria-label": `pin ${name}`, title: "show it first", "aria-pressed": String(isPinned), onclick: pin,
    }, isPinned ? "★" : "☆")),
    h("div", { class: "plot" }));
}
