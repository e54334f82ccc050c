// Of asynchronous runs: how old the tokens of each step were, and the queue between sampling and training.

import { ask } from "./api.js";
import { drawChart } from "./chart.js";
import { runStyle } from "./colours.js";
import { fill, h, short } from "./dom.js";

const STALENESS = "training/off_policy/trajectory_staleness";
/** Titles of the charts, and in each the metric of a curve by its label. */
const CHARTS = {
  "Groups in the queue": { running: "async/groups/running", finished: "async/groups/finished" },
  "Updates between sampling and training": {
    "newest token, mean": `${STALENESS}/mean`, "newest token, largest": `${STALENESS}/max`, "oldest token, largest": `${STALENESS}_worst/max`,
  },
};

/** Show what a run has of these, of at most the last `most` steps; nothing of other runs. Returns a function that ends the charts. */
export async function showAges(element, run, about, range, most) {
  const charts = Object.entries(CHARTS).map(([title, curves]) => [
    title, Object.entries(curves).filter(([, name]) => about.metrics.includes(name))]).filter(([, curves]) => curves.length);
  if (!charts.length) {
    fill(element);
    return () => {};
  }
  const names = charts.flatMap(([, curves]) => curves.map(([, name]) => name));
  const [steps, found] = await Promise.all([ask("ages", { run: run.id, ...range }), ask("series", { run: [run.id], name: names })]);
  const boxes = charts.map(([title]) => h("figure", { class: "chart" }, h("figcaption", {}, title), h("div", { class: "plot" })));
  fill(element, histogram(steps.slice(-most)), h("div", { class: "charts" }, boxes));
  if (!element.isConnected) return () => {};
  const removes = charts.map(([title, curves], place) => drawChart(boxes[place].querySelector(".plot"), title,
    curves.map(([label, name], line) => ({ label, ...runStyle(line), marks: line ? [] : about.marks, ...found[run.id][name] })),
    { axis: "step", smoothing: 0 }));
  return () => removes.forEach((remove) => remove());
}

function histogram(steps) {
  if (!steps.length) return [];
  const oldest = Math.max(...steps.map(({ shares }) => shares.length)) - 1;
  const ages = [...Array(oldest + 1).keys()].filter((age) => steps.some(({ shares }) => shares[age] > 0));
  const colour = (age) => `hsl(205 65% ${Math.round(78 - (50 * age) / (oldest || 1))}%)`;  // the older, the darker
  const percent = (share) => `${short(Math.round(1000 * share) / 10)} %`;
  return [
    h("h2", {}, `Age of the tokens of the last ${steps.length} steps, in updates`),
    h("div", { class: "legend" }, ages.map((age) => h("span", {}, h("i", { class: "swatch", style: { background: colour(age) } }), age))),
    h("div", { class: "timeline", role: "list", "aria-label": "Shares of tokens by age, step by step" }, steps.map(({ step, shares }) => {
      const parts = ages.filter((age) => shares[age] > 0);
      const said = parts.map((age) => `${percent(shares[age])} of age ${age}`);
      let at = 0;
      return h("div", { class: "step", role: "listitem", "aria-label": `Step ${step}: ${said.join(", ")}` },
        h("span", { class: "label" }, short(step)),
        h("div", { class: "bar" }, parts.map((age, place) => {
          const left = at;
          at += shares[age];
          return h("i", { class: "span", title: said[place], style: { left: `${100 * left}%`, width: `${100 * shares[age]}%`, background: colour(age) } });
        })),
        h("span", { class: "label", title: "mean age" }, `mean ${short(shares.reduce((sum, share, age) => sum + share * age, 0))}`));
    })),
  ];
}
