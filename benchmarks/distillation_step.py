"""A whole step of on-policy distillation: ours against TRL's GKDTrainer and DistillationTrainer, in one run.

    python -m benchmarks.distillation_step [--rounds 5] [--trl_micro 64] [--max_tokens 16384]

The student generates, a teacher of its shape is asked, and one optimizer step in fp32 follows the generalised
Jensen-Shannon divergence over the whole vocabulary (beta 0.5), on the same prompts and as many tokens. TRL generates in
every step (``lmbda=1``), ``--trl_micro`` sequences at once, which are also those of a pass. Its GKDTrainer is
experimental and recommends its DistillationTrainer, which computes the same.
"""

from __future__ import annotations

import functools
import json
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import grpo_step, shape
from benchmarks.grpo_step import LEARNING_RATE, serve_steps, stages_of, steps_of, trl_settings, turn_taker
from benchmarks.shape import TINY, Turns, Work

BETA = 0.5
TARGET = 2.0
TEACHER_SEED = 1


def of_single_responses(work: Work) -> Work:
    """As many sequences, with a prompt each: GKDTrainer draws one response to a prompt."""
    return replace(work, prompts=work.sequences, samples=1)


# ---- ours -----------------------------------------------------------------------------------------


def our_overrides(arguments: Any, folder: Path, work: Work) -> list[str]:
    """The command line of such a run."""
    plain = grpo_step.our_overrides(arguments, folder, work)
    settings = {
        "actor_rollout_ref.actor.use_kl_loss": "false",
        "distillation.enabled": "true",
        "distillation.teacher_models.teacher_model.model_path": folder / "teacher",
        "distillation.distillation_loss.loss_mode": "jsd",
        "distillation.distillation_loss.beta": BETA,
        "distillation.distillation_loss.use_task_rewards": "false",
    }
    last = len(plain) - len(arguments.overrides)
    return plain[:last] + [f"{key}={value}" for key, value in settings.items()] + plain[last:]


def our_steps(arguments: Any, folder: Path, work: Work) -> Iterator[dict[str, float]]:
    """The metrics of one step after the other, each of the full work."""
    for metrics in steps_of(our_overrides(arguments, folder, work)):
        assert metrics["response_length/mean"] == work.response_length
        yield metrics


def play_ours(arguments: Any, folder: Path, work: Work) -> None:
    """Be our contestant."""
    serve_steps(Turns(), our_steps(arguments, folder, work))


# ---- TRL ------------------------------------------------------------------------------------------


def play_distillation(arguments: Any, folder: Path, work: Work) -> None:
    """Be TRL's DistillationTrainer with the same work."""
    turns = Turns()
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl import DistillationConfig, DistillationTrainer

    config = DistillationConfig(
        **trl_settings(folder),
        **passes_of(arguments, work),
        teacher_model_init_kwargs={"dtype": "float32"},
        max_completion_length=work.response_length,
        generation_kwargs={"min_new_tokens": work.response_length},
        beta=BETA,
        learning_rate=LEARNING_RATE,
        **arguments.trl,
    )

    def check() -> dict[str, Any]:
        assert trainer._metrics["train"]["completions/min_length"][-1] == work.response_length
        return {}

    trainer = DistillationTrainer(
        model=str(folder / "model"),
        teacher_model=str(folder / "teacher"),
        args=config,
        train_dataset=Dataset.from_dict({"prompt": grpo_step.conversations(work)}),
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[turn_taker(turns, check)],
    )
    trainer.train()


def passes_of(arguments: Any, work: Work) -> dict[str, int]:
    """TRL's settings of the sequences in a pass."""
    passes = max(1, work.sequences // arguments.trl_micro)
    return {"per_device_train_batch_size": work.sequences // passes, "gradient_accumulation_steps": passes}


def play_gkd(arguments: Any, folder: Path, work: Work) -> None:
    """Be TRL's GKDTrainer with the same work."""
    turns = Turns()
    from datasets import Dataset
    from transformers import AutoTokenizer
    from trl.experimental.gkd import GKDConfig, GKDTrainer

    config = GKDConfig(
        **trl_settings(folder),
        **passes_of(arguments, work),
        teacher_model_init_kwargs={"dtype": "float32"},
        max_new_tokens=work.response_length,
        lmbda=1.0,
        beta=BETA,
        temperature=1.0,
        learning_rate=LEARNING_RATE,
        **arguments.trl,
    )
    answer = [{"role": "assistant", "content": "e"}]  # the trainer wants one, and does not read it with lmbda=1
    rows = Dataset.from_dict({"messages": [chat + answer for chat in grpo_step.conversations(work)]})
    trainer = GKDTrainer(
        model=str(folder / "model"),
        teacher_model=str(folder / "teacher"),
        args=config,
        train_dataset=rows,
        processing_class=AutoTokenizer.from_pretrained(folder / "model"),
        callbacks=[turn_taker(turns, dict)],
    )
    # End tokens are not drawn: all responses are of one length.
    trainer.generation_config.min_new_tokens = work.response_length
    generate = trainer.generate_on_policy_outputs

    @functools.wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> Any:
        made = generate(*args, **kwargs)
        assert made[0].shape[1] == work.prompt_length + work.response_length
        return made

    trainer.generate_on_policy_outputs = checked
    trainer.train()


# ---- the comparison -------------------------------------------------------------------------------


def prepare(folder: Path, work: Work) -> None:
    """Student, teacher, prompts and a reward function that nobody learns from."""
    grpo_step.prepare(folder, work)
    work.save_model(folder / "teacher", seed=TEACHER_SEED)


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.add_argument("--max_tokens", type=int, default=16384, help="tokens per pass of our update")
    parser.add_argument("--trl_micro", type=int, default=64, help="sequences per pass of TRL")
    parser.add_argument("--trl", type=json.loads, default={}, help="further settings of TRL's configuration, as JSON")
    parser.add_argument("--contestant", help=shape.argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=shape.argparse.SUPPRESS)
    parser.add_argument("overrides", nargs="*", help="further settings of our run, key=value")
    arguments = parser.parse_args()
    arguments.rollout = "native"
    work = of_single_responses(TINY if arguments.tiny else Work())
    if arguments.contestant:
        play = {"ours": play_ours, "GKD": play_gkd, "Distillation": play_distillation}[arguments.contestant]
        play(arguments, arguments.folder, work)
        return
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), work)
        common = [sys.executable, "-m", "benchmarks.distillation_step", *(["--tiny"] if arguments.tiny else [])]
        common += ["--folder", name, "--contestant"]
        env = {"OMP_NUM_THREADS": str(arguments.threads)}
        ours = [*common, "ours", f"--max_tokens={arguments.max_tokens}", *arguments.overrides]
        trl = [f"--trl_micro={arguments.trl_micro}", f"--trl={json.dumps(arguments.trl)}"]
        theirs = {name: ([*common, name, *trl], env) for name in ("GKD", "Distillation")}
        found = shape.compare({"ours": (ours, env), **theirs}, arguments.rounds)
    found.print_times()
    stages = stages_of(found.replies["ours"])
    print(", ".join(f"{name} {value:.3f} s" for name, value in stages.items()))
    rows = [
        shape.speed_row("on-policy distillation", f"TRL's {name}Trainer", found.seconds, "ours", name, TARGET)
        for name in theirs
    ]
    found.write(arguments.json, part="distillation_step", work=work.describe(), rows=rows, stages=stages)


if __name__ == "__main__":
    main()
