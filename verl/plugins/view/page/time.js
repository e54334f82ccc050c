// Where the time of steps goes: a line for each step, its stages beside each other, and their mean; what each rank did
// in one step, how long it was busy and where it waited, and its memory; of asynchronous runs the ages of tokens.

import { showAges } from "./ages.js";
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
    fill(main, h("p", { class: "empty" }, list.why()));
    return {};
  }
  const own = { run: parameters.run };
  const range = { step_from: parameters.step_from || "", step_to: parameters.step_to || "" };
  const body = h("div");
  const ranks = h("section", { class: "ranks" });
  const ages = h("section", { class: "ages" });
  let removeCharts = () => {};
  let chosen = parameters.step ? Number(parameters.step) : null;
  const load = async () => {
    keepInAddress("time", { ...own, ...range, step: chosen ?? "" }, true);
    const [steps, about] = await Promise.all([ask("spans", { run: run.id, ...range }), ask("details", { run: [run.id] })]);
    const resumed = about[run.id].marks.filter((mark) => mark.kind === "resumed");
    removeCharts();
    removeCharts = await showAges(ages, run, about[run.id], range, SHOWN);
    if (steps.length) await showRanks(ranks, run, range, chosen ?? steps.at(-1).step);
    else fill(ranks);
    fill(body, steps.length ? timeline(steps, resumed, choose) : h("p", { class: "empty" },
      `${run.name} has no times of stages: the tracker file writes them to a file .run.jsonl beside its metrics.`));
  };
  const choose = (number) => {
    chosen = number;
    keepInAddress("time", { ...own, ...range, step: number });
    showRanks(ranks, run, range, number);
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
    h("strong", { class: "of" }, run.name), step("step_from", "Step from"), step("step_to", "Step to"), trace), ranks, body, ages);
  await load();
  return { news: (changed) => changed.includes(run.id) && load(), close: () => removeCharts() };
}

function traceOf(run, range) {
  return `/api/trace?${new URLSearchParams({ run: run.id, ...range })}`;
}

/** What driver and ranks did in one step, and the means of the steps of the range. */
async function showRanks(element, run, range, number) {
  const [found, means] = await Promise.all([
    ask("lanes", { run: run.id, step: number }), ask("ranks", { run: run.id, ...range })]);
  if (!found.spans.length) {
    fill(element, h("p", { class: "empty" }, `No times of step ${number} were recorded.`));
    return;
  }
  const begin = beginOf(found);
  const seconds = lengthOf(found);
  const stages = found.spans.filter((span) => span.name !== "step");
  const rows = [
    lane("driver", stages, begin, seconds, (span) => span.depth > 1),
    ...(found.beside.length ? [lane("sampling", found.beside, begin, seconds, (span) => span.depth > 0)] : []),
    ...found.lanes.map(({ rank, calls }) => lane(rank, calls, begin, seconds, () => false)),
  ];
  const named = [...new Set([...stages, ...found.beside, ...found.lanes.flatMap(({ calls }) => calls)].map((span) => shortName(span.name)))];
  fill(element,
    h("h2", {}, `Step ${short(number)}: ${short(seconds)} s on the driver and each rank`),
    h("div", { class: "legend" }, named.map((name) => swatch(name))),
    h("div", { class: "timeline lanes", role: "list", "aria-label": `What driver and ranks did in step ${number}` }, rows),
    means.ranks.length ? waits(means) : h("p", { class: "empty" },
      "What single ranks did was not recorded: runs write it to a file .ranks.jsonl beside the metrics of the tracker file."));
}

function swatch(name) {
  return h("span", { title: name }, h("i", { class: "swatch", style: { background: callColour(name) } }), shortName(name));
}

function lane(name, spans, begin, seconds, isInner) {
  const [pool, number] = name.split(" ");  // where there is no room for both, the number stays
  const what = spans.map((span) => `${shortName(span.name)} ${short(span.seconds)} s`).join(", ");
  return h("div", { class: "step", role: "listitem", "aria-label": `${name}: ${what || "nothing"}` },
    h("span", { class: "label name", title: name }, h("span", { class: "pool" }, pool), number),
    h("div", { class: "bar" }, spans.map((span) => h("i", {
      class: isInner(span) ? "span inner" : "span",
      title: `${span.name}: ${short(span.seconds)} s after ${short(span.begin - begin)} s${memory(span)}`,
      style: {
        left: `${(100 * (span.begin - begin)) / seconds}%`, width: `${(100 * span.seconds) / seconds}%`,
        background: callColour(span.name),
      },
    }))));
}

function memory(span) {
  if (span.rss_mb === undefined) return "";
  return `; then ${short(span.rss_mb)} MiB resident${span.device_mb === null ? "" : `, ${short(span.device_mb)} MiB of the GPU`}`;
}

/** The stage that a call belongs to gives its colour. */
const STAGE_OF = {
  generate_sequences: "gen", serve: "gen", compute_log_prob: "old_log_prob", compute_ref_log_prob: "ref",
  compute_values: "values", compute_rm_score: "reward",
};

function callColour(name) {
  return stageColour(STAGE_OF[shortName(name)] || shortName(name));
}

function shortName(name) {
  return name.split(".").at(-1);
}

function waits({ steps, ranks }) {
  const totals = new Map();
  for (const one of ranks) for (const [name, seconds] of Object.entries(one.waits)) totals.set(name, (totals.get(name) || 0) + seconds);
  const longest = [...totals].sort((a, b) => b[1] - a[1]).slice(0, 4).map(([name]) => name);
  const withGpu = ranks.some((one) => one.device_mb !== null);
  const titles = ["rank", "busy", "waits", ...longest.map((name) => `in ${name === "step" ? "no stage" : name}`), "resident MiB", ...(withGpu ? ["GPU MiB"] : [])];
  const rows = ranks.map((one) => {
    const all = Object.values(one.waits).reduce((sum, seconds) => sum + seconds, 0);
    return [one.rank, `${short(one.busy)} s`, `${short(all)} s`, ...longest.map((name) => `${short(one.waits[name] || 0)} s`),
      short(one.rss_mb), ...(withGpu ? [short(one.device_mb)] : [])];
  });
  return [
    h("h3", {}, `Mean of ${steps} steps by rank`),
    h("p", { class: "note" }, "A rank waits while it answers no call. Waiting for other ranks within a call counts as busy. Memory is the most at the end of a call."),
    table(titles, rows),
  ];
}

function timeline(steps, resumed, choose) {
  const totals = new Map();
  const beside = new Map();
  const add = (sums, span) => sums.set(span.name, (sums.get(span.name) || 0) + span.seconds);
  for (const step of steps) {
    for (const span of step.spans) add(totals, span);
    for (const span of step.beside) add(beside, span);
  }
  const whole = totals.get("step") || 1;
  const sorted = (sums) => [...sums].filter(([name]) => name !== "step").sort((a, b) => b[1] - a[1]);
  const rows = [...sorted(totals), ...sorted(beside).map(([name, seconds]) => [`${name}, beside these`, seconds])];
  const named = [...new Set([...sorted(totals), ...sorted(beside)].map(([name]) => name))];
  const shown = steps.slice(-SHOWN);
  const longest = Math.max(...shown.map(lengthOf));
  return [
    h("h2", {}, `Stages of the last ${shown.length} steps`),
    h("div", { class: "legend" }, named.map((name) => h("span", {}, h("i", { class: "swatch", style: { background: stageColour(name) } }), name))),
    h("div", { class: "timeline", role: "group", "aria-label": `Stages of ${shown.length} steps; the table below has their means` },
      shown.flatMap((step) => [
        ...resumed.filter((mark) => mark.step === step.step - 1).map((mark) => h("div", { class: "resumed" }, `resumed after step ${mark.step}`)),
        line(step, longest, choose)])),
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

function line(step, longest, choose) {
  const begin = beginOf(step);
  const inner = step.spans.filter((span) => span.name !== "step");
  const open = h("button", { type: "button", class: "link label", "aria-label": `Ranks of step ${step.step}`, onclick: () => choose(step.step) }, short(step.step));
  const bar = (kind, spans, isInner, note) => h("div", { class: kind }, spans.map((span) => h("i", {
    class: isInner(span) ? "span inner" : "span", title: `${span.name}: ${short(span.seconds)} s${note}`,
    style: {
      left: `${(100 * (span.begin - begin)) / longest}%`, width: `${(100 * span.seconds) / longest}%`,
      background: stageColour(span.name),
    },
  })));
  const stages = bar("bar", inner, (span) => span.depth > 1, "");
  const sampling = bar("bar beside", step.beside, (span) => span.depth > 0, ", sampled beside the stages");
  return h("div", { class: "step" }, open, step.beside.length ? h("div", { class: "bars" }, stages, sampling) : stages,
    h("span", { class: "label" }, `${short(lengthOf(step))} s`));
}
