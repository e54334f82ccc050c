// A table of samples with filters, and one of them with its siblings and its history.

import { ask } from "./api.js";
import { field, fill, h, select, short } from "./dom.js";
import { showOne } from "./sample.js";
import { keepInAddress } from "./place.js";

const MORE = ["step_from", "step_to", "score_from", "score_to", "length_from", "length_to", "status", "source"];
const FILTERS = ["kind", ...MORE, "text", "sort", "descending"];
const KINDS = { train: "training", validation: "validation" };
const NUMBERS = { gap: "gap of rollout", kl: "KL to reference", advantage: "advantage" };
const SORTS = [["step", "step"], ["score", "score"], ["length", "length"], ...Object.entries(NUMBERS)];

/** Show samples; returns {news, key}. */
export async function showSamples(main, parameters, list) {
  const run = list.one(parameters.run);
  if (!run) {
    fill(main, h("p", { class: "empty" }, list.why()));
    return {};
  }
  if (!run.kinds.length) {
    fill(main, h("p", { class: "empty" }, list.whyNoSamples(run)));
    return {};
  }
  const view = new Samples(main, run, parameters);
  await view.start();
  return { news: (changed) => view.news(changed), key: (event) => view.key(event) };
}

class Samples {
  constructor(main, run, parameters) {
    this.main = main;
    this.run = run;
    this.filter = Object.fromEntries(FILTERS.map((name) => [name, parameters[name] || ""]));
    if (!run.kinds.includes(this.filter.kind)) this.filter.kind = run.kinds[0];
    this.sample = parameters.sample || "";
    this.own = parameters.run;
  }

  async start() {
    const values = await ask("sample_values", { run: this.run.id, kind: this.filter.kind });
    this.body = h("tbody");
    this.count = h("p", { class: "count", role: "status" });
    this.more = h("button", { type: "button", hidden: true, onclick: () => this.load(this.next) }, "More");
    this.fresh = h("button", { type: "button", hidden: true, onclick: () => this.load(0) }, "Show new samples");
    this.one = h("section", { class: "one", "aria-label": "Sample" });
    this.heads = h("thead");
    fill(this.main, this.form(values), this.count, this.fresh,
      h("div", { class: "scroll samples" }, h("table", { class: "wide" }, this.heads, this.body)),
      this.more, this.one);
    await this.load(0);
    if (this.sample) await this.open(this.sample, true);
  }

  form(values) {
    const change = (name, anew = false) => (event) => {
      this.filter[name] = event.target.value;
      this.sample = "";
      this.remember();
      if (anew) this.start();
      else this.load(0);
    };
    const number = (name, label, values) => field(label, h("input", {
      type: "number", step: "any", name, value: this.filter[name], placeholder: values, onchange: change(name), class: "number",
    }));
    const any = (all) => [["", "any"], ...all.map((one) => [one, one])];
    const [first, last] = [values.steps[0], values.steps.at(-1)];
    const more = [
      number("step_from", "Step from", first), number("step_to", "Step to", last),
      number("score_from", "Score from"), number("score_to", "Score to"),
      number("length_from", "Length from"), number("length_to", "Length to"),
      field("Finish reason", select("status", any(values.statuses), this.filter.status, change("status"))),
      field("Data source", select("source", any(values.sources), this.filter.source, change("source")))];
    const isOpen = MORE.some((name) => this.filter[name]) || matchMedia("(min-width: 960px)").matches;
    return h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
      h("strong", { class: "of" }, this.run.name),
      field("Samples of", select("kind", this.run.kinds.map((kind) => [kind, KINDS[kind]]), this.filter.kind, change("kind", true))),
      field("Text", h("input", { type: "search", id: "search", name: "text", value: this.filter.text, onchange: change("text") })),
      field("Sort by", select("sort", SORTS, this.filter.sort || "step", change("sort"))),
      field("Order", select("descending", [["1", "highest first"], ["0", "lowest first"]], this.filter.descending || "1", change("descending"))),
      h("details", { class: "more", open: isOpen }, h("summary", {}, "Filters"), h("div", { class: "controls" }, more)));
  }

  /** Show new samples at once, unless that would move what somebody looks at. */
  news(changed) {
    if (!changed.includes(this.run.id)) return;
    if (!this.sample && this.body.children.length <= 100) this.load(0);
    else this.fresh.hidden = false;
  }

  remember(replaces = false) {
    keepInAddress("samples", { run: this.own, ...this.filter, sample: this.sample }, replaces);
  }

  async load(skip) {
    const found = await ask("samples", { run: this.run.id, ...this.filter, skip });
    if (skip === 0) {
      const number = NUMBERS[this.filter.sort];
      const heads = ["step", "score", "length", ...(number ? [number] : []), "finish reason", "data source", "prompt", "response"];
      fill(this.heads, h("tr", {}, heads.map((head) => h("th", { scope: "col" }, head))));
      fill(this.body);
      this.fresh.hidden = true;
    }
    this.body.append(...found.rows.map((row) => this.row(row)));
    this.next = found.next;
    this.more.hidden = found.next === null;
    const shown = this.body.children.length;
    const total = found.total === null ? (found.next === null ? "all that have this text" : "more may follow")
      : `of ${short(found.total)}${found.total >= 100000 ? " or more" : ""}`;
    const none = NUMBERS[this.filter.sort] ? "No sample like that has this number; it is written when its step has ended."
      : "No sample is like that.";
    fill(this.count, shown ? `${short(shown)} samples, ${total}` : none);
  }

  row(sample) {
    const open = () => this.open(sample.id);
    const number = NUMBERS[this.filter.sort];
    const cell = (head, content, name) => h("td", { "data-head": head, class: name }, content);
    return h("tr", { "data-sample": sample.id, onclick: open },
      h("td", { "data-head": "step" }, h("button", { type: "button", class: "link", "aria-label": `open sample of step ${sample.step}` }, short(sample.step))),
      cell("score", short(sample.score), "score"), cell("length", short(sample.length)),
      number ? cell(number, sample[this.filter.sort] === null ? "∞" : short(sample[this.filter.sort]), "number") : null,
      cell("finish reason", sample.status), cell("data source", sample.source),
      cell("prompt", h("bdi", {}, sample.input), "preview"), cell("response", h("bdi", {}, sample.output), "preview"));
  }

  /** Show a sample; "Back" leads to what was shown before, over those that were only passed by keys. */
  async open(id, isPassing = false) {
    this.sample = id;
    this.remember(isPassing);
    for (const row of this.body.children) row.classList.toggle("chosen", row.dataset.sample === String(id));
    await showOne(this.one, id, (other) => this.open(other));
    this.one.scrollIntoView({ block: "nearest" });
  }

  key(event) {
    if (event.key !== "j" && event.key !== "k") return;
    const rows = [...this.body.children];
    const at = rows.findIndex((row) => row.classList.contains("chosen"));
    const next = rows[Math.max(0, Math.min(rows.length - 1, at + (event.key === "j" ? 1 : -1)))];
    if (next) this.open(next.dataset.sample, at >= 0);
  }
}
