"""Runs of one task by all frameworks, and the table of their times."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import verl
from benchmarks.scoreboard.agreement import Agreement, compare_first_pass, compare_losses
from benchmarks.scoreboard.measure import Measurement, measure
from benchmarks.scoreboard.peers import PEERS
from benchmarks.scoreboard.rewards import compute_score
from benchmarks.scoreboard.run import Run, read_rows
from benchmarks.scoreboard.tasks import Material, Task

WINDOW = 3
"""Batches whose mean score has to reach the target: one batch alone may do so by chance."""


@dataclass(frozen=True)
class Outcome:
    """A finished run of a framework."""

    run: Run
    measurement: Measurement
    accuracy: float
    """Greedy, on the held-out prompts."""
    curve: list[tuple[float, float]]
    """Seconds, and mean score of the batch; its loss where nothing is sampled."""

    @property
    def step_seconds(self) -> float:
        """Median time of a batch after the first."""
        times = [time for time, _ in self.curve]
        return statistics.median(b - a for a, b in itertools.pairwise(times))

    @property
    def startup_seconds(self) -> float:
        """Time before the first batch, which is taken to last as long as the median one."""
        return self.curve[0][0] - self.step_seconds

    def seconds_to(self, target: float) -> float | None:
        """Time at which the mean score of three batches reaches the target; None: it never does."""
        for end in range(WINDOW, len(self.curve) + 1):
            if statistics.mean(score for _, score in self.curve[end - WINDOW : end]) >= target:
                return self.curve[end - 1][0]
        return None


@dataclass(frozen=True)
class Result:
    """A task by all frameworks."""

    task: Task
    outcomes: dict[str, list[Outcome]]
    """By framework, one for each seed."""
    agreements: list[Agreement]


def run_task(task: Task, material: Material, pythons: dict[str, str], seeds: int | None, steps: int | None) -> Result:
    """Run every framework once for each seed, in turn, in an order that is reversed each time."""
    outcomes: dict[str, list[Outcome]] = {name: [] for name in pythons}
    agreements: list[Agreement] = []
    for seed in range(1, (seeds or task.seeds) + 1):
        for name in list(pythons)[:: 1 if seed % 2 else -1]:
            output = material.folder / task.name / f"{name.lower()}-{seed}"
            output.mkdir(parents=True)
            run = task.run(material, output, seed, steps)
            outcome = run_peer(name, pythons[name], run, output)
            print(f"   {outcome.measurement.seconds:.0f} s, held-out accuracy {outcome.accuracy:.3f}", flush=True)
            outcomes[name].append(outcome)
            if (output / "first_pass.pt").exists():
                agreements += compare_first_pass(name, run, output / "first_pass.pt")
        if not task.is_sampled and len(pythons) > 1:
            losses = {name: [loss for _, loss in finished[-1].curve] for name, finished in outcomes.items()}
            agreements += compare_losses(losses)
    return Result(task, outcomes, largest(agreements))


def run_peer(name: str, python: str, run: Run, output: Path) -> Outcome:
    """Train, and answer the held-out prompts with the trained model."""
    peer, file = PEERS[name], output / "run.json"
    run.write(file)
    print(f"== {name}, seed {run.seed}: {output}", flush=True)
    measurement = measure(peer.command(python, run, file), output / "metrics.jsonl", output / "log.txt")
    metric = peer.score if run.method == "grpo" else peer.loss
    curve = [(seconds, data[metric]) for seconds, data in measurement.steps if metric in data]
    if len(curve) != run.steps:
        raise SystemExit(f"{name} wrote {metric} of {len(curve)} batches, not of {run.steps}: {output}")
    return Outcome(run, measurement, held_out_accuracy(run, peer.model(run)), curve)


def held_out_accuracy(run: Run, model: Path) -> float:
    """Share of held-out prompts that a model answers rightly, greedily, by the same engine for every framework."""
    rows = read_rows(run.validation)
    settings = {
        "data.batch_size": len(rows),
        "rollout.do_sample": False,
        "rollout.prompt_length": run.prompt_length,
        "rollout.response_length": run.response_length,
    }
    answered = verl.generate(model, rows, settings=settings)
    scores = [
        compute_score(row["data_source"], row["responses"][0], row["reward_model"]["ground_truth"]) for row in answered
    ]
    return statistics.mean(scores)


def largest(agreements: Sequence[Agreement]) -> list[Agreement]:
    """Keep the largest difference of each kind."""
    ordered = sorted(agreements, key=lambda agreement: agreement.difference)
    return list({agreement.what: agreement for agreement in ordered}.values())


# ---- the table ------------------------------------------------------------------------------------

Column = tuple[str, Callable[[Outcome], float | None], str]


def columns_of(task: Task) -> list[Column]:
    """Heading, value of a run, format."""
    columns: list[Column] = [("seconds", lambda outcome: outcome.measurement.seconds, ".0f")]
    if (target := task.target) is not None:
        columns.append((f"seconds to a score of {target}", lambda outcome: outcome.seconds_to(target), ".0f"))
    return [
        *columns,
        ("start-up, s", lambda outcome: outcome.startup_seconds, ".1f"),
        ("a batch, s", lambda outcome: outcome.step_seconds, ".2f"),
        ("processor seconds", lambda outcome: outcome.measurement.cpu_seconds, ".0f"),
        ("peak memory, MiB", lambda outcome: outcome.measurement.peak_bytes / 2**20, ".0f"),
        ("held-out accuracy, %", lambda outcome: 100 * outcome.accuracy, ".1f"),
    ]


def cell(values: Sequence[float | None], form: str) -> str:
    """Mean, and the least and largest value in parentheses."""
    numbers = [value for value in values if value is not None]
    if len(numbers) < len(values):
        return f"{len(numbers)} of {len(values)} runs reached it"
    if len(numbers) == 1:
        return f"{numbers[0]:{form}}"
    return f"{statistics.mean(numbers):{form}} ({min(numbers):{form}}–{max(numbers):{form}})"


def table(result: Result) -> str:
    """One row for each framework."""
    columns = columns_of(result.task)
    lines = ["| | " + " | ".join(heading for heading, _, _ in columns) + " |", "|---" * (len(columns) + 1) + "|"]
    for name, outcomes in result.outcomes.items():
        cells = [cell([value(outcome) for outcome in outcomes], form) for _, value, form in columns]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join([*lines, "", *(f"- {agreement}" for agreement in result.agreements)])
