// A response as tokens, coloured by a number; the chosen token shows all of its numbers.

import { ask } from "./api.js";
import { scale } from "./colours.js";
import { field, fill, h, select, short } from "./dom.js";

const NAMES = {
  advantages: "advantage", rollout_log_probs: "log-prob in the rollout", old_log_probs: "log-prob before the update",
  ref_log_prob: "log-prob of the reference", entropys: "entropy", log_prob_gap: "gap: before the update − rollout",
  rollout_is_weights: "importance weight", token_level_scores: "score", token_level_rewards: "reward",
};
const FIRST = ["advantages", "rollout_log_probs", "entropys"];
const MASK = "mask";

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

  show() {
    const names = [...Object.keys(this.tokens.numbers).map((name) => [name, NAMES[name] || name]), [MASK, "chosen by the policy"]];
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
    fill(this.element, h("h3", {}, "Tokens"),
      h("form", { class: "controls", onsubmit: (event) => event.preventDefault() },
        field("Colour by", select("colour", names, this.colouring, colour)),
        h("label", { class: "check" }, h("input", { type: "checkbox", name: "split", onchange: form }), " tokens apart"),
        h("span", { class: "legend" }, h("span", { class: "low" }, "below 0"), h("span", { class: "high" }, "above 0"), h("span", { class: "others" }, "not the policy's"))),
      this.about, this.line,
      this.tokens.left_out ? h("p", {}, `${short(this.tokens.left_out)} more tokens are not shown.`) : null);
    this.showLine();
    this.choose(0);
  }

  showLine() {
    const { response, mask, numbers } = this.tokens;
    const values = this.colouring === MASK ? mask : numbers[this.colouring];
    const own = values.map((value, place) => (mask[place] ? value : null));
    const colour = scale(own);
    this.line.classList.toggle("apart", !this.asText);
    fill(this.line, response.map((token, place) => h("span", {
      role: "option", class: mask[place] ? "token" : "token others", "data-place": place,
      style: { background: colour(own[place]) },
      onmouseenter: () => this.choose(place), onclick: () => this.choose(place),
    }, pieces(token.text, this.asText))));
  }

  choose(place) {
    const { response, mask, numbers, weight_version: version } = this.tokens;
    if (!response[place]) return;
    this.line.querySelector(".chosen")?.classList.remove("chosen");
    this.line.children[place]?.classList.add("chosen");
    this.place = place;
    const facts = [
      ["token", JSON.stringify(response[place].text)], ["id", response[place].id], ["place", `${place + 1} of ${response.length}`],
      ["chosen by the policy", mask[place] ? "yes" : "no"],
      ...Object.entries(numbers).map(([name, values]) => [NAMES[name] || name, short(values[place])]),
      ...(version === null || version === undefined ? [] : [["weights", version]]),
    ];
    fill(this.about, facts.map(([name, value]) => h("div", {}, h("dt", {}, name), h("dd", {}, value))));
  }

  key(event) {
    const move = { ArrowRight: 1, ArrowLeft: -1, ArrowDown: 10, ArrowUp: -10 }[event.key];
    if (!move) return;
    event.preventDefault();
    this.choose(Math.max(0, Math.min(this.tokens.response.length - 1, this.place + move)));
    this.line.querySelector(".chosen").scrollIntoView({ block: "nearest" });
  }
}

/** The text of a token; tokens apart show blanks and line ends too. */
function pieces(text, asText) {
  if (asText) return text;
  return text.replaceAll(" ", "·").replaceAll("\n", "⏎\n").replaceAll("\t", "→");
}
