// One sample: its conversation, its siblings side by side, the answers to its prompt from step to step, its tokens.

import { ask } from "./api.js";
import { fill, h, short, textBlock } from "./dom.js";
import { showTokens } from "./tokens.js";


/** Show a sample in an element; open is called with the id of another one. */
export async function showOne(element, id, open) {
  const sample = await ask(`sample/${id}`);
  const tokens = h("div", { class: "tokens-place" });
  const record = sample.record;
  const hasTurns = Boolean(record.trajectory?.conversation?.length);
  const shown = ["gts", "columns", "trajectory", ...(hasTurns ? [] : ["input", "output"])];
  fill(element,
    h("h2", {}, `Step ${sample.step}, score ${short(sample.score)}`, sample.status ? `, ${sample.status}` : ""),
    record.trajectory?.message ? h("p", { class: "why" }, record.trajectory.message) : null,
    h("h3", {}, "Ground truth"), hasTruth(record.gts) ? textBlock(plain(record.gts), "truth") : h("p", { class: "empty" }, "none"),
    record.columns ? [h("h3", {}, "Columns that the reward function read"), definitions(Object.entries(record.columns))] : null,
    hasTurns
      ? [h("h3", {}, "Conversation"), waterfall(record.trajectory.conversation), conversation(record.trajectory)]
      : [h("h3", {}, "Prompt"), textBlock(record.input, "prompt"), h("h3", {}, "Response"), textBlock(record.output, "response")],
    h("details", {}, h("summary", {}, "All that is recorded"),
      definitions(Object.entries(record).filter(([name]) => !shown.includes(name)))),
    tokens,
    sample.siblings.length > 1 ? siblings(sample, open) : null,
    sample.kind === "validation" && sample.history.length > 1 ? history(sample, open) : null);
  await showTokens(tokens, id);
}

function definitions(entries) {
  return h("dl", {}, entries.map(([name, value]) => [h("dt", {}, name), h("dd", {}, plain(value))]));
}

function plain(value) {
  return typeof value === "string" ? value : JSON.stringify(value);
}

function hasTruth(value) {
  return value !== null && value !== undefined && value !== "";
}

/** When each turn began and how long it took: generations, tools, and the environment behind a generation. */
function waterfall(messages) {
  const bars = [];
  let end = 0;  // of a message that does not say when it began, the one before
  for (const { role, name, seconds, began, environment_seconds: answered } of messages) {
    if (seconds === undefined || seconds === null) continue;
    const begin = began ?? end;
    bars.push({ title: [role, name].filter(Boolean).join(" "), role, begin, seconds });
    end = begin + seconds;
    if (!answered) continue;
    bars.push({ title: "environment", role: "tool", begin: end, seconds: answered });
    end += answered;
  }
  if (!bars.length) return null;
  const first = Math.min(...bars.map((bar) => bar.begin));
  const whole = Math.max(...bars.map((bar) => bar.begin + bar.seconds)) - first || 1;
  return h("div", { class: "timeline turns", role: "list", "aria-label": `Turns, ${short(whole)} s in all` },
    bars.map(({ title, role, begin, seconds }) => h("div", { class: "step", role: "listitem", "aria-label": `${title}: ${short(seconds)} s after ${short(begin - first)} s` },
      h("span", { class: "label name", title }, title),
      h("div", { class: "bar" }, h("i", {
        class: `span ${role}`, style: { left: `${(100 * (begin - first)) / whole}%`, width: `${(100 * seconds) / whole}%` },
      })), h("span", { class: "label" }, `${short(seconds)} s`))));
}

function conversation(trajectory) {
  const scores = trajectory.turn_scores || [];
  const assistants = trajectory.conversation.filter((message) => message.role === "assistant").length;
  let turn = scores.length - assistants;
  return h("ol", { class: "conversation" }, trajectory.conversation.map((message) => {
    if (message.role === "assistant") turn += 1;
    const score = message.role === "assistant" ? scores[turn - 1] : undefined;
    const notes = [
      message.seconds === undefined ? null : `${short(message.seconds)} s`,
      score === undefined ? null : `score ${short(score)}`,
      message.failure || null, message.is_left_out ? "no room left for it" : null,
    ].filter(Boolean);
    const calls = (message.tool_calls || []).map((call) => `→ ${call.function.name}(${call.function.arguments})`);
    const content = said(message.content);
    return h("li", { class: `message ${["assistant", "tool", "user", "system"].includes(message.role) ? message.role : "other"}` },
      h("div", { class: "role" }, [message.role, message.name].filter(Boolean).join(" "), notes.length ? h("small", {}, ` ${notes.join(", ")}`) : null),
      content ? textBlock(content) : null, calls.map((call) => textBlock(call, "call")));
  }));
}

/** The text of a message's content; an image among its parts is named. */
function said(content) {
  if (typeof content === "string" || !content) return content || "";
  const words = { image: () => "<image>", text: (part) => part.text };
  if (Array.isArray(content) && content.every((part) => words[part?.type])) return content.map((part) => words[part.type](part)).join("");
  return JSON.stringify(content);
}

function siblings(sample, open) {
  return h("section", {}, h("h3", {}, `Siblings: ${sample.siblings.length} responses to this prompt`),
    h("div", { class: "cards" }, sample.siblings.map((one) => card(one, one.id === sample.id, `score ${short(one.score)}, ${short(one.length)} tokens`, open))));
}

function history(sample, open) {
  return h("section", {}, h("h3", {}, "The answers to this prompt, from step to step"),
    h("div", { class: "cards" }, sample.history.map((one) => card(one, one.id === sample.id, `step ${one.step}: score ${short(one.score)}`, open))));
}

function card(one, isThis, title, open) {
  return h("article", { class: isThis ? "card chosen" : "card" },
    h("button", { type: "button", class: "link", onclick: () => open(one.id) }, title), textBlock(one.output));
}
