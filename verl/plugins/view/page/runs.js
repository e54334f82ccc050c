// Curves of the chosen runs, the main ones first, and a table of the runs by settings and best value.

import { ask } from "./api.js";
import { chartBox, drawChart } from "./chart.js";
import { field, fill, h, select, short } from "./dom.js";
import { keepInAddress, remember, remembered } from "./place.js";

const AXES = [["step", "step"], ["relative", "time since the start"], ["wall", "time of day"]];
const PINS = "pins";
/** Groups of more charts than this in all are closed at first, but for the first ones. */
const OPEN = 12;
/** Metrics of which less is better. */
const LOWER = /loss|kl|error|timing|clip_ratio|norm|diff/;

/** Show curves; returns {news, close}. */
export async function showRuns(main, parameters, list) {
  const view = new Curves(main, parameters, list);
  await view.load();
  return { news: (changed) => view.news(changed), close: () => view.close() };
}

class Curves {
  constructor(main, parameters, list) {
    this.main = main;
    this.list = list;
    this.options = { axis: "step", smoothing: 0, text: "", averages: "", metric: "", ...parameters };
    this.options.smoothing = Number(this.options.smoothing) || 0;
    this.pins = remembered(PINS) || [];
    this.drawn = new Map();
    this.toggled = new Map();
    this.details = new Map();
    this.watcher = new IntersectionObserver((entries) => {
      for (const entry of entries) if (entry.isIntersecting) this.draw(entry.target);
    }, { rootMargin: "300px" });
  }

  async load() {
    await this.ask();
    this.show();
  }

  /** Ask for the chosen runs; one that was deleted is not among them any more. */
  async ask() {
    const runs = this.list.selected();
    const found = await ask("details", { run: runs.map((run) => run.id) });
    this.details = new Map(runs.map((run) => [run.id, { ...run, ...found[run.id] }]));
  }

  async news(changed) {
    if (!changed.some((id) => this.details.has(id))) return;
    const names = [...this.names()].join();
    await this.ask();
    if ([...this.names()].join() !== names) {
      this.show();
      return;
    }
    for (const box of this.main.querySelectorAll("figure.chart")) if (this.drawn.has(box)) this.draw(box, true);
    if (this.details.size > 1) this.showAbout();
  }

  close() {
    this.watcher.disconnect();
    for (const remove of this.drawn.values()) remove();
    this.drawn.clear();
  }

  /** The names of all metrics that the search finds. */
  names() {
    const names = new Set([...this.details.values()].flatMap((run) => run.metrics));
    return [...names].filter((name) => name.toLowerCase().includes(this.options.text.toLowerCase())).sort();
  }

  /** The main metrics that a run has, in their order. */
  mainNames() {
    return [...new Set([...this.details.values()].flatMap((run) => run.main))];
  }

  show() {
    this.close();
    const runs = [...this.details.values()];
    if (!runs.length) {
      fill(this.main, h("p", { class: "empty" }, this.list.why()));
      return;
    }
    this.charts = h("div", { class: "groups" });
    this.about = h("section", {});
    fill(this.main, this.controls(), this.charts, this.about);
    this.showCharts();
    this.showAbout();
  }

  /** The runs, or with averages each group of runs that differ in seeds alone. */
  groups() {
    const groups = new Map();
    for (const run of this.details.values()) {
      const key = this.options.averages ? run.experiment : run.id;
      groups.set(key, [...(groups.get(key) || []), run]);
    }
    return groups;
  }

  showCharts() {
    this.close();
    this.csv.href = `/api/csv?${new URLSearchParams([...[...this.details.keys()].map((id) => ["run", id]), ["text", this.options.text]])}`;
    const names = this.names();
    const groups = grouped(names, this.pins, this.mainNames());
    const isOpen = (title) => this.toggled.get(title) ?? (FIRST.includes(title) || names.length <= OPEN);
    fill(this.charts, [...groups].map(([title, own]) => {
      const boxes = own.map((name) => chartBox(name, this.pins.includes(name), () => this.pin(name)));
      boxes.forEach((box) => this.watcher.observe(box));
      return h("details", { class: "group", open: isOpen(title), ontoggle: (event) => this.toggled.set(title, event.target.open) },
        h("summary", {}, h("h2", {}, title), h("span", { class: "count" }, ` ${boxes.length}`)),
        h("div", { class: "charts" }, boxes));
    }), names.length ? null : h("p", { class: "empty" }, "No metric is called like that, or nothing is logged yet."));
  }

  pin(name) {
    this.pins = this.pins.includes(name) ? this.pins.filter((one) => one !== name) : [...this.pins, name];
    remember(PINS, this.pins);
    this.showCharts();
  }

  controls() {
    const change = (name, value) => {
      this.options[name] = value;
      const { smoothing, ...others } = this.options;
      keepInAddress("runs", { ...others, smoothing: smoothing || "", axis: others.axis === "step" ? "" : others.axis }, true);
      if (name !== "metric") this.showCharts();
      if (name === "averages" || name === "metric") this.showAbout();
    };
    const smoothing = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.options.smoothing,
      oninput: (event) => change("smoothing", Number(event.target.value)),
    });
    const search = h("input", {
      type: "search", id: "search", placeholder: "part of a name", value: this.options.text,
      oninput: (event) => change("text", event.target.value),
    });
    const averages = h("input", {
      type: "checkbox", name: "averages", checked: Boolean(this.options.averages),
      onchange: (event) => change("averages", event.target.checked ? "1" : ""),
    });
    this.change = change;
    this.csv = h("a", { class: "button", download: "metrics.csv", title: "the whole curves of these runs and metrics" }, "CSV");
    return h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      field("Metrics", search), field("Smoothing", smoothing),
      field("Axis", select("axis", AXES, this.options.axis, (event) => change("axis", event.target.value))),
      this.details.size > 1 ? h("label", { class: "check", title: "over steps; the band is from the lowest to the highest" }, averages, "mean over seeds") : null,
      this.csv);
  }

  async draw(box, again = false) {
    if (this.drawn.has(box) && !again) return;
    this.drawn.get(box)?.();
    this.drawn.set(box, () => {});
    const name = box.dataset.metric;
    const { averages } = this.options;
    const runs = [...this.details.values()].filter((run) => run.metrics.includes(name));
    const found = await ask("series", { run: runs.map((run) => run.id), name, averages });
    const curves = [...this.groups()].filter(([key]) => found[key]?.[name]).map(([key, members]) => ({
      label: nameOf(members), ...this.list.style(members[0].id), marks: members.length > 1 ? [] : members[0].marks, ...found[key][name],
    }));
    if (!box.isConnected) return;
    const plot = box.querySelector(".plot");
    fill(plot);
    this.drawn.set(box, drawChart(plot, name, curves, averages ? { ...this.options, axis: "step" } : this.options));
  }

  async showAbout() {
    const runs = [...this.details.values()];
    if (runs.length === 1) {
      fill(this.about, settingsOf(runs[0]));
      return;
    }
    const names = this.mainNames().length ? this.mainNames() : this.names();
    const metric = names.includes(this.options.metric) ? this.options.metric : names.find((name) => name.startsWith("val")) || names[0];
    const found = metric ? await ask("best", { run: runs.map((run) => run.id), name: metric, averages: this.options.averages }) : {};
    const end = LOWER.test(metric) ? "lowest" : "highest";
    const rows = [...this.groups()].map(([key, members]) => ({ members, best: found[key]?.[metric] }));
    const worth = ({ best }) => (best ? (end === "lowest" ? -best[end][1] : best[end][1]) : -Infinity);
    rows.sort((a, b) => worth(b) - worth(a));
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
    const values = (some, key) => new Set(some.map((run) => JSON.stringify(run.config[key])));
    // Of a mean only what all of its runs share.
    const differ = keys.filter((key) => values(runs, key).size > 1 && rows.every(({ members }) => values(members, key).size === 1));
    fill(this.about, h("h2", {}, "Runs by settings and best value"),
      h("div", { class: "controls" }, field("Metric", select("metric", names, metric, (event) => this.change("metric", event.target.value)))),
      table(["run", end, "at step", "last", "state", ...differ], rows.map(({ members, best }) => [
        nameOf(members), short(best?.[end][1]), short(best?.[end][0]), short(best?.last[1]),
        [...new Set(members.map((run) => run.state))].join(", "), ...differ.map((key) => shown(members[0].config[key]))])),
      differ.length ? null : h("p", { class: "note" }, "Their settings do not differ, or are not recorded."));
  }
}

/** The name of a run, or of several the parts that they share. */
function nameOf(runs) {
  if (runs.length === 1) return runs[0].name;
  let same = 0;
  while (runs.every((run) => same < run.name.length && run.name[same] === runs[0].name[same])) same += 1;
  const shared = runs[0].name.slice(0, same).replace(/[-_/. ]*(seed)?[-_/. =]*$/, "");
  return shared ? `${shared}, mean of ${runs.length}` : `mean of ${runs.length}: ${runs[0].name}, …`;
}

function settingsOf(run) {
  const about = [["command", run.command], ["machine", run.host], ["file", run.path], ...Object.entries(run.environment)];
  const isOver = ["failed", "stopped"].includes(run.state);
  const marks = run.marks.map((mark) => [mark.kind, short(mark.step)]);
  return [
    h("h2", {}, `About ${run.name}`),
    table(["", ""], about.filter(([, value]) => value)),
    run.ends.filter((end) => end.why).map((end) => (isOver && end === run.ends.at(-1) ? h("p", { class: "why" }, `ended: ${end.why}`)
      : h("p", { class: "note" }, `an earlier start ended: ${end.why}`))),
    h("details", {}, h("summary", {}, `Checkpoints and resumptions (${marks.length})`), table(["what", "step"], marks)),
    h("details", {}, h("summary", {}, `Settings (${Object.keys(run.config).length})`),
      table(["key", "value"], Object.entries(run.config).map(([key, value]) => [key, shown(value)])))];
}

/** A table of texts; where there is little room, each row with several cells becomes a list with the heads before its cells. */
export function table(heads, rows) {
  return h("div", { class: "scroll" }, h("table", { class: heads.length > 2 ? "wide" : null },
    heads.some(Boolean) ? h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))) : null,
    h("tbody", {}, rows.map(([first, ...others]) => h("tr", {}, h("th", { scope: "row" }, first),
      others.map((cell, place) => h("td", { "data-head": heads[place + 1], class: cell?.length <= 16 ? "brief" : null }, cell)))))));
}

function shown(value) {
  if (value === undefined) return "(not set)";
  return typeof value === "string" ? value : JSON.stringify(value);
}

const FIRST = ["Pinned", "Main"];

/** Names by the title under which they are shown: those that are pinned, the main ones, and the others by their beginning. */
function grouped(names, pins, main) {
  const there = new Set(names);
  const pinned = pins.filter((name) => there.has(name));
  const first = main.filter((name) => there.has(name) && !pins.includes(name));
  const groups = new Map([["Pinned", pinned], ["Main", first]].filter(([, own]) => own.length));
  for (const name of names.filter((one) => !pinned.includes(one) && !first.includes(one))) {
    const group = name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
    groups.set(group, [...(groups.get(group) || []), name]);
  }
  return groups;
}
