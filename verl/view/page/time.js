// Where the time of steps goes: a line for each step, its stages beside each other, and their mean.

import { ask } from "./api.js";
import { stageColour } from "./colours.js";
import { field, fill, h, short } from "./dom.js";
import { keepInAddress } from "./place.js";
import { table } from "./runs.js";

const SHOWN = 40;

/** Show times; returns {news}. */
export async function showTime(main, parameters, list) {
  const run = list.one(parameters.run);
  if (!run) {
    fill(main, h("p", { class: "empty" }, "There is no run yet."));
    return {};
  }
  const range = { step_from: parameters.step_from || "", step_to: parameters.step_to || "" };
  const body = h("div");
  const load = async () => {
    keepInAddress("time", { run: run.id, ...range });
    const steps = await ask("spans", { run: run.id, ...range });
    fill(body, steps.length ? timeline(steps) : h("p", { class: "empty" },
      `${run.name} has no times of stages: the tracker file writes them to a file .run.jsonl beside its metrics.`));
  };
  const step = (name, label) => field(label, h("input", {
    type: "number", class: "number", name, value: range[name], onchange: (event) => {
      range[name] = event.target.value;
      trace.href = traceOf(run, range);
      load();
    },
  }));
  const trace = h("a", { class: "button", href: traceOf(run, range), download: `${run.id}.trace.json` }, "Trace for Perfetto");
  fill(main, h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
    h("strong", { class: "of" }, run.name), step("step_from", "Step from"), step("step_to", "to"), trace), body);
  await load();
  return { news: (changed) => changed.includes(run.id) && load() };
}

function traceOf(run, range) {
  return `/api/trace?${new URLSearchParams({ run: run.id, ...range })}`;
}

function timeline(steps) {
  const totals = new Map();
  for (const { spans } of steps) for (const span of spans) totals.set(span.name, (totals.get(span.name) || 0) + span.seconds);
  const whole = totals.get("step") || 1;
  const rows = [...totals].filter(([name]) => name !== "step").sort((a, b) => b[1] - a[1]);
  const shown = steps.slice(-SHOWN);
  const longest = Math.max(...shown.map(lengthOf));
  return [
    h("h2", {}, `Stages of the last ${shown.length} steps`),
    h("div", { class: "legend" }, rows.map(([name]) => h("span", {}, h("i", { class: "swatch", style: { background: stageColour(name) } }), name))),
    h("div", { class: "timeline", role: "img", "aria-label": `Stages of ${shown.length} steps; the table below has their means` },
      shown.map((step) => line(step, longest))),
    h("h2", {}, `Mean of ${steps.length} steps: ${short(whole / steps.length)} s`),
    table(["stage", "seconds", "share"], rows.map(([name, seconds]) => [name, short(seconds / steps.length), `${Math.round((100 * seconds) / whole)} %`])),
  ];
}

function lengthOf(step) {
  return Math.max(...step.spans.map((span) => span.begin + span.seconds)) - beginOf(step);
}

function beginOf(step) {
  return Math.min(...step.spans.map((span) => span.begin));
}

function line(step, longest) {
  const begin = beginOf(step);
  const inner = step.spans.filter((span) => span.name !== "step");
  return h("div", { class: "step" }, h("span", { class: "label" }, short(step.step)),
    h("div", { class: "bar" }, inner.map((span) => h("i", {
      class: span.depth > 1 ? "span inner" : "span", title: `${span.name}: ${short(span.seconds)} s`,
      style: {
        left: `${(100 * (span.begin - begin)) / longest}%`, width: `${(100 * span.seconds) / longest}%`,
        background: stageColour(span.name),
      },
    }))), h("span", { class: "label" }, `${short(lengthOf(step))} s`));
}
