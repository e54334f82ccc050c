"""A run in TRL, in an environment of its own: ``PYTHON -m benchmarks.scoreboard.trl_program run.json``.

GRPO also saves the first update's tokens, log-probs, advantages and loss, which :mod:`.agreement` computes again.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import TrainerCallback
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

from benchmarks.scoreboard.rewards import compute_score
from benchmarks.scoreboard.run import (
    BETAS,
    CLIP_HIGH,
    CLIP_LOW,
    CLIP_NEGATIVE,
    DPO_BETA,
    GRADIENT_NORM,
    WEIGHT_DECAY,
    Run,
    read_rows,
    read_run,
)


class WriteSteps(TrainerCallback):
    """Writes a line for each batch, when its last update is done."""

    def __init__(self, run: Run) -> None:
        self.run, self.path, self.data = run, Path(run.output) / "metrics.jsonl", {}

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        """Collect the values of an update, the first of each name: the score of a batch comes with its first update."""
        self.data = dict(logs) | self.data
        step, rest = divmod(state.global_step, self.run.updates)
        if rest == 0 and "loss" in logs:
            line = json.dumps({"step": step, "time": time.time(), "data": self.data})
            with self.path.open("a") as file:
                file.write(line + "\n")
            self.data = {}


class RecordingTrainer(GRPOTrainer):
    """TRL's trainer, which saves its first pass."""

    first_pass: dict[str, Any] | None = None
    path: Path

    def _get_per_token_logps_and_entropies(self, *args: Any, **kwargs: Any) -> Any:
        outputs = super()._get_per_token_logps_and_entropies(*args, **kwargs)
        self.log_probs = outputs[0].detach()
        return outputs

    def _compute_loss(self, model: Any, inputs: Any) -> Any:
        loss = super()._compute_loss(model, inputs)
        if self.first_pass is None:
            names = ("prompt_ids", "prompt_mask", "completion_ids", "completion_mask", "advantages")
            self.first_pass = {name: inputs[name] for name in names}
            self.first_pass |= {"log_probs": self.log_probs, "loss": loss.item(), "tokens": self.update_tokens(inputs)}
            torch.save(self.first_pass, self.path)
        return loss

    def update_tokens(self, inputs: Any) -> int:
        """Count the tokens by which the loss of a pass is divided: those of its update."""
        if self.current_gradient_accumulation_steps == 1:
            return int(inputs["completion_mask"].sum())
        share = self.current_gradient_accumulation_steps / self.args.steps_per_generation
        return round(inputs["num_items_in_batch"].item() * share)


def common_settings(run: Run) -> dict[str, Any]:
    """Settings of each trainer."""
    micro_batch = run.micro_batch or run.update_size
    return {
        "output_dir": f"{run.output}/trainer",
        "seed": run.seed,
        "use_cpu": not torch.cuda.is_available(),
        "bf16": False,
        "model_init_kwargs": {"dtype": "float32"},
        "gradient_checkpointing": False,
        "max_steps": run.steps * run.updates,
        "per_device_train_batch_size": micro_batch,
        "gradient_accumulation_steps": run.update_size // micro_batch,
        "learning_rate": run.learning_rate,
        "lr_scheduler_type": "constant",
        "weight_decay": WEIGHT_DECAY,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "max_grad_norm": GRADIENT_NORM,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "disable_tqdm": True,
    }


def grpo_trainer(run: Run) -> GRPOTrainer:
    """Group-relative advantages; the mean over the tokens of an update, whether it is one pass or several."""
    settings = common_settings(run)
    accumulation = settings["gradient_accumulation_steps"]
    config = GRPOConfig(
        **settings,
        num_generations=run.responses,
        steps_per_generation=accumulation * run.updates,
        max_completion_length=run.response_length,
        temperature=1.0,
        top_p=1.0,
        top_k=0,
        beta=0.0,
        epsilon=CLIP_LOW,
        epsilon_high=CLIP_HIGH,
        delta=CLIP_NEGATIVE,
        loss_type="bnpo" if accumulation == 1 else "dapo",
        scale_rewards="group",
        shuffle_dataset=False,
    )
    rows = [
        {"prompt": row["prompt"], "data_source": row["data_source"], "truth": json.dumps(row["reward_model"])}
        for row in read_rows(run.rows)[: run.steps * run.batch_size]
    ]

    def score(completions: list[Any], data_source: list[str], truth: list[str], **_: Any) -> list[float]:
        columns = zip(completions, data_source, truth, strict=True)
        return [
            compute_score(name, text[0]["content"], json.loads(true)["ground_truth"]) for text, name, true in columns
        ]

    trainer = RecordingTrainer(
        model=run.model,
        args=config,
        reward_funcs=score,
        train_dataset=Dataset.from_list(rows),
        callbacks=[WriteSteps(run)],
    )
    trainer.path = Path(run.output) / "first_pass.pt"
    return trainer


def sft_trainer(run: Run) -> SFTTrainer:
    """Loss on the last message of each conversation."""
    config = SFTConfig(
        **common_settings(run),
        max_length=run.prompt_length + run.response_length,
        train_sampling_strategy="sequential",
    )
    rows = [
        {"prompt": row["messages"][:-1], "completion": row["messages"][-1:]}
        for row in read_rows(run.rows)[: run.steps * run.batch_size]
    ]
    return SFTTrainer(model=run.model, args=config, train_dataset=Dataset.from_list(rows), callbacks=[WriteSteps(run)])


def dpo_trainer(run: Run) -> DPOTrainer:
    """Pairs of a prompt, against the model before."""
    config = DPOConfig(
        **common_settings(run),
        beta=DPO_BETA,
        max_length=run.prompt_length + run.response_length,
        train_sampling_strategy="sequential",
    )
    rows = Dataset.from_list(read_rows(run.rows)[: run.steps * run.batch_size])
    return DPOTrainer(model=run.model, args=config, train_dataset=rows, callbacks=[WriteSteps(run)])


def main() -> None:
    """Train, and save the model."""
    run = read_run(Path(sys.argv[1]))
    trainer = {"grpo": grpo_trainer, "sft": sft_trainer, "dpo": dpo_trainer}[run.method](run)
    trainer.train()
    trainer.save_model(f"{run.output}/model")


if __name__ == "__main__":
    main()
