"""docs/scoreboard.md and its picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from benchmarks import shape
from benchmarks.scoreboard.peers import ABSENT
from benchmarks.scoreboard.results import Result, table

PAGE = shape.ROOT / "docs/scoreboard.md"
PICTURE = shape.ROOT / "docs/images/scoreboard.png"
COLORS = ("#1f5f8b", "#c25b1c", "#4a7c3a", "#7a4a8c")
HEAD = """# Scoreboard

The same training run by verl and by other frameworks, each in its own environment and by its own command: the same
data in the same order, the same model before, the same sampling, loss, optimizer and number of updates, in fp32. The
programs run one after the other, in an order that is reversed for every seed, so that whatever else the machine does
meets all of them. `make scoreboard` repeats it and writes this page.
"""
NOTES = """## How to read it

- *seconds* are those of the whole command: start, training, saving the model. *start-up* is what passes before the
  first batch. *processor seconds* are the sum over all its threads and processes; other programs on the machine change
  them less. *peak memory* is resident memory summed over its processes.
- A cell is the mean over seeds, with the least and largest value. The seed shuffles the rows and seeds the sampling.
- *seconds to a score*: until the mean score of three batches, whose prompts were never seen before, reaches it.
- *held-out accuracy* is that of greedy responses of the trained model, drawn by the same engine for every framework.
- Supervised training and DPO sample nothing, so the losses of all steps are compared. GRPO draws other responses in
  every framework: there the tokens, advantages and loss of TRL's first pass are saved, and verl computes log-probs and
  loss of the same tokens.

What is unlike: TRL adds 1e-4 to the standard deviation of a group's scores, verl 1e-6. TRL divides a batch at random
into its updates, verl by prompts. TRL's passes count sequences, verl's tokens.
"""


def draw(results: Sequence[Result], path: Path) -> None:
    """Draw the score of each batch of GRPO, or the loss, by seconds."""
    figure, axes = plt.subplots(1, len(results), figsize=(4.5 * len(results), 3.4), squeeze=False, layout="constrained")
    for axis, result in zip(axes.flat, results, strict=True):
        for (name, outcomes), color in zip(result.outcomes.items(), COLORS, strict=False):
            for index, outcome in enumerate(outcomes):
                label = name if index == 0 else None
                axis.plot(*zip(*outcome.curve, strict=True), color=color, alpha=0.8, linewidth=1, label=label)
        if result.task.target is not None:
            axis.axhline(result.task.target, color="grey", linewidth=0.8, linestyle="--")
        axis.set_title(result.task.name, fontsize=10)
        axis.set_xlabel("seconds")
        axis.set_ylabel("mean score of a batch" if result.task.is_sampled else "loss")
        axis.set_xlim(left=0)
        axis.grid(alpha=0.3)
    axes.flat[0].legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def write_page(results: Sequence[Result], command: str, packages: str) -> None:
    """Write the page and the picture."""
    draw(results, PICTURE)
    machine = shape.machine()
    parts = [
        HEAD,
        f"Machine: {machine['cpu']}, {machine['cores']} cores, {machine['memory_gib']} GiB. {packages}.\n",
        f"```text\n{command}\n```\n",
        "![score or loss by seconds](images/scoreboard.png)\n",
        *(f"## {result.task.title}\n\n{describe(result)}\n\n{table(result)}\n" for result in results),
        NOTES,
    ]
    rows = [f"| {name} | {reason} |" for name, reason in ABSENT.items()]
    parts.append("\n".join(["## Frameworks that are not in it", "", "| | why |", "|---|---|", *rows, ""]))
    PAGE.write_text("\n".join(parts))


def describe(result: Result) -> str:
    """The sizes of a run."""
    run = next(iter(result.outcomes.values()))[0].run
    unit = {"grpo": "prompts", "sft": "conversations", "dpo": "pairs"}[run.method]
    sampled = f" × {run.responses} responses" if run.responses > 1 else ""
    seeds = len(next(iter(result.outcomes.values())))
    return (
        f"{run.steps} batches of {run.batch_size} {unit}{sampled}, {run.updates * run.steps} updates, learning rate "
        f"{run.learning_rate:g}; {seeds} {'seeds' if seeds > 1 else 'seed'}."
    )
