// The page: tabs, the list of runs, keys, dark and light, news of the server.

import { ask, onNews } from "./api.js";
import { fill, h } from "./dom.js";
import { showHealth } from "./health.js";
import { address, keepInAddress, place } from "./place.js";
import { RunList } from "./run_list.js";
import { showRuns } from "./runs.js";
import { showSamples } from "./samples.js";
import { showTime } from "./time.js";

const VIEWS = { runs: ["Runs", showRuns], samples: ["Samples", showSamples], time: ["Time", showTime], health: ["Health", showHealth] };
const KEYS = [["1 – 4", "the views"], ["/", "to the search"], ["j, k", "next, previous sample"], ["← →", "next, previous token"],
  ["t", "dark or light"], ["?", "these keys"]];
const THEME = "verl-view-theme";

const main = document.getElementById("main");
const status = document.getElementById("status");
const list = new RunList(document.getElementById("runs"), () => {
  keepInAddress(place()[0], {});
  show();
});
let shown = {};
let asked = 0;

async function takeRuns() {
  const found = await ask("runs");
  list.take(found.runs);
  fill(status, found.indexing ? "reading samples…" : "");
}

/** Show the view of the address; what takes too long and is not wanted any more is dropped. */
async function show() {
  const [name, parameters] = place();
  const [, showView] = VIEWS[name] || VIEWS.runs;
  const mine = ++asked;
  shown.close?.();
  shown = {};
  fill(document.getElementById("tabs"), Object.entries(VIEWS).map(([key, [title]]) =>
    h("a", { href: address(key), "aria-current": key === name ? "page" : null }, title)));
  const page = h("div", { class: "view" });
  fill(main, page);
  try {
    const made = await showView(page, parameters, list);
    if (mine === asked) shown = made;
    else made.close?.();
  } catch (error) {
    fill(page, h("p", { class: "error", role: "alert" }, error.message));
  }
}

function toggleTheme() {
  const dark = getComputedStyle(document.documentElement).colorScheme.includes("dark");
  setTheme(dark ? "light" : "dark");
  show();
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  localStorage.setItem(THEME, theme);
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
  if (view) location.hash = address(view);
  else if (event.key === "/") {
    event.preventDefault();
    (document.getElementById("search") || document.querySelector("#runs input")).focus();
  } else if (event.key === "t") toggleTheme();
  else if (event.key === "?") showKeys();
  else shown.key?.(event);
}

const saved = localStorage.getItem(THEME);
if (saved) setTheme(saved);
document.getElementById("theme").addEventListener("click", toggleTheme);
document.querySelector(".skip").addEventListener("click", (event) => {
  event.preventDefault();  // the address says which view is shown, and stays
  main.focus();
});
document.getElementById("help").addEventListener("click", showKeys);
document.addEventListener("keydown", onKey);
addEventListener("hashchange", show);
await takeRuns();
await show();
const chosen = () => list.selected().map((run) => run.id).sort().join();
onNews(async (changed) => {
  const before = chosen();
  await takeRuns();
  if (chosen() !== before) show();  // the first run has come, or a chosen one was deleted
  else shown.news?.(changed);
}, (isConnected) => isConnected || fill(status, "the server does not answer"));
