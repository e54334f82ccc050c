// Curves of the chosen runs by group of metrics, their settings, and how these differ.

import { ask } from "./api.js";
import { chartBox, drawChart } from "./chart.js";
import { field, fill, h, select, short } from "./dom.js";

const FIRST = ["critic", "actor", "val-core", "response_length", "train", "reward", "timing_s"];
const AXES = [["step", "step"], ["relative", "time since the start"], ["wall", "time of day"]];
const OPTIONS = "verl-view-curves";

/** Show curves; returns {news, close}. */
export async function showRuns(main, parameters, list) {
  const view = new Curves(main, list);
  await view.load();
  return { news: (changed) => view.news(changed), close: () => view.close() };
}

class Curves {
  constructor(main, list) {
    this.main = main;
    this.list = list;
    this.options = { axis: "step", smoothing: 0, text: "", ...JSON.parse(sessionStorage.getItem(OPTIONS) || "{}") };
    this.drawn = new Map();
    this.open = new Set();
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
    const runs = this.list.selected().map((run) => run.id);
    const found = await ask("details", { run: runs });
    this.details = new Map(runs.map((id) => [id, found[id]]));
  }

  async news(changed) {
    if (!changed.some((id) => this.details.has(id))) return;
    const names = [...this.names()].join();
    await this.ask();
    if ([...this.names()].join() !== names) this.show();
    else for (const box of this.main.querySelectorAll("figure.chart")) if (this.drawn.has(box)) this.draw(box, true);
  }

  close() {
    this.watcher.disconnect();
    for (const remove of this.drawn.values()) remove();
    this.drawn.clear();
  }

  names() {
    const names = new Set([...this.details.values()].flatMap((run) => run.metrics));
    return [...names].filter((name) => name.toLowerCase().includes(this.options.text.toLowerCase())).sort();
  }

  show() {
    this.close();
    const runs = [...this.details.values()];
    this.charts = h("div", { class: "groups" });
    if (!runs.length) {
      fill(this.main, h("p", { class: "empty" }, this.list.why()));
      return;
    }
    fill(this.main, this.controls(), this.charts, this.settings(runs));
    this.showCharts();
  }

  showCharts() {
    this.close();
    const groups = grouped(this.names());
    const order = [...groups.keys()].sort((a, b) => rank(a) - rank(b) || a.localeCompare(b));
    const many = order.length > 6 && !this.options.text;
    fill(this.charts, order.map((group, place) => {
      const isOpen = this.open.has(group) || !many || place < 3;
      const boxes = groups.get(group).map(chartBox);
      boxes.forEach((box) => this.watcher.observe(box));
      const toggled = (event) => (event.target.open ? this.open.add(group) : this.open.delete(group));
      return h("details", { class: "group", open: isOpen, ontoggle: toggled },
        h("summary", {}, h("h2", {}, group), h("span", { class: "count" }, ` ${boxes.length}`)),
        h("div", { class: "charts" }, boxes));
    }), order.length ? null : h("p", { class: "empty" }, "No metric is called like that, or nothing is logged yet."));
  }

  controls() {
    const change = (name, value) => {
      this.options[name] = value;
      sessionStorage.setItem(OPTIONS, JSON.stringify(this.options));
      this.showCharts();
    };
    const smoothing = h("input", {
      type: "range", min: 0, max: 0.99, step: 0.01, value: this.options.smoothing,
      oninput: (event) => change("smoothing", Number(event.target.value)),
    });
    const search = h("input", {
      type: "search", id: "search", placeholder: "part of a name", value: this.options.text,
      oninput: (event) => change("text", event.target.value),
    });
    return h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      field("Metrics", search), field("Smoothing", smoothing),
      field("Axis", select("axis", AXES, this.options.axis, (event) => change("axis", event.target.value))));
  }

  async draw(box, again = false) {
    if (this.drawn.has(box) && !again) return;
    this.drawn.get(box)?.();
    this.drawn.set(box, () => {});
    const name = box.dataset.metric;
    const runs = [...this.details.values()].filter((run) => run.metrics.includes(name));
    const found = await ask("series", { run: runs.map((run) => run.id), name });
    const curves = runs.map((run) => ({
      label: run.name, ...this.list.style(run.id), marks: run.marks, ...found[run.id][name],
    }));
    if (!box.isConnected) return;
    const plot = box.querySelector(".plot");
    fill(plot);
    this.drawn.set(box, drawChart(plot, name, curves, this.options));
  }

  settings(runs) {
    if (runs.length === 1) return settingsOf(runs[0]);
    const keys = [...new Set(runs.flatMap((run) => Object.keys(run.config)))].sort();
    const differ = keys.filter((key) => new Set(runs.map((run) => JSON.stringify(run.config[key]))).size > 1);
    return h("section", {}, h("h2", {}, "Settings that differ"),
      differ.length ? table(["key", ...runs.map((run) => run.name)],
        differ.map((key) => [key, ...runs.map((run) => shown(run.config[key]))])) : h("p", { class: "empty" }, "None."));
  }
}

function settingsOf(run) {
  const about = [["command", run.command], ["machine", run.host], ["file", run.path], ...Object.entries(run.environment)];
  const isOver = ["failed", "stopped"].includes(run.state);
  const marks = run.marks.map((mark) => [mark.kind, short(mark.step)]);
  return h("section", {},
    h("h2", {}, `About ${run.name}`),
    table(["", ""], about.filter(([, value]) => value)),
    run.ends.filter((end) => end.why).map((end) => (isOver && end === run.ends.at(-1) ? h("p", { class: "why" }, `ended: ${end.why}`)
      : h("p", { class: "note" }, `an earlier start ended: ${end.why}`))),
    h("details", {}, h("summary", {}, `Checkpoints and resumptions (${marks.length})`), table(["what", "step"], marks)),
    h("details", {}, h("summary", {}, `Settings (${Object.keys(run.config).length})`),
      table(["key", "value"], Object.entries(run.config).map(([key, value]) => [key, shown(value)]))));
}

/** A table of texts. */
export function table(heads, rows) {
  return h("div", { class: "scroll" }, h("table", {},
    heads.some(Boolean) ? h("thead", {}, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head)))) : null,
    h("tbody", {}, rows.map(([first, ...others]) => h("tr", {}, h("th", { scope: "row" }, first), others.map((cell) => h("td", {}, cell)))))));
}

function shown(value) {
  if (value === undefined) return "(not set)";
  return typeof value === "string" ? value : JSON.stringify(value);
}

function groupOf(name) {
  return name.includes("/") ? name.slice(0, name.indexOf("/")) : "other";
}

function rank(group) {
  const place = FIRST.indexOf(group);
  return place < 0 ? FIRST.length : place;
}

function grouped(names) {
  const groups = new Map();
  for (const name of names) groups.set(groupOf(name), [...(groups.get(groupOf(name)) || []), name]);
  return groups;
}
