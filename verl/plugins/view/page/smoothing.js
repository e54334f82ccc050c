// Exponential moving averages of curves.

/**
 * Smooth values by an exponential moving average, debiased as Adam's moments are; null stays null.
 * The weight is of the past: 0 changes nothing, 0.99 averages over about a hundred points.
 */
export function smoothed(values, weight) {
  if (weight === 0) return values;
  let mean = 0;
  let mass = 0;
  return values.map((value) => {
    if (value === null) return null;
    mean = weight * mean + (1 - weight) * value;
    mass = weight * mass + (1 - weight);
    return mean / mass;
  });
}
