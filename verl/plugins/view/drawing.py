"""Curves for a page without scripts."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np

from verl.plugins.view.curves import extremes

if TYPE_CHECKING:
    from verl.plugins.view.timeline import Mark

WIDTH, HEIGHT = 320, 150
LEFT, BOTTOM, TOP = 46, 18, 8
POINTS = 600
"""Points of a curve; a longer one is drawn by the lowest and highest of each interval."""


TICK = 6
"""Height of the tick of a checkpoint."""


def curve(steps: np.ndarray, values: np.ndarray, marks: Iterable[Mark] = ()) -> str:
    """Return an SVG of one curve, with its lowest and highest value and its first and last step beside the axes.

    Where values are not finite it has a gap, and a cross at the top.

    Args:
        steps: (points,) of the values.
        values: (points,) of the metric.
        marks: ``kind`` and ``step`` of resumptions, drawn as dashed lines, and of checkpoints, ticks at the bottom.
    """
    is_finite = np.isfinite(values)
    if not is_finite.any():
        return "<p>no finite value</p>"
    label = f"{is_finite.sum()} points from {values[is_finite][0]:.4g} to {values[is_finite][-1]:.4g}"
    if not is_finite.all():
        label += f", {(~is_finite).sum()} not finite"
    rows = extremes(values, POINTS)
    steps, values = steps[rows], values[rows]
    is_finite = np.isfinite(values)
    low, high = float(values[is_finite].min()), float(values[is_finite].max())
    first, last = float(steps.min()), float(steps.max())
    scale = (WIDTH - LEFT - 6) / ((last - first) or 1)
    x = LEFT + (steps - first) * scale
    floor = HEIGHT - BOTTOM
    middle = (TOP + floor) / 2
    y = floor - (values - low) / (high - low) * (floor - TOP) if high > low else np.full(len(values), middle)
    pieces = np.split(np.arange(len(x)), np.flatnonzero(np.diff(is_finite)) + 1)
    lines = "".join(_line(x[piece], y[piece]) for piece in pieces if is_finite[piece[0]])
    crosses = "".join(
        f'<text class="not_finite" x="{at:.1f}" y="{TOP + 8}" text-anchor="middle">×</text>' for at in x[~is_finite]
    )
    places = {
        (mark["kind"], f"{LEFT + (mark['step'] - first) * scale:.0f}"): None
        for mark in marks
        if mark["step"] is not None and first <= mark["step"] <= last
    }
    marked = "".join(
        f'<line class="{kind}" x1="{at}" y1="{TOP if kind == "resumed" else floor - TICK}" x2="{at}" y2="{floor}"/>'
        for kind, at in places
    )
    heights = [(TOP + 8, high), (floor, low)] if high > low else [(middle + 4, high)]
    ends = [(f'x="{LEFT}"', first)] + ([(f'x="{WIDTH - 2}" text-anchor="end"', last)] if last > first else [])
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{label}">'
        f'<line x1="{LEFT}" y1="{TOP}" x2="{LEFT}" y2="{floor}"/>'
        f'<line x1="{LEFT}" y1="{floor}" x2="{WIDTH}" y2="{floor}"/>'
        + "".join(f'<text x="{LEFT - 4}" y="{at:g}" text-anchor="end">{value:.4g}</text>' for at, value in heights)
        + "".join(f'<text {at} y="{HEIGHT - 4}">{value:g}</text>' for at, value in ends)
        + f"{marked}{lines}{crosses}</svg>"
    )


def _line(x: np.ndarray, y: np.ndarray) -> str:
    points = " ".join(f"{a:.1f},{b:.1f}" for a, b in zip(x, y, strict=True))
    dot = f'<circle cx="{x[0]:.1f}" cy="{y[0]:.1f}" r="2.5" fill="#2f7fbf"/>' if len(x) == 1 else ""
    return f'<polyline points="{points}"/>{dot}'
