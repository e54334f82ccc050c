"""A model learns Countdown on a laptop: data, supervised warm-up, then GRPO or PPO, and what that changed.

    python examples/quickstart/quickstart.py --algorithm grpo --seed 1 --output_dir outputs/quickstart
    python examples/quickstart/quickstart.py --strategy megatron --ranks 2    # needs the extra "megatron"
    python examples/quickstart/quickstart.py --warm_up_steps 5 --steps 2      # all stages in a minute; learns nothing

Every stage is a command of its own, and is shown before it runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from examples.quickstart.settings import (
    RL_STEPS,
    SFT_STEPS,
    Settings,
    command,
    megatron_settings,
    rl_settings,
    sft_settings,
)

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
ACCURACY = "val-core/countdown/reward/mean@1"
SAMPLES = 3
SHOW_EVERY = 10
QUIET_WAITING = {"OMP_WAIT_POLICY": "passive", "TOKENIZERS_PARALLELISM": "false", "VERL_LOGGING_LEVEL": "ERROR"}
"""Threads that wait give their core away: on a busy machine, spinning ones slow a run several times over."""


@dataclass(frozen=True)
class Outcome:
    """What a run reached."""

    algorithm: str
    seed: int
    prompts: int
    before: float
    after: float
    gained: int
    lost: int
    seconds: float

    @property
    def standard_error(self) -> float:
        """Of ``after - before``, from the prompts that changed: sqrt(gained + lost - (gained - lost)²/N) / N."""
        n, net = self.prompts, self.gained - self.lost
        return max(0.0, self.gained + self.lost - net * net / n) ** 0.5 / n


def read_lines(path: Path) -> list[dict]:
    """The records of a jsonl file."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def read_metrics(path: Path) -> Iterator[tuple[int, dict]]:
    """(step, metrics) of a file written by the tracker ``file``."""
    return ((record["step"], record["data"]) for record in read_lines(path) if "data" in record)


@contextmanager
def ended_at_exit(process: subprocess.Popen) -> Iterator[None]:
    """End a process if the block is left before it ends: by an error, by Ctrl-C, or by SIGTERM, which then exits."""
    previous = signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    try:
        yield
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
        signal.signal(signal.SIGTERM, previous)


def run_stage(title: str, arguments: list[str], log: Path, metrics: Path | None = None) -> float:
    """Run one command, with a line every few steps; returns the seconds that it took."""
    print(f"\n== {title}\n$ {shlex.join(arguments)}", flush=True)
    env = os.environ | QUIET_WAITING | ({"VERL_FILE_LOGGER_PATH": str(metrics)} if metrics else {})
    env["PYTHONPATH"] = os.pathsep.join([str(ROOT), *filter(None, [env.get("PYTHONPATH")])])
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(arguments, stdout=output, stderr=subprocess.STDOUT, env=env)
        with ended_at_exit(process):
            shown = 0
            while process.poll() is None:
                time.sleep(0.2)
                shown = show_new_steps(metrics, shown)
            show_new_steps(metrics, shown)
    seconds = time.monotonic() - started
    if process.returncode:
        tail = "\n".join(log.read_text().splitlines()[-30:])
        raise SystemExit(f"{tail}\n\n{title} failed with exit status {process.returncode}; the whole log: {log}")
    print(f"   done in {seconds:.0f} s", flush=True)
    return seconds


def show_new_steps(metrics: Path | None, shown: int) -> int:
    """Print every tenth step that came since, and each validation; returns how many lines were seen."""
    if metrics is None or not metrics.exists():
        return shown
    lines = metrics.read_text().splitlines(keepends=True)
    complete = [line for line in lines if line.endswith("\n")]
    for record in map(json.loads, complete[shown:]):
        data, step = record.get("data", {}), record["step"]
        if step % SHOW_EVERY == 0 or accuracy_of(data) is not None:
            print("   " + step_line(step, data), flush=True)
    return len(complete)


def step_line(step: int, data: dict) -> str:
    """The numbers of a step that a person follows."""
    names = {
        "train/loss": "loss",
        "critic/score/mean": "reward",
        "response_length/mean": "length",
        "actor/entropy": "entropy",
        "timing_s/step": "seconds",
    }
    values = [f"{label} {data[name]:.3f}" for name, label in names.items() if name in data]
    if (accuracy := accuracy_of(data)) is not None:
        values.append(f"held-out accuracy {accuracy:.3f}")
    return "  ".join([f"step {step:3d}", *values])


def accuracy_of(metrics: dict) -> float | None:
    """The held-out accuracy, in steps with a validation; each of these tasks has one data source."""
    return next((value for name, value in metrics.items() if name.startswith("val-core/")), None)


def exported_model(folder: Path) -> Path:
    """The Hugging Face folder of a run's last checkpoint."""
    found = sorted(folder.glob("**/huggingface"), key=lambda path: path.stat().st_mtime)
    if not found:
        raise SystemExit(f"there is no exported model below {folder}")
    return found[-1]


def compare(validation: Path, algorithm: str, seed: int, seconds: float) -> tuple[Outcome, list[tuple[dict, dict]]]:
    """The first validation against the last, prompt by prompt."""
    steps = sorted(int(path.stem) for path in validation.glob("*.jsonl"))
    first, last = (read_lines(validation / f"{step}.jsonl") for step in (steps[0], steps[-1]))
    pairs = list(zip(first, last, strict=True))
    right = [(a["score"] == 1.0, b["score"] == 1.0) for a, b in pairs]
    n = len(right)
    return Outcome(
        algorithm=algorithm,
        seed=seed,
        prompts=n,
        before=sum(a for a, _ in right) / n,
        after=sum(b for _, b in right) / n,
        gained=sum(b and not a for a, b in right),
        lost=sum(a and not b for a, b in right),
        seconds=seconds,
    ), pairs


def report_accuracy(outcome: Outcome) -> None:
    """What the run changed, in numbers."""
    gain = 100 * (outcome.after - outcome.before)
    print(f"\n== Held-out accuracy on {outcome.prompts} prompts (greedy), seed {outcome.seed}")
    print(f"   after the warm-up   {100 * outcome.before:5.1f} %")
    print(f"   after {outcome.algorithm.upper():<13} {100 * outcome.after:5.1f} %")
    print(
        f"   gain                {gain:+5.1f} points, standard error {100 * outcome.standard_error:.1f} "
        f"({outcome.gained} prompts gained, {outcome.lost} lost)"
    )


def report_samples(pairs: list[tuple[dict, dict]]) -> None:
    """Some responses before and after."""
    print("\n== Sample responses")
    for before, after in pairs[:SAMPLES]:
        verdicts = ["right" if record["score"] == 1.0 else "wrong" for record in (before, after)]
        print(f"   {' '.join(after['input'].split())}")  # chat templates write lines
        print(f"      before  {before['output']}  {verdicts[0]}")
        print(f"      after   {after['output']}  {verdicts[1]}")


def report_files(output: Path, outcome: Outcome) -> None:
    """Where the picture and the trained model are."""
    run = output / outcome.algorithm
    last_step = max(step for step, _ in read_metrics(run / "metrics.jsonl"))
    checkpoint = exported_model(run / "checkpoints" / f"global_step_{last_step}" / "actor")
    print(f"\nreport      {output / 'report.html'}")
    if (output / "curves.png").exists():
        print(f"picture     {output / 'curves.png'}")
    print(f"checkpoint  {checkpoint}")
    print(f"look        verl view {output}")
    print(f"time        {outcome.seconds:.0f} s in all")


def run_quickstart(
    algorithm: str,
    seed: int,
    output: Path,
    changes: Settings | None = None,
    warm_up_steps: int = SFT_STEPS,
    steps: int = RL_STEPS,
) -> Outcome:
    """All stages, and their outcome, which is also in ``outcome.json``; ``changes`` are settings of ``main_ppo``."""

    def warm_up(task: Path, sft: Path, seed: int) -> Settings:
        return sft_settings(task, sft, seed, warm_up_steps)

    def settings(task: Path, model: Path, rl: Path, seed: int) -> Settings:
        return rl_settings(algorithm, task, model, rl, seed, steps) | (changes or {})

    outcome, pairs = run_stages(
        algorithm,
        seed,
        output,
        HERE / "make_task.py",
        warm_up,
        settings,
        (f"Countdown, {algorithm.upper()}", ACCURACY),
    )
    report_accuracy(outcome)
    report_samples(pairs)
    report_files(output, outcome)
    return outcome


def run_stages(
    algorithm: str,
    seed: int,
    output: Path,
    make_task: Path,
    sft_settings: Callable[[Path, Path, int], Settings],
    rl_settings: Callable[[Path, Path, Path, int], Settings],
    curves: tuple[str, str],
) -> tuple[Outcome, list[tuple[dict, dict]]]:
    """Make the task, warm up, train and draw the curves, each stage in a folder of its own below ``output``.

    Args:
        make_task: the script that writes the model and the data.
        sft_settings: of (task, output, seed).
        rl_settings: of (task, model, output, seed).
        curves: title of the picture, and the metric that it shows beside the reward.

    Returns:
        the outcome, which is also in ``outcome.json``, and the first and last validation, prompt by prompt.
    """
    started = time.monotonic()
    task, sft, rl = output / "task", output / "sft", output / algorithm
    for folder in (sft, rl):
        folder.mkdir(parents=True)
    make = [sys.executable, str(make_task), f"--output_dir={task}", f"--seed={seed}"]
    run_stage("Tokenizer, tiny model, data", make, output / "task.log")
    warm_up = command("verl.trainer.sft_trainer", sft_settings(task, sft, seed))
    run_stage("Supervised warm-up", warm_up, sft / "log.txt", sft / "metrics.jsonl")
    train = command("verl.trainer.main_ppo", rl_settings(task, exported_model(sft / "checkpoints"), rl, seed))
    run_stage(f"Reinforcement learning: {algorithm.upper()}", train, rl / "log.txt", rl / "metrics.jsonl")
    return summarize(output, algorithm, seed, started, curves)


def summarize(
    output: Path, algorithm: str, seed: int, started: float, curves: tuple[str, str]
) -> tuple[Outcome, list[tuple[dict, dict]]]:
    """Draw the curves of a finished run and write its report and ``outcome.json``; see :func:`run_stages`."""
    rl, (title, accuracy) = output / algorithm, curves
    if importlib.util.find_spec("matplotlib"):  # of the extra "plot"; the report has the curves too
        from examples.quickstart.curves import draw_curves

        draw_curves(list(read_metrics(rl / "metrics.jsonl")), accuracy, title, output / "curves.png")
    report = [sys.executable, "-m", "verl", "report", str(rl), "--output", str(output / "report.html")]
    run_stage("Report", report, output / "report.log")
    outcome, pairs = compare(rl / "validation", algorithm, seed, time.monotonic() - started)
    (output / "outcome.json").write_text(json.dumps(asdict(outcome), indent=2) + "\n")
    return outcome, pairs


def fresh_folder(path: Path) -> Path:
    """``path``, or the first of ``path-2``, ``path-3``, ... that is not there yet: no run overwrites another."""
    candidate, number = path, 1
    while candidate.exists() and any(candidate.iterdir()):
        number += 1
        candidate = path.with_name(f"{path.name}-{number}")
    candidate.mkdir(parents=True, exist_ok=True)
    return candidate.resolve()


def positive(text: str) -> int:
    """A number of steps."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} steps; at least one is needed")
    return number


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--algorithm", choices=["grpo", "ppo"], default="grpo")
    parser.add_argument("--seed", type=int, default=1, help="of data, weights and sampling")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart"))
    parser.add_argument(
        "--strategy", choices=["fsdp2", "megatron"], default="fsdp2", help="back end of actor and critic"
    )
    parser.add_argument("--ranks", type=int, default=1, help="with megatron: processes that share each weight matrix")
    parser.add_argument("--warm_up_steps", type=positive, default=SFT_STEPS, help="of supervised training")
    parser.add_argument("--steps", type=positive, default=RL_STEPS, help="of reinforcement learning")
    args = parser.parse_args()
    if args.ranks > 1 and args.strategy != "megatron":
        parser.error(f"--ranks {args.ranks} needs --strategy megatron; under fsdp2 the quickstart is one process")
    changes = megatron_settings(args.ranks) if args.strategy == "megatron" else {}
    run_quickstart(args.algorithm, args.seed, fresh_folder(args.output_dir), changes, args.warm_up_steps, args.steps)


if __name__ == "__main__":
    main()
