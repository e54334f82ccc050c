// The page: tabs, the list of runs, keys, dark and light, news of the server.

import { ask, onNews } from "./api.js";
import { fill, h } from "./dom.js";
import { showHealth } from "./health.js";
import { address, keepInAddress, place, remember, remembered } from "./place.js";
import { RunList } from "./run_list.js";
import { showRuns } from "./runs.js";
import { showSamples } from "./samples.js";
import { showTime } from "./time.js";

const VIEWS = { runs: ["Runs", showRuns], samples: ["Samples", showSamples], time: ["Time", showTime], health: ["Health", showHealth] };
const KEYS = [["1 – 4", "the views"], ["/", "to the search"], ["j, k", "next, previous sample"], ["← →", "next, previous token"],
  ["t", "dark or light"], ["?", "these keys"]];
/** Parameters that hold for any runs: the others name a run, or what one has. */
const OF_ANY_RUN = ["axis", "smoothing", "text", "averages", "metric", "kind", "sort", "descending"];

const main = document.getElementById("main");
const status = document.getElementById("status");
const list = new RunList(document.getElementById("runs"), (runs) => {
  const [view, parameters] = place();
  const kept = Object.entries(parameters).filter(([name]) => OF_ANY_RUN.includes(name));
  left.clear();
  keepInAddress(view, { ...Object.fromEntries(kept), runs });
  show();
});
/** The parameters of each view when it was left. */
const left = new Map();
let shown = {};
let asked = 0;

async function takeRuns() {
  const found = await ask("runs");
  list.take(found.runs, found.indexing);
  fill(status, found.indexing ? "reading samples…" : "");
}

/** Show the view of the address; what takes too long and is not wanted any more is dropped. */
async function show() {
  const chosen = list.read(place()[1].runs);
  if (chosen !== (place()[1].runs ?? "")) keepInAddress(place()[0], { ...place()[1], runs: chosen }, true);
  const [name, { runs, ...parameters }] = place();
  const [title, showView] = VIEWS[name] || VIEWS.runs;
  const mine = ++asked;
  shown.close?.();
  shown = {};
  document.title = `${title}: ${list.selected().map((run) => run.name).join(", ")} – verl view`;
  fill(document.getElementById("tabs"), Object.entries(VIEWS).map(([key, [text]]) =>
    h("a", { href: addressOf(key), "data-view": key, "aria-current": key === name ? "page" : null, onclick: leave }, text)));
  const page = h("div", { class: "view" });
  fill(main, page);
  main.setAttribute("aria-busy", "true");
  try {
    const made = await showView(page, parameters, list);
    if (mine === asked) shown = made;
    else made.close?.();
  } catch (error) {
    fill(page, h("p", { class: "error", role: "alert" }, error.message));
  }
  if (mine === asked) main.setAttribute("aria-busy", "false");
}

/** The address of a view as it was left. */
function addressOf(view) {
  return address(view, left.get(view));
}

/** Keep what the view shows, and go where a tab leads: its address was made when the view was shown. */
function leave(event) {
  event.preventDefault();
  goTo(event.target.dataset.view);
}

function goTo(view) {
  const [name, { runs, ...parameters }] = place();
  left.set(name, parameters);
  location.hash = addressOf(view);
}

function toggleTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  setTheme(dark ? "light" : "dark");
  show();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  remember("theme", theme);
}

function showKeys() {
  const dialog = document.getElementById("keys");
  fill(dialog, h("h2", {}, "Keys"), h("dl", {}, KEYS.map(([key, what]) => [h("dt", {}, key), h("dd", {}, what)])),
    h("form", { method: "dialog" }, h("button", { autofocus: true, onclick: () => dialog.close(), type: "button" }, "Close")));
  dialog.showModal();
}

function onKey(event) {
  if (event.target.matches("input, select, textarea") || event.ctrlKey || event.metaKey || event.altKey) return;
  const view = Object.keys(VIEWS)[Number(event.key) - 1];
  if (view) goTo(view);
  else if (event.key === "/") {
    event.preventDefault();
    (document.getElementById("search") || document.querySelector("#runs input")).focus();
  } else if (event.key === "t") toggleTheme();
  else if (event.key === "?") showKeys();
  else shown.key?.(event);
}

const theme = remembered("theme");
if (theme) setTheme(theme);
document.getElementById("theme").addEventListener("click", toggleTheme);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address says which view is shown, and stays
  main.focus();
});
document.getElementById("help").addEventListener("click", showKeys);
document.addEventListener("keydown", onKey);
addEventListener("hashchange", show);  // Back, Forward, a link, an address that was typed
await takeRuns();
await show();
onNews(async (changed) => {
  const before = list.key();
  await takeRuns();
  list.read(place()[1].runs);
  if (list.key() !== before) show();  // the first run has come, a chosen one was deleted, or its first samples are there
  else shown.news?.(changed);
}, (isConnected) => isConnected || fill(status, "the server does not answer"));
