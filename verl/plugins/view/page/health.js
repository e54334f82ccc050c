// Alerts of the chosen runs, each with its reason and a link to the samples that show it, and the rules that make them.

import { ask } from "./api.js";
import { fill, h, short } from "./dom.js";
import { address } from "./place.js";
import { table } from "./runs.js";

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
      found[run.id].alerts.length ? h("ul", { class: "alerts" }, found[run.id].alerts.map((alert) => item(run, alert)))
        : h("p", { class: "empty" }, "No alert."), rulesOf(found[run.id].rules))));
  };
  await load();
  return { news: load };
}

/** All rules with the metrics of the run that they test; a rule without any cannot give an alert. */
function rulesOf(rules) {
  const tested = rules.filter(({ metrics }) => metrics.length).length;
  return h("details", { open: true }, h("summary", {}, `Rules: ${tested} of ${rules.length} tested`),
    table(["alert", "when", "metrics of this run"], rules.map(({ title, condition, metrics }) => [title, condition, metrics.join(", ") || "none: not tested"])));
}

function item(run, alert) {
  const kind = alert.metric.startsWith("val") ? "validation" : "train";
  const where = { run: run.id, kind, step_from: alert.step, step_to: alert.step, ...SORTS[alert.samples] };
  return h("li", { class: "alert" },
    h("strong", {}, `${alert.title}, step ${short(alert.step)}`), h("p", {}, alert.reason),
    alert.samples && run.kinds.includes(kind) ? h("a", { href: address("samples", where) }, "Samples of this step") : null,
    h("span", { class: "count" }, ` ${alert.metric}`));
}
