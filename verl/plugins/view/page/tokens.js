// A response as tokens, coloured by a number; the chosen token shows all of its numbers.

import { ask } from "./api.js";
import { scale } from "./colours.js";
import { field, fill, h, select, short, textBlock } from "./dom.js";

const NAMES = {
  advantages: "advantage", rollout_log_probs: "log-prob in the rollout", old_log_probs: "log-prob before the update",
  update_log_probs: "log-prob in the update", ratio: "ratio of the update: new / before", update_clipped: "clipped by the loss",
  ref_log_prob: "log-prob of the reference", teacher_logprobs: "log-prob of the teacher",
  teacher_entropys: "entropy of the teacher", teacher_gap: "gap: before the update − teacher",
  entropys: "entropy", log_prob_gap: "gap: before the update − rollout",
  rollout_is_weights: "importance weight", token_level_scores: "score", token_level_rewards: "reward",
  weight_versions: "weight version",
};
const FIRST = ["teacher_gap", "advantages", "rollout_log_probs", "entropys"];
const MASK = "mask";
const VERSION = "weight_version";
const VERSIONS = "weight_versions";
/** What the colours of a number mean at both ends; a ratio is coloured by its distance to 1. */
const ENDS = { ratio: ["below 1", "above 1"], update_clipped: [null, "clipped"], [MASK]: [null, "the policy's"], [VERSION]: [null, "one version"], [VERSIONS]: [null, "newest weights"] };
const CENTRES = { ratio: 1 };

/** Show the tokens of a sample, if the run wrote them. */
export async function showTokens(element, id) {
  const tokens = await ask(`tokens/${id}`);
  if (tokens === null) {
    fill(element, h("p", { class: "empty" }, "No tokens were written for this step (trainer.rollout_token_dump_freq)."));
    return;
  }
  new Tokens(element, tokens).show();
}

class Tokens {
  constructor(element, tokens) {
    this.element = element;
    this.tokens = tokens;
    this.colouring = FIRST.find((name) => name in tokens.numbers) || MASK;
    this.asText = true;
  }

  /** The prompt that the policy read as its own teacher. */
  ofTeacher() {
    const prompt = this.tokens.teacher_prompt;
    return prompt ? [h("h3", {}, "Prompt as the teacher"), textBlock(prompt.map((token) => token.text).join(""), "prompt of the teacher")] : [];
  }

  show() {
    const names = [...Object.keys(this.tokens.numbers).map((name) => [name, NAMES[name] || name]), [MASK, "chosen by the policy"]];
    const version = this.tokens.weight_version;
    if (!(VERSIONS in this.tokens.numbers) && version !== null && version !== undefined) names.push([VERSION, `weight version: ${version} for all of them`]);
    this.legend = h("span", { class: "legend" });
    this.about = h("dl", { class: "about-token", "aria-live": "polite" });
    this.line = h("div", { class: "tokens", role: "listbox", "aria-label": "Tokens of the response", tabindex: "0", onkeydown: (event) => this.key(event) });
    const colour = (event) => {
      this.colouring = event.target.value;
      this.showLine();
    };
    const form = (event) => {
      this.asText = !event.target.checked;
      this.showLine();
    };
    fill(this.element, ...this.ofTeacher(), h("h3", {}, "Tokens"),
      h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
        field("Colour by", select("colour", names, this.colouring, colour)),
        h("label", { class: "check" }, h("input", { type: "checkbox", name: "split", onchange: form }), " tokens apart"),
        this.legend),
      this.unknown(),
      this.about, this.line,
      this.tokens.left_out ? h("p", {}, `${short(this.tokens.left_out)} more tokens are not shown.`) : null);
    this.showLine();
    this.choose(0);
  }

  /** Which numbers of the update are not in the file, and why. */
  unknown() {
    const { numbers } = this.tokens;
    if (!("update_log_probs" in numbers)) {
      return h("p", { class: "note" }, "Ratio and clip are not known: validation makes no update, and neither do steps that only train the critic; with PF-PPO the update draws other rows; older files lack them.");
    }
    if (!("update_clipped" in numbers)) return h("p", { class: "note" }, "Whether a token was clipped is not known: there is no policy loss (distillation without task rewards), or it is one of your own in the public form, which does not tell.");
    return null;
  }

  showLine() {
    const { response, mask, numbers } = this.tokens;
    const [low, high] = ENDS[this.colouring] || ["below 0", "above 0"];
    fill(this.legend, low ? h("span", { class: "low" }, low) : null, h("span", { class: "high" }, high), h("span", { class: "others" }, "not the policy's"));
    const values = this.colouring in numbers ? numbers[this.colouring] : mask;
    // The oldest weights have the palest colour.
    const oldest = () => Math.min(...values.filter((_, place) => mask[place])) - 1;
    const centre = this.colouring === VERSIONS ? oldest() : CENTRES[this.colouring] || 0;
    const own = values.map((value, place) => (mask[place] && value !== null ? value - centre : null));
    const colour = scale(own);
    this.line.classList.toggle("apart", !this.asText);
    const spans = this.spans();
    const elements = spans.map(({ first, word }) => h("span", {
      role: "option", class: ["token", mask[first] ? "" : "others", word ? "image" : ""].join(" ").trim(), "data-place": first,
      style: { background: colour(own[first]) },
      onmouseenter: () => this.choose(first), onclick: () => this.choose(first),
    }, word || pieces(response[first].text, this.asText)));
    this.elements = new Map(spans.map(({ first }, number) => [first, elements[number]]));
    fill(this.line, elements);
  }

  /** What is shown in a row: each token, and each image as one word at its first token. */
  spans() {
    const images = new Map(this.tokens.images.map(([first, last, word]) => [first, { first, last, word }]));
    const found = [];
    for (let place = 0; place < this.tokens.response.length; place += 1) {
      const span = images.get(place) || { first: place, last: place };
      found.push(span);
      place = span.last;
    }
    return found;
  }

  choose(place) {
    const { response, mask, numbers, images, weight_version: version } = this.tokens;
    if (!response[place]) return;
    this.line.querySelector(".chosen")?.classList.remove("chosen");
    this.elements.get(place)?.classList.add("chosen");
    this.place = place;
    const [, last, word] = images.find(([first]) => first === place) || [place, place, null];
    const facts = [
      ["token", word || JSON.stringify(response[place].text)], ["id", response[place].id],
      ["place", last > place ? `${place + 1} to ${last + 1} of ${response.length}` : `${place + 1} of ${response.length}`],
      ["chosen by the policy", mask[place] ? "yes" : "no"],
      ...Object.entries(numbers).map(([name, values]) => [NAMES[name] || name, short(values[place])]),
      ...(VERSIONS in numbers || version === null || version === undefined ? [] : [["weights", version]]),
    ];
    fill(this.about, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!move) return;
    event.preventDefault();
    const spans = this.spans();
    const now = spans.findIndex(({ first }) => first === this.place);
    this.choose(spans[Math.max(0, Math.min(spans.length - 1, now + move))].first);
    this.line.querySelector(".chosen").scrollIntoView({ block: "nearest" });
  }
}

/** The text of a token; tokens apart show blanks and line ends too. */
function pieces(text, asText) {
  if (asText) return text;
  return text.replaceAll(" ", "·").replaceAll("\n", "⏎\n").replaceAll("\t", "→");
}
