"""Sixty mistakes on the command line: each must end with one screen, exit code 2, within ten seconds, no traceback.

``python -m benchmarks.mistakes`` prints a table; ``--only WORD`` runs those whose name holds the word. Every mistake
is a process of its own, started in a folder of its own as a user would.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl

PPO = "verl.trainer.main_ppo"
SCREEN = 40
LIMIT_S = 10.0
ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"
MODEL = "actor_rollout_ref.model"


@dataclass(frozen=True)
class Mistake:
    """One wrong command."""

    name: str
    settings: tuple[str, ...] = ()
    """What is added to a command that would run; ``$RUN`` is its folder."""
    prepare: Callable[[Path], object] = lambda folder: None
    """Breaks a file of the run."""
    module: str = PPO
    bare: bool = False
    """Whether the command has no other settings."""
    environment: dict[str, str] = field(default_factory=dict)
    says: str = ""
    """A word that must be in the message."""


def rows(*changes: dict[str, object]) -> Callable[[Path], object]:
    """Write training rows with changed entries."""
    return lambda folder: write_jsonl(
        folder / "train.jsonl", [row | change for row, change in zip(countdown_rows(16), changes * 16, strict=False)]
    )


def write(name: str, text: str) -> Callable[[Path], object]:
    """Write a file."""
    return lambda folder: (folder / name).write_text(text)


def cut(name: str) -> Callable[[Path], object]:
    """Cut a file to half its length."""
    return lambda folder: (folder / name).write_bytes(
        (folder / name).read_bytes()[: (folder / name).stat().st_size // 2]
    )


MISTAKES = (
    # keys
    Mistake("misspelt key", (f"{ROLLOUT}.temprature=0.7",), says=f"{ROLLOUT}.temperature"),
    Mistake("misspelt section", ("trainr.total_epochs=1",), says="trainer.total_epochs"),
    Mistake("key of another section", ("trainer.train_batch_size=8",), says="data.train_batch_size"),
    Mistake("a section set to a value", ("trainer=5",), says="section"),
    Mistake("a value set to a section", ("data.seed={a: 1}",), says="data.seed"),
    Mistake(
        "old and new key disagree",
        ("algorithm.kl_ctl.init_kl_coef=0.1", "algorithm.kl_ctrl.kl_coef=0.2"),
        says="spelling",
    ),
    Mistake("interpolation of nothing", ("data.seed=${nothing.here}",), says="data.seed"),
    Mistake("no equals sign", ("trainer.total_epochs",), says="trainer.total_epochs"),
    Mistake("spaces around the equals sign", ("trainer.total_epochs", "=", "3")),
    Mistake("dashes before a key", ("--trainer.total_epochs=3",), says="trainer.total_epochs"),
    Mistake("a name of TRL", ("learning_rate=1e-5",), says=f"{ACTOR}.optim.lr=1e-05"),
    Mistake("a misspelt name of TRL", ("num_generation=4",), says=f"{ROLLOUT}.n=4"),
    Mistake("a flag of OpenRLHF", ("--n_samples_per_prompt", "4"), says=f"{ROLLOUT}.n=4"),
    Mistake("unclosed list", ("trainer.logger=[console",), says="trainer.logger"),
    Mistake("unclosed quote", ("trainer.project_name='a",), says="trainer.project_name"),
    # values
    Mistake("a word for a number", ("data.train_batch_size=many",), says="data.train_batch_size"),
    Mistake("a fraction for a count", ("trainer.total_epochs=1.5",), says="trainer.total_epochs"),
    Mistake("a negative learning rate", (f"{ACTOR}.optim.lr=-1e-6",), says="optim.lr"),
    Mistake("an infinite learning rate", (f"{ACTOR}.optim.lr=inf",), says="optim.lr"),
    Mistake("a learning rate of nan", (f"{ACTOR}.optim.lr=nan",), says="optim.lr"),
    Mistake("a number beyond integers", (f"{ROLLOUT}.n=1000000000000000000000000000000",), says="rollout.n"),
    Mistake("top_p above 1", (f"{ROLLOUT}.top_p=90",), says="top_p"),
    Mistake("a negative temperature", (f"{ROLLOUT}.temperature=-1",), says="temperature"),
    Mistake("temperature 0 while sampling", (f"{ROLLOUT}.temperature=0",), says="temperature"),
    Mistake("a temperature that overflows", (f"{ROLLOUT}.temperature=1e-40",), says="temperature"),
    Mistake("batch of 0", ("data.train_batch_size=0",), says="data.train_batch_size"),
    Mistake("yes for true", ("trainer.val_only=perhaps",), says="trainer.val_only"),
    Mistake("null where a number must be", ("data.max_prompt_length=null",), says="data.max_prompt_length"),
    # choices
    Mistake("unknown estimator", ("algorithm.adv_estimator=grppo",), says="grpo"),
    Mistake("unknown loss", (f"{ACTOR}.policy_loss.loss_mode=vanila",), says="vanilla"),
    Mistake("unknown aggregation", (f"{ACTOR}.loss_agg_mode=mean",), says="token-mean"),
    Mistake("unknown engine", (f"{ROLLOUT}.name=vlm",), says="vllm"),
    Mistake("engine that is not installed", (f"{ROLLOUT}.name=sglang",), says="sglang"),
    Mistake("unknown tracker", ("trainer.logger=[wandbb]",), says="wandb"),
    Mistake("tracker that is not installed", ("trainer.logger=[clearml]",), says="clearml"),
    Mistake("unknown reward manager", ("reward_model.reward_manager=naiv",), says="naive"),
    Mistake("unknown scorer", ("reward_model.reward_format=gms8k",), says="gsm8k"),
    Mistake("a part of Megatron that is not built", (f"{ACTOR}.megatron.context_parallel_size=2",), says="1"),
    Mistake("adapters that are not there", (f"{MODEL}.lora_adapter_path=/nowhere",), says="lora_adapter_path"),
    Mistake("tools", (f"{ROLLOUT}.multi_turn.tool_config_path=nowhere.yaml",), says="nowhere.yaml"),
    # sizes
    Mistake("mini-batch that does not divide", (f"{ACTOR}.ppo_mini_batch_size=3",), says="ppo_mini_batch_size"),
    Mistake(
        "micro-batch that does not divide",
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu=3",),
        says="ppo_micro_batch_size_per_gpu",
    ),
    Mistake("mini-batch above the batch", (f"{ACTOR}.ppo_mini_batch_size=64",), says="ppo_mini_batch_size"),
    Mistake(
        "budget below a sequence",
        (f"{ACTOR}.use_dynamic_bsz=true", f"{ACTOR}.ppo_max_token_len_per_gpu=8"),
        says="ppo_max_token_len_per_gpu",
    ),
    Mistake(
        "batch above the data",
        ("data.train_batch_size=400", f"{ACTOR}.ppo_mini_batch_size=400"),
        says="data.train_batch_size",
    ),
    Mistake("two ranks in one process", ("trainer.n_gpus_per_node=2",), says="trainer.controller"),
    Mistake("critic that is not there", ("trainer.critic_warmup=5",), says="critic"),
    # files
    Mistake("no such data", ("data.train_files=nowhere.parquet",), says="nowhere.parquet"),
    Mistake("a folder as data", ("data.train_files=$RUN/model",), says="folder"),
    Mistake("data of another format", ("data.train_files=$RUN/rows.txt",), write("rows.txt", "a"), says="rows.txt"),
    Mistake(
        "damaged parquet",
        ("data.train_files=$RUN/rows.parquet",),
        write("rows.parquet", "PAR1 no"),
        says="rows.parquet",
    ),
    Mistake("cut line of JSON", (), cut("train.jsonl"), says="train.jsonl"),
    Mistake("no such column", ("data.prompt_key=question",), says="question"),
    Mistake("a number as prompt", (), rows({"prompt": 5}), says="train.jsonl"),
    Mistake("no such model folder", (f"{MODEL}.path=./nowhere",), says="./nowhere"),
    Mistake(
        "a model without config", (), lambda folder: (folder / "model" / "config.json").unlink(), says="config.json"
    ),
    Mistake("a damaged model", (), cut("model/model.safetensors"), says="model.safetensors"),
    Mistake(
        "a model without tokenizer", (), lambda f: [p.unlink() for p in (f / "model").glob("*token*")], says="tokenizer"
    ),
    Mistake("no such reward file", ("custom_reward_function.path=mine.py",), says="mine.py"),
    Mistake(
        "no such reward function",
        ("custom_reward_function.path=$RUN/mine.py",),
        write("mine.py", "def other(): ..."),
        says="compute_score",
    ),
    Mistake(
        "a reward file that cannot be read",
        ("custom_reward_function.path=$RUN/mine.py",),
        write("mine.py", "def compute_score(:"),
        says="mine.py",
    ),
    Mistake(
        "no such checkpoint",
        ("trainer.resume_mode=resume_path", "trainer.resume_from_path=$RUN/global_step_9"),
        says="global_step_9",
    ),
    Mistake("a module that is not there", environment={"VERL_USE_EXTERNAL_MODULES": "my_algos"}, says="my_algos"),
    Mistake("no settings at all", bare=True, says="data.train_files"),
    Mistake("a YAML that is not there", ("--config-name", "mine"), bare=True, says="mine"),
    Mistake(
        "supervised: no data",
        ("data.train_files=x.parquet",),
        module="verl.trainer.sft_trainer",
        bare=True,
        says="x.parquet",
    ),
    Mistake("generation: no prompts", module="verl.trainer.main_generation", bare=True, says="data.path"),
)


@dataclass(frozen=True)
class Outcome:
    """What a mistake gave."""

    mistake: Mistake
    code: int
    seconds: float
    text: str

    @property
    def faults(self) -> list[str]:
        """What a user would not like about it."""
        lines = self.text.splitlines()
        found = [
            (self.code != 2, f"exit code {self.code}"),
            (self.seconds > LIMIT_S, f"{self.seconds:.0f} s"),
            (len(lines) > SCREEN, f"{len(lines)} lines"),
            ("Traceback" in self.text, "traceback"),
            (self.mistake.says not in self.text, f"does not say {self.mistake.says}"),
        ]
        return [fault for is_so, fault in found if is_so]


def make(mistake: Mistake, model: dict[str, str], folder: Path) -> Outcome:
    """Run one wrong command in a folder of its own."""
    shutil.copytree(Path(model["train"]).parent, folder)
    paths = {name: str(folder / Path(path).name) for name, path in model.items()}
    mistake.prepare(folder)
    settings = [] if mistake.bare else [*overrides(paths, folder), "trainer.logger=[console]"]
    given = [setting.replace("$RUN", str(folder)) for setting in mistake.settings]
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", mistake.module, *settings, *given],
        cwd=folder,
        env={**os.environ, **mistake.environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
        check=False,
    )
    return Outcome(mistake, done.returncode, time.monotonic() - began, done.stdout)


def main() -> None:
    """Make all mistakes and print what each gave."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="word in the names of the mistakes to make")
    parser.add_argument("--at-once", type=int, default=2, help="commands at a time")
    parser.add_argument("--json", type=Path, help="file for the results")
    parser.add_argument("--show", action="store_true", help="print what the commands said")
    args = parser.parse_args()
    chosen = [mistake for mistake in MISTAKES if args.only in mistake.name]
    with tempfile.TemporaryDirectory() as temporary, ThreadPoolExecutor(args.at_once) as pool:
        root = Path(temporary)
        model = make_tiny_run(root / "whole")
        folders = [root / f"mistake_{number}" for number in range(len(chosen))]
        outcomes = []
        for outcome in pool.map(make, chosen, [model] * len(chosen), folders):
            outcomes.append(outcome)
            verdict = ", ".join(outcome.faults) or "ok"
            sys.stdout.write(
                f"{outcome.mistake.name:38} {outcome.code:3} {outcome.seconds:6.1f} s "
                f"{len(outcome.text.splitlines()):3} lines  {verdict}\n"
            )
            if args.show:
                sys.stdout.write(f"{outcome.text}\n")
            sys.stdout.flush()
    bad = sum(bool(outcome.faults) for outcome in outcomes)
    sys.stdout.write(f"{len(outcomes)} mistakes, {len(outcomes) - bad} told well\n")
    if args.json:
        args.json.write_text(
            json.dumps([{"name": o.mistake.name, "code": o.code, "s": o.seconds, "faults": o.faults} for o in outcomes])
        )


if __name__ == "__main__":
    main()
