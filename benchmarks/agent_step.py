"""A GRPO step over conversations with a tool: ours against TRL's GRPOTrainer, in one run.

    python -m benchmarks.agent_step [--prompts 16] [--samples 8] [--rounds 5] [--sizes 256x6 128x2]

The task and the tool are those of the quickstart for agents (``examples/quickstart_agent``), with two models, each
after the supervised warm-up, which is made first: one of the size of the other parts, and the quickstart's, a tenth of
it, with which a step is little else than Python. Questions take two look-ups in the row's secret table. Both generate
conversations of up to four turns, call the tool, score the answer with the same function, and make one optimizer step
in fp32, with a learning rate that leaves the policy as it is. Ours is the trainer itself with one worker in its process
(``trainer.controller=local``). TRL has the tool as a method of its ``environment_factory``, which resets for each row,
and a response template for the same format of calls; no gradient checkpointing, logging once at the end, all sequences
in one pass. The lengths of both are told: they are drawn, so they are alike, but not the same; and so is the time of
the processor, which other programs change less.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks import grpo_step, shape
from benchmarks.shape import ROOT, Turns

TARGET = 2.0
LEARNING_RATE = 1e-7
RESPONSE_TEMPLATE = {
    "defaults": {"role": "assistant"},
    "start_anchor": "<assistant>",
    "fields": {
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": {"close_pattern": r"<eos>", "content": "text"},
    },
}
"""How TRL reads the calls of the quickstart's chat template."""


def our_overrides(arguments: Any, folder: Path) -> list[str]:
    """The command line of the quickstart's run, for one optimizer step a batch."""
    from examples.quickstart_agent.settings import rl_settings

    settings = rl_settings(folder / "task", folder / "model", folder / "run", seed=1) | {
        "data.train_batch_size": arguments.prompts,
        "actor_rollout_ref.rollout.n": arguments.samples,
        "actor_rollout_ref.actor.ppo_mini_batch_size": arguments.prompts,
        "actor_rollout_ref.actor.optim.lr": LEARNING_RATE,
        "trainer.total_training_steps": 10**6,
        "trainer.val_before_train": False,
        "trainer.test_freq": -1,
        "trainer.save_freq": -1,
        "trainer.validation_data_dir": "null",
        "trainer.logger": "[]",
        "trainer.progress": "off",
    }
    return [f"{key}={value}" for key, value in settings.items()]


def play_ours(arguments: Any, folder: Path) -> None:
    """Be our contestant; every turn tells its stages and lengths."""
    turns = Turns()
    steps = grpo_step.steps_of(our_overrides(arguments, folder))

    def run() -> dict[str, Any]:
        metrics = next(steps)
        assert metrics["agent/status/done"] > 0.5, metrics
        times = {name.removeprefix("timing_s/"): v for name, v in metrics.items() if name.startswith("timing_s/")}
        return {
            "stages": {name: seconds for name, seconds in times.items() if "/" not in name},
            "score": metrics["critic/score/mean"],
            "messages": metrics["num_turns/mean"],
        }

    turns.serve(run, versions=shape.versions("torch", "transformers"))


def right_answer(completions: Sequence[Sequence[Mapping[str, Any]]], ground_truth: list[str], **_: Any) -> list[float]:
    """The reward function as TRL calls it."""
    from examples.quickstart_agent.reward import compute_score

    last = (completion[-1].get("content") or "" for completion in completions)
    return [compute_score("look_up", text, truth, {}) for text, truth in zip(last, ground_truth, strict=True)]


class Table:
    """TRL's environment of one conversation: the row's table."""

    def reset(self, table: int = 0, **_: Any) -> None:
        """Take the table of the next row."""
        self._table = table

    def look_up(self, person: str, relation: str) -> str:
        """Who is the friend, teacher, ... of a person.

        Args:
            person: a name.
            relation: the column.
        """
        from examples.quickstart_agent import task

        return task.look_up(self._table, person, relation)


def play_trl(arguments: Any, folder: Path) -> None:
    """Be TRL with the same task."""
    turns = Turns()
    import pyarrow.parquet as pq
    from datasets import Dataset
    from transformers import AutoTokenizer

    from examples.quickstart_agent.settings import MOST_TURNS, RESPONSE_LENGTH

    def reply(metrics: Mapping[str, float]) -> dict[str, float]:
        calls = metrics["tools/call_frequency"]
        assert calls > 0.5, metrics
        # Each call is a message of the model and one of the tool; the question and the answer are two more.
        return {"score": metrics["reward"], "messages": 2 + 2 * calls}

    settings = {
        "per_device_train_batch_size": arguments.prompts * arguments.samples,
        "gradient_accumulation_steps": 1,
        "num_generations": arguments.samples,
        "max_completion_length": RESPONSE_LENGTH,
        "max_tool_calling_iterations": MOST_TURNS - 1,
        "beta": 0.0,
        "learning_rate": LEARNING_RATE,
    }
    tokenizer = AutoTokenizer.from_pretrained(folder / "model")
    tokenizer.response_template = RESPONSE_TEMPLATE
    rows = pq.read_table(folder / "task" / "rl_train.parquet").to_pylist()
    grpo_step.serve_trl(
        turns,
        folder,
        settings | arguments.trl,
        reply,
        reward_funcs=right_answer,
        train_dataset=Dataset.from_list(
            [
                {
                    "prompt": row["prompt"],
                    "ground_truth": row["reward_model"]["ground_truth"],
                    "table": row["extra_info"]["tools_kwargs"]["look_up"]["create_kwargs"]["table"],
                }
                for row in rows
            ]
        ),
        processing_class=tokenizer,
        environment_factory=Table,
    )


def prepare(folder: Path, size: str) -> None:
    """Data and the warmed-up model of both; ``size`` is its width and its number of layers."""
    from examples.quickstart.quickstart import exported_model
    from examples.quickstart.settings import command
    from examples.quickstart_agent.settings import sft_settings

    hidden, layers = size.split("x")
    make_task = [sys.executable, str(ROOT / "examples" / "quickstart_agent" / "make_task.py")]
    sizes = [f"--output_dir={folder / 'task'}", f"--hidden_size={hidden}", f"--layers={layers}"]
    subprocess.run([*make_task, *sizes], check=True, cwd=ROOT, stdout=sys.stderr)
    warm_up = command("verl.trainer.sft_trainer", sft_settings(folder / "task", folder / "sft", seed=1))
    env = os.environ | {"VERL_FILE_LOGGER_ROOT": str(folder)}
    subprocess.run(warm_up, check=True, cwd=ROOT, stdout=sys.stderr, env=env)
    (folder / "model").symlink_to(exported_model(folder / "sft" / "checkpoints").resolve())


def parameters(model: Path) -> str:
    """How many weights an exported model has, in millions."""
    from safetensors import safe_open

    with safe_open(model / "model.safetensors", framework="pt") as file:
        count = sum(math.prod(file.get_slice(name).get_shape()) for name in file.keys())
    return f"{count / 1e6:.2g} M"


def compared(arguments: Any, size: str) -> tuple[str, shape.Comparison]:
    """Both contestants, or one of them, with a model of one size; its number of weights, and what they told."""
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), size)
        sizes = [f"--prompts={arguments.prompts}", f"--samples={arguments.samples}"]
        command = [sys.executable, "-m", "benchmarks.agent_step", *sizes, "--folder", name]
        env = {"OMP_NUM_THREADS": str(arguments.threads)}
        commands = {
            "ours": ([*command, "--contestant", "ours"], env),
            "TRL": ([*command, "--contestant", "TRL", f"--trl={json.dumps(arguments.trl)}"], env),
        }
        chosen = {name: command for name, command in commands.items() if arguments.only in (None, name)}
        return parameters(Path(name) / "model"), shape.compare(chosen, arguments.rounds)


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--samples", type=int, default=8)
    parser.add_argument("--sizes", nargs="+", default=["256x6", "128x2"], help="width x layers of each model")
    parser.add_argument("--trl", type=json.loads, default={}, help="further settings of TRL's GRPOConfig, as JSON")
    parser.add_argument("--only", choices=("ours", "TRL"), help="one of them alone, to look at it")
    parser.add_argument("--contestant", help=shape.argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=shape.argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.tiny:
        arguments.prompts, arguments.samples, arguments.sizes = 2, 2, ["128x2"]
    if arguments.contestant:
        {"ours": play_ours, "TRL": play_trl}[arguments.contestant](arguments, arguments.folder)
        return
    found, rows, stages = shape.Comparison({}, {}), [], {}
    for size in arguments.sizes:
        weights, one = compared(arguments, size)
        what = f"GRPO step over conversations with a tool (native), {weights} parameters"
        rows += grpo_step.rows_against_trl(what, one, TARGET)
        found |= one.named(f", {weights}")
        ours = grpo_step.stages_of(one.replies.get("ours", []))
        stages |= {f"{name} ({weights})": seconds for name, seconds in ours.items()}
    means = {
        name: {key: statistics.fmean(reply[key] for reply in replies) for key in ("cpu_s", "score", "messages")}
        for name, replies in found.replies.items()
    }
    told = {name: ", ".join(f"{key} {value:.2f}" for key, value in of.items()) for name, of in means.items()}
    found.print_times({name: f"; means: {text}" for name, text in told.items()})
    found.write(
        arguments.json,
        part="agent_step",
        work=f"the quickstart for agents, {arguments.prompts} prompts x {arguments.samples} conversations",
        rows=rows,
        stages=stages,
        means=means,
    )


if __name__ == "__main__":
    main()
