// The list of runs beside every view: which are chosen, and which is looked at.

import { ago, fill, h, short } from "./dom.js";
import { runColour } from "./colours.js";

const KEY = "verl-view-runs";

/** The runs that the server knows, and the choice among them. */
export class RunList {
  constructor(element, changed) {
    this.element = element;
    this.changed = changed;
    this.runs = [];
    this.places = new Map();
    this.chosen = new Set(JSON.parse(sessionStorage.getItem(KEY) || "[]"));
    this.text = "";
  }

  /** Take the runs of the server. */
  take(runs) {
    this.runs = runs;
    for (const run of runs) if (!this.places.has(run.id)) this.places.set(run.id, this.places.size);
    this.chosen = new Set([...this.chosen].filter((id) => runs.some((run) => run.id === id)));
    if (!this.chosen.size && runs.length) this.chosen.add(runs[0].id);
    this.show();
  }

  /** The chosen runs, in the order of the list. */
  selected() {
    return this.runs.filter((run) => this.chosen.has(run.id));
  }

  /** The one run of views that show one: the wanted one, else the first that is chosen. */
  one(wanted) {
    return this.runs.find((run) => run.id === wanted) || this.selected()[0];
  }

  colour(id) {
    return runColour(this.places.get(id) || 0);
  }

  choose(id, only) {
    if (only) this.chosen = new Set([id]);
    else if (this.chosen.has(id) && this.chosen.size > 1) this.chosen.delete(id);
    else this.chosen.add(id);
    sessionStorage.setItem(KEY, JSON.stringify([...this.chosen]));
    this.show();
    // Several choices in a row are shown once: each showing asks the server for all that is chosen.
    clearTimeout(this.telling);
    this.telling = setTimeout(this.changed, 80);
  }

  show() {
    const shown = this.runs.filter((run) => run.name.toLowerCase().includes(this.text));
    const items = shown.map((run) => this.item(run));
    const old = this.element.querySelector("ul");
    if (old) {
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
    const opened = matchMedia("(min-width: 760px)").matches;
    fill(this.element, h("details", { open: opened }, h("summary", {}, "Runs"), search, h("ul", { class: "runs" }, items)));
  }

  item(run) {
    const state = run.recovered ? `${run.state}, recovered` : run.state;
    const numbers = Object.entries(run.latest).slice(0, 1).map(([name, value]) => `${name} ${short(value)}`);
    return h("li", { "data-run": run.id },
      h("label", {},
        h("input", {
          type: "checkbox", checked: this.chosen.has(run.id), onchange: () => this.choose(run.id, false),
          style: { "accent-color": this.colour(run.id) },
        }),
        h("span", { class: "swatch", style: { background: this.colour(run.id) } }),
        h("span", { class: "name", title: run.path }, run.name)),
      h("button", { type: "button", class: "only", title: "this run alone", onclick: () => this.choose(run.id, true) }, "only"),
      h("div", { class: "about" },
        h("span", { class: `state ${run.state}` }, state), ` step ${short(run.step)}, ${ago(run.changed)}`,
        numbers.length ? h("div", {}, numbers) : null));
  }
}
