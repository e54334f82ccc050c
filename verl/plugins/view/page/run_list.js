// The list of runs beside every view: which are chosen, and which is looked at.

import { ago, fill, h, short } from "./dom.js";
import { lineBackground, runStyle } from "./colours.js";

const NONE = "none";

/** The runs that the server knows, and the choice among them, which is kept in the address. */
export class RunList {
  /** chosen: called with the choice as the address has it, after a change by the user. */
  constructor(element, chosen) {
    this.element = element;
    this.told = chosen;
    this.runs = [];
    this.chosen = new Set();
    this.text = "";
  }

  /** Take the runs of the server. */
  take(runs, isIndexing) {
    this.runs = runs;
    this.isIndexing = isIndexing;
    this.show();
  }

  /** Take the choice of the address; without one, or if none of its runs is there any more, the first run is chosen. */
  read(runs) {
    const wanted = runs === NONE ? [] : (runs || "").split(",").filter((id) => this.runs.some((run) => run.id === id));
    this.chosen = new Set(wanted.length || runs === NONE ? wanted : this.runs.slice(0, 1).map((run) => run.id));
    this.show();
    return this.runs.length ? [...this.chosen].join() || NONE : runs || "";
  }

  /** The chosen runs, in the order of the list. */
  selected() {
    return this.runs.filter((run) => this.chosen.has(run.id));
  }

  /** What, when it changes, wants the view shown anew: the chosen runs, and which kinds of samples they have. */
  key() {
    return this.selected().map((run) => `${run.id} ${run.kinds}`).sort().join();
  }

  /** What a view says that has no run to show. */
  why() {
    return this.runs.length ? "No run is chosen. Choose one in the list of runs."
      : "There is no run in these folders yet. Runs with trainer.logger=[console,file] leave one.";
  }

  /** The one run of views that show one: the wanted one, else the first that is chosen. */
  one(wanted) {
    return this.runs.find((run) => run.id === wanted) || this.selected()[0];
  }

  /** Why a run has no samples. */
  whyNoSamples(run) {
    return this.isIndexing ? `The samples of ${run.name} are being read.` : `${run.name} has no samples. ${run.no_samples}`;
  }

  style(id) {
    return runStyle(this.runs.find((run) => run.id === id)?.place || 0);
  }

  /** The runs whose names have the text of the search. */
  found() {
    return this.runs.filter((run) => run.name.toLowerCase().includes(this.text));
  }

  toggle(id) {
    const others = [...this.chosen].filter((one) => one !== id);
    this.choose(this.chosen.has(id) ? others : [...others, id]);
  }

  choose(ids) {
    this.chosen = new Set(ids);
    this.show();
    // Several choices in a row are shown once: each showing asks the server for all that is chosen.
    clearTimeout(this.telling);
    this.telling = setTimeout(() => this.told([...this.chosen].join() || NONE), 80);
  }

  show() {
    const items = this.found().map((run) => this.item(run));
    const old = this.element.querySelector("ul");
    if (old) {
      fill(this.element.querySelector(".choices"), this.choices());
      fill(old, items);
      return;
    }
    const search = h("input", {
      type: "search", placeholder: "Find a run", "aria-label": "Find a run",
      oninput: (event) => {
        this.text = event.target.value.toLowerCase();
        this.show();
      },
    });
    const opened = matchMedia("(min-width: 960px)").matches;
    fill(this.element, h("details", { open: opened }, h("summary", {}, "Runs"), search,
      h("div", { class: "choices" }, this.choices()), h("ul", { class: "runs" }, items)));
  }

  /** Buttons that choose all runs or none, where there are several. */
  choices() {
    if (this.runs.length < 2) return [];
    const button = (name, title, choose) => h("button", { type: "button", title, onclick: choose }, name);
    return [
      button("all", "choose all that are listed", () => this.choose(this.found().map((run) => run.id))),
      button("none", "choose none", () => this.choose([])),
      h("span", { class: "count" }, `${this.selected().length} of ${this.runs.length}`)];
  }

  item(run) {
    const look = this.style(run.id);
    const state = run.recovered ? `${run.state}, recovered` : run.state;
    const numbers = Object.entries(run.latest).slice(0, 1).map(([name, value]) => `${name} ${short(value)}`);
    return h("li", { "data-run": run.id },
      h("label", {},
        h("input", {
          type: "checkbox", checked: this.chosen.has(run.id), onchange: () => this.toggle(run.id),
          style: { "accent-color": look.colour },
        }),
        h("span", { class: "line", style: { background: lineBackground(look) } }),
        h("span", { class: "name", title: run.path }, breakable(run.name))),
      h("button", { type: "button", class: "only", title: "this run alone", onclick: () => this.choose([run.id]) }, "only this"),
      h("div", { class: "about" },
        h("span", { class: `state ${run.state}` }, state), ` step ${short(run.step)}, ${ago(run.changed)}`,
        numbers.length ? h("div", {}, numbers) : null));
  }
}

/** A name whose lines end behind a separator where there is one. */
function breakable(name) {
  return name.split(/(?<=[/_.-])/).flatMap((part) => [part, h("wbr")]);
}
