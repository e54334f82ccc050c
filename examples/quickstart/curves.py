"""The picture of a run: reward, held-out accuracy, response length, entropy by step."""

from __future__ import annotations

from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PANELS = [
    ("critic/score/mean", "mean reward of a step"),
    ("response_length/mean", "response length, tokens"),
    ("actor/entropy", "entropy, nats per token"),
]


def draw_curves(history: list[tuple[int, dict]], accuracy: str, title: str, path: Path) -> None:
    """Draw the curves of the metrics that the run has; without its log-probs before the update it has no entropy.

    Args:
        history: (step, metrics), as the tracker ``file`` wrote them.
        accuracy: name of the validation metric.
        title: of the picture.
        path: of the PNG file.
    """
    panels = [PANELS[0], (accuracy, "accuracy on held-out prompts (greedy)"), *PANELS[1:]]
    curves = {name: [(step, metrics[name]) for step, metrics in history if name in metrics] for name, _ in panels}
    panels = [(name, label) for name, label in panels if curves[name]]
    rows, columns = (2, 2) if len(panels) == 4 else (1, len(panels))
    size = (5 * columns, 3.25 * rows)
    figure, axes = plt.subplots(rows, columns, figsize=size, sharex=True, squeeze=False, layout="constrained")
    for axis, (name, label) in zip(axes.flat, panels, strict=True):
        axis.plot(*zip(*curves[name], strict=True), marker="o" if name == accuracy else None, color="#1f5f8b")
        axis.set_title(label, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes[-1]:
        axis.set_xlabel("step")
    figure.suptitle(title)
    figure.savefig(path, dpi=120)
    plt.close(figure)
