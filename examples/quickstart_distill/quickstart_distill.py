"""A small student learns from a trained teacher on a laptop: on-policy, from the teacher's samples, or by GRPO alone.

    python examples/quickstart_distill/quickstart_distill.py --seed 1 --output_dir outputs/quickstart-distill
    python examples/quickstart_distill/quickstart_distill.py --teacher outputs/quickstart    # of a run of the first one

The teacher is the model of the first quickstart after GRPO. The three ways start at the same student and compute
equally much (``settings.equal_steps``). Every stage is a command of its own, and is shown before it runs.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from transformers import AutoModelForCausalLM

from examples.quickstart.quickstart import (
    accuracy_of,
    exported_model,
    fresh_folder,
    read_metrics,
    run_quickstart,
    run_stage,
)
from examples.quickstart.settings import RL_STEPS, Settings, command
from examples.quickstart_distill.settings import (
    GRPO_STEPS,
    STUDENT,
    distillation_settings,
    equal_steps,
    grpo_settings,
    samples_settings,
    supervised_settings,
    validation_settings,
    warm_up_settings,
)

HERE = Path(__file__).resolve().parent
MAKE_TASK = HERE.parent / "quickstart" / "make_task.py"
PROMPTS = 500
PPO, SFT = "verl.trainer.main_ppo", "verl.trainer.sft_trainer"


@dataclass(frozen=True)
class Result:
    """What one model answers of the held-out prompts, greedily."""

    seed: int
    model: str
    steps: int
    accuracy: float
    seconds: float

    @property
    def standard_error(self) -> float:
        """Of the accuracy: sqrt(p (1 - p) / N)."""
        return (self.accuracy * (1 - self.accuracy) / PROMPTS) ** 0.5


def weights_of(model: Path) -> int:
    """The number of weights, the tied output matrix once."""
    return sum(weight.numel() for weight in AutoModelForCausalLM.from_pretrained(model).parameters())


def run_settings(title: str, module: str, settings: Settings, output: Path) -> float:
    """Run a command whose settings write to ``output``; returns the seconds that it took."""
    output.mkdir(parents=True)
    return run_stage(title, command(module, settings), output / "log.txt", output / "metrics.jsonl")


def last_accuracy(output: Path) -> float:
    """The accuracy of the last validation of a run."""
    (*_, accuracy) = (
        value for _, data in read_metrics(output / "metrics.jsonl") if (value := accuracy_of(data)) is not None
    )
    return accuracy


def run_distillation(seed: int, output: Path, teacher_run: Path | None = None) -> list[Result]:
    """All stages; the results are also in ``outcome.json``.

    Args:
        seed: of data, weights and sampling.
        output: a folder.
        teacher_run: of the first quickstart with the same seed; None trains a teacher.
    """
    if teacher_run is None:
        teacher_run = output / "teacher"
        run_quickstart("grpo", seed, fresh_folder(teacher_run))
    task, teacher = teacher_run / "task", exported_model(teacher_run / "grpo" / "checkpoints")
    results = [Result(seed, "teacher, after GRPO", RL_STEPS, last_accuracy(teacher_run / "grpo"), 0.0)]

    sizes = [f"--{name}={value}" for name, value in STUDENT.items()]
    make = [sys.executable, str(MAKE_TASK), f"--output_dir={output / 'student'}", f"--seed={seed}", *sizes]
    run_stage("Tiny model of the student", make, output / "student.log")
    warm_up, model = output / "warm_up", output / "student" / "model"
    run_settings("Supervised warm-up of the student", SFT, warm_up_settings(task, model, warm_up, seed), warm_up)
    student = exported_model(warm_up / "checkpoints")
    distillation_steps, sft_steps = equal_steps(weights_of(teacher) / weights_of(student))

    def add(name: str, steps: int, run: Path, seconds: float) -> None:
        results.append(Result(seed, name, steps, last_accuracy(run), seconds))

    grpo, distilled, sft, before, after = (output / n for n in ("grpo", "distilled", "sft", "before", "sft_validation"))
    run_settings("The student before", PPO, validation_settings(task, student, before, seed), before)
    add("student, after the warm-up", 0, before, 0.0)
    seconds = run_settings("GRPO of the student", PPO, grpo_settings(task, student, grpo, seed), grpo)
    add("GRPO", GRPO_STEPS, grpo, seconds)
    samples, rows = output / "samples.parquet", output / "sft.parquet"
    generate = command("verl.trainer.main_generation", samples_settings(task, teacher, samples))
    seconds = run_stage("Samples of the teacher", generate, output / "samples.log")
    convert = [sys.executable, str(HERE / "make_sft_data.py"), f"--samples={samples}", f"--output_file={rows}"]
    run_stage("Conversations of the samples", convert, output / "convert.log")
    settings = supervised_settings(task, student, rows, sft, seed, sft_steps)
    seconds += run_settings("Supervised training on the samples", SFT, settings, sft)
    trained = exported_model(sft / "checkpoints")
    run_settings("What it has learnt", PPO, validation_settings(task, trained, after, seed), after)
    add("SFT on the teacher's samples", sft_steps, after, seconds)
    settings = distillation_settings(task, student, teacher, distilled, seed, distillation_steps)
    seconds = run_settings("On-policy distillation", PPO, settings, distilled)
    add("on-policy distillation", distillation_steps, distilled, seconds)
    (output / "outcome.json").write_text(json.dumps([asdict(result) for result in results], indent=2) + "\n")
    return results


HEADER = "| seed | model | steps | held-out accuracy | standard error, points | seconds |\n|---|---|---|---|---|---|"


def table(results: list[Result]) -> str:
    """One row for each model."""
    rows = [
        f"| {r.seed} | {r.model} | {r.steps} | {100 * r.accuracy:.1f} % | {100 * r.standard_error:.1f} "
        f"| {r.seconds:.0f} |"
        for r in results
    ]
    return "\n".join([HEADER, *rows])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of data, weights and sampling")
    parser.add_argument("--teacher", type=Path, help="folder of a run of the first quickstart with the same seed")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart-distill"))
    args = parser.parse_args()
    started = time.monotonic()
    output = fresh_folder(args.output_dir)
    results = run_distillation(args.seed, output, args.teacher)
    print(f"\n{table(results)}\n\ntime        {time.monotonic() - started:.0f} s in all, in {output}")


if __name__ == "__main__":
    main()
