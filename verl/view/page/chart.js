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
 * curves: [{label, colour, dash, steps, times, values, marks: [{kind, step, time}]}]
 * options: {axis: "step" | "relative" | "wall", smoothing: 0..0.99}
 */
export function drawChart(element, name, curves, options) {
  const style = getComputedStyle(document.documentElement);
  const [ink, grid] = [style.getPropertyValue("--ink-2").trim(), style.getPropertyValue("--line").trim()];
  const marks = curves.flatMap((curve) => curve.marks.map((mark) => ({ ...mark, x: abscissa(curve, options.axis, mark) })));
  const data = uPlot.join(curves.map((curve) => [
    (options.axis === "step" ? curve.steps : curve.times).map((_, row) => abscissaAt(curve, options.axis, row)),
    smoothed(curve.values, options.smoothing),
  ]).map(ascending));
  const labels = withoutCommonBeginning(curves.map((curve) => curve.label));
  const series = curves.map((curve, place) => ({
    label: labels[place],
    stroke: curve.colour,
    dash: curve.dash,
    width: 1.5,
    spanGaps: true,
    points: { show: curve.values.length < (curve.dash.length ? 2 : 40), size: 4 },
    value: (_, value) => short(value),
  }));
  const axis = { stroke: ink, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 }, font: "11px system-ui" };
  const values = (_, splits) => splits.map((value) => (options.axis === "relative" ? duration(value) : short(value)));
  const plot = new uPlot({
    width: Math.max(200, element.clientWidth),
    height: HEIGHT,
    scales: { x: { time: options.axis === "wall" }, y: { range: rangeOfValues } },
    axes: [
      { ...axis, ...(options.axis === "step" ? { incrs: WHOLE } : {}), ...(options.axis === "wall" ? {} : { size: 32, values }) },  // wall time has two lines, and the usual 50
      { ...axis, size: 56, values: (_, splits) => splits.map(short) },
    ],
    series: [{ label: options.axis, ...(options.axis === "wall" ? {} : { value: (_, value) => short(value) }) }, ...series],
    legend: { show: true, live: true, markers: { width: 0, fill: (_, place) => (place ? lineBackground(curves[place - 1]) : "") } },
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

/** The usual range but for a curve without height, which uPlot would draw at the bottom of 0 to 100 or twice its value. */
function rangeOfValues(_, low, high) {
  if (low === null) return [null, null];
  if (low !== high) return uPlot.rangeNum(low, high, 0.1, true);
  const room = Math.abs(low) || 1;
  return [low - room, low + room];
}

function abscissaAt(curve, axis, row) {
  return abscissa(curve, axis, { step: curve.steps[row], time: curve.times[row] });
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

/** A dashed line where a run was resumed, and a tick at the bottom for a checkpoint: there may be very many. */
function drawMarks(plot, marks, ink) {
  const { ctx, bbox } = plot;
  const bottom = bbox.top + bbox.height;
  ctx.save();
  ctx.strokeStyle = ink;
  for (const mark of marks) {
    const x = Math.round(plot.valToPos(mark.x, "x", true));
    if (x < bbox.left || x > bbox.left + bbox.width) continue;
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
    return `${curve.label}: ${curve.values.length} points, from ${short(known[0])} to ${short(known.at(-1))}`;
  });
  return `${name}. ${ends.join("; ")}`;
}

function duration(seconds) {
  if (seconds < 120) return `${Math.round(seconds)} s`;
  return seconds < 7200 ? `${Math.round(seconds / 60)} min` : `${(seconds / 3600).toFixed(1)} h`;
}

/** A box for one chart with its name. */
export function chartBox(name) {
  return h("figure", { class: "chart", "data-metric": name }, h("figcaption", {}, name), h("div", { class: "plot" }));
}
