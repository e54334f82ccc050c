"""Curves for a page without scripts."""

from __future__ import annotations

import numpy as np

from verl.view.curves import extremes

WIDTH, HEIGHT = 320, 150
LEFT, BOTTOM, TOP = 46, 18, 8
POINTS = 600
"""Points of a curve; a longer one is drawn by the lowest and highest of each interval."""


def curve(steps: np.ndarray, values: np.ndarray) -> str:
    """Return an SVG of one curve, with its lowest and highest value and its first and last step beside the axes."""
    finite = np.isfinite(values)
    steps, values = steps[finite], values[finite]
    if not len(steps):
        return "<p>no finite value</p>"
    rows = extremes(values, POINTS)
    steps, values = steps[rows], values[rows]
    low, high, first, last = float(values.min()), float(values.max()), float(steps.min()), float(steps.max())
    x = LEFT + (steps - first) / ((last - first) or 1) * (WIDTH - LEFT - 6)
    floor = HEIGHT - BOTTOM
    middle = (TOP + floor) / 2
    y = floor - (values - low) / (high - low) * (floor - TOP) if high > low else np.full(len(values), middle)
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    dot = f'<circle cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="2.5" fill="#2f7fbf"/>' if len(x) == 1 else ""
    label = f"{len(values)} points from {values[0]:.4g} to {values[-1]:.4g}"
    heights = [(TOP + 8, high), (floor, low)] if high > low else [(middle + 4, high)]
    ends = [(f'x="{LEFT}"', first)] + ([(f'x="{WIDTH - 2}" text-anchor="end"', last)] if last > first else [])
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{floor}"/>'
        f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH}" y2="{floor}"/>'
        + "".join(f'<text x="{LEFT - 4}" y="{at:g}" text-anchor="end">{value:.4g}</text>' for at, value in heights)
        + "".join(f'<text {at} y="{HEIGHT - 4}">{value:g}</text>' for at, value in ends)
        + f'<polyline points="{points}"/>{dot}</svg>'
    )
