// Colours of runs, stages and numbers.

// Of Okabe and Ito: distinct for colour-blind eyes too.
const RUNS = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d00", "#7f7f7f"];

/** Lengths of strokes and gaps; a run beyond the colours has a colour again, and another of these. */
const DASHES = [[], [8, 4], [2, 3], [10, 3, 2, 3], [10, 3, 2, 3, 2, 3]];

/** Colour and dash of the run at a place of the list: different for as many runs as the product of both lists. */
export function runStyle(place) {
  return { colour: RUNS[place % RUNS.length], dash: DASHES[Math.floor(place / RUNS.length) % DASHES.length] };
}

/** The background that looks like a piece of such a line. */
export function lineBackground({ colour, dash }) {
  let at = 0;
  const stops = dash.map((length, part) => {
    const from = at;
    at += length;
    return `${part % 2 ? "transparent" : colour} ${from}px ${at}px`;
  });
  return dash.length ? `repeating-linear-gradient(90deg, ${stops.join(", ")})` : colour;
}

const STAGES = {
  gen: RUNS[0], engines: RUNS[0], reward: RUNS[4], old_log_prob: RUNS[2], ref: RUNS[3], values: "#7b61c4", adv: RUNS[7], update_critic: "#a0522d",
  update_actor: RUNS[1], testing: RUNS[5], save_checkpoint: RUNS[6],
};

/** Colour of a stage, the same for the same name. */
export function stageColour(name) {
  if (name in STAGES) return STAGES[name];
  let hash = 0;
  for (const character of name) hash = (hash * 31 + character.charCodeAt(0)) % 360;
  return `hsl(${hash} 55% 55%)`;
}

/**
 * A function from a number to a background colour. Numbers of both signs go from orange over nothing to blue; those of
 * one sign from nothing to one of the two, the further from 0 the stronger. The ends are the 2nd and 98th percentile.
 */
export function scale(values) {
  const known = values.filter((value) => value !== null).sort((a, b) => a - b);
  if (!known.length) return () => "transparent";
  const at = (share) => Math.abs(known[Math.round(share * (known.length - 1))]);
  const most = Math.max(at(0.02), at(0.98)) || 1;
  return (value) => {
    if (value === null) return "transparent";
    const strength = Math.min(1, Math.abs(value) / most);
    return `rgb(${value < 0 ? "230 110 20" : "30 120 220"} / ${(0.65 * strength).toFixed(3)})`;
  };
}
