// Alerts of the chosen runs, each with its reason and a link to the samples that show it.

import { ask } from "./api.js";
import { fill, h, short } from "./dom.js";
import { address } from "./place.js";

const SORTS = {
  lowest: { sort: "score", descending: "0" }, highest: { sort: "score", descending: "1" },
  longest: { sort: "length", descending: "1" }, failed: { sort: "score", descending: "0" },
  gap: { sort: "gap", descending: "1" }, kl: { sort: "kl", descending: "1" },
  advantage: { sort: "advantage", descending: "1" }, "no advantage": { sort: "advantage", descending: "0" },
};

/** Show alerts; returns {news}. */
export async function showHealth(main, parameters, list) {
  const load = async () => {
    const runs = list.selected();
    if (!runs.length) {
      fill(main, h("p", { class: "empty" }, list.why()));
      return;
    }
    const found = await ask("alerts", { run: runs.map((run) => run.id) });
    fill(main, runs.map((run) => h("section", {}, h("h2", {}, run.name),
      found[run.id].length ? h("ul", { class: "alerts" }, found[run.id].map((alert) => item(run, alert)))
        : h("p", { class: "empty" }, "No rule is broken."))));
  };
  await load();
  return { news: load };
}

function item(run, alert) {
  const where = { run: run.id, kind: "train", step_from: alert.step, step_to: alert.step, ...SORTS[alert.samples] };
  return h("li", { class: "alert" },
    h("strong", {}, `${alert.title}, step ${short(alert.step)}`), h("p", {}, alert.reason),
    alert.samples && run.kinds.includes("train") ? h("a", { href: address("samples", where) }, "Samples of this step") : null,
    h("span", { class: "count" }, ` ${alert.metric}`));
}
