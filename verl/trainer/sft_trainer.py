"""``python -m verl.trainer.sft_trainer``: supervised fine-tuning on the engine that RL uses.

A sequence is handed to the engine as a one-token prompt and a response that is all the rest,
with the loss mask as response mask. So the loss is the mean of ``-log p(token)`` over the masked
tokens of the whole batch, whatever the micro-batches, the packing and the number of ranks.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from typing import Any, cast

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.errors import DataError
from verl.protocol import DataProto
from verl.trainer.checkpoint import CheckpointPlan, TrainerCheckpoint
from verl.trainer.config import SFTConfig
from verl.trainer.config.load import hydra_entry, load_config
from verl.trainer.config.sizes import resolve_device
from verl.trainer.controller import load_controller, run_under_controller
from verl.trainer.loop import Metrics, TrainingLoop
from verl.trainer.ppo.balance import layout_for_ranks
from verl.trainer.schedule import Schedule, with_total_steps
from verl.trainer.timing import Stopwatch, stage
from verl.utils.console import Progress
from verl.utils.tracking import Tracking


class SFTTrainer(TrainingLoop):
    """Fits a language model to the responses of a dataset.

    Args:
        config: the whole configuration.
        workers: a worker group of :class:`verl.workers.engine_workers.TrainingWorker`, initialised.
        train_dataset, val_dataset: rows of input_ids, attention_mask, position_ids, loss_mask.
        collate_fn: rows to columns.
        train_sampler: order of the training rows.
    """

    def __init__(
        self,
        config: SFTConfig,
        workers: Any,
        train_dataset: Any,
        val_dataset: Any,
        collate_fn: Callable,
        train_sampler: Any,
    ) -> None:
        super().__init__()
        self.config = config
        self.workers = workers
        data, trainer = config.data, config.trainer
        self.train_dataloader = StatefulDataLoader(
            train_dataset,
            batch_size=data.train_batch_size,
            num_workers=min(data.num_workers, os.cpu_count() or 1),
            sampler=train_sampler,
            drop_last=True,
            collate_fn=collate_fn,
        )
        self.val_dataloader = None
        if val_dataset is not None:
            self.val_dataloader = StatefulDataLoader(
                val_dataset, batch_size=data.train_batch_size, collate_fn=collate_fn
            )
        self.total_training_steps = total_steps(config, len(train_dataset))
        self.schedule = Schedule.of(trainer, self.total_training_steps)
        plan = CheckpointPlan(
            root=trainer.default_local_dir,
            resume_mode=trainer.resume_mode,
            resume_from_path=trainer.resume_from_path,
            keep={".": trainer.max_ckpt_to_keep},
        )
        self.checkpoint = TrainerCheckpoint(plan, {".": workers})

    def fit(self) -> None:
        """Train to the last step: resume, step, validate, save, log."""
        trainer = self.config.trainer
        self._load_checkpoint()
        names = trainer.project_name, trainer.experiment_name
        with (
            Tracking(*names, trainer.logger, self.config.to_dict()) as tracking,
            Progress(self.total_training_steps, self.global_steps, trainer.progress) as progress,
        ):
            self._to_the_last_step(tracking, progress)

    def _one_step(self, rows: Mapping[str, Any]) -> Metrics:
        self.stopwatch = Stopwatch()
        metrics = self.update(to_batch(rows))
        if self.val_dataloader is not None and self.schedule.due("test", self.global_steps):
            metrics["val/loss"] = self.validate()
        if self.schedule.due("save", self.global_steps):
            self._save_checkpoint()
        return metrics | {"train/time(s)": self.stopwatch.seconds["update"]}

    @stage("update")
    def update(self, batch: DataProto) -> Metrics:
        """One optimizer step over the batch."""
        lengths = batch.batch["attention_mask"].sum(-1).tolist()
        order, _ = layout_for_ranks(
            lengths, dp_size=self.workers.world_size, num_mini_batches=1, balance=self.config.data.balance_dp_token
        )
        metrics = self.workers.train_batch(batch.select_idxs(order)).meta_info["metrics"]
        return {"train/" + name.split("/")[-1]: value for name, value in metrics.items()} | {
            "train/global_tokens": float(sum(lengths)),
            "training/epoch": (self.global_steps - 1) // len(self.train_dataloader),
        }

    @stage("testing")
    def validate(self) -> float:
        """Mean loss per masked token over the whole validation set."""
        assert self.val_dataloader is not None
        loss, tokens = 0.0, 0
        for rows in self.val_dataloader:
            batch = to_batch(rows)
            log_probs = self.workers.compute_log_prob(batch).batch["log_probs"]
            mask = batch.batch["response_mask"]
            loss -= (log_probs * mask).sum().item()
            tokens += int(mask.sum())
        return loss / tokens if tokens else math.nan


def total_steps(config: SFTConfig, rows: int) -> int:
    """Steps of a run over ``rows`` training sequences; an incomplete last batch of an epoch is left out.

    Raises:
        DataError: there is not one whole batch.
    """
    batch_size = config.data.train_batch_size
    if rows < batch_size:
        raise DataError(
            f"the training data has {rows} sequences, fewer than one batch of data.train_batch_size={batch_size}. "
            "Give more data, or lower data.train_batch_size."
        )
    return config.trainer.total_training_steps or config.trainer.total_epochs * (rows // batch_size)


def to_batch(rows: Mapping[str, Any]) -> DataProto:
    """A supervised batch in the layout of RL: one-token prompt, the rest is the response."""
    ids = rows["input_ids"]
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": rows["attention_mask"],
            "position_ids": rows["position_ids"],
            "prompts": ids[:, :1],
            "responses": ids[:, 1:],
            "response_mask": rows["loss_mask"][:, 1:],
        }
    )


class SFTRunner:
    """Assembles a supervised run from its configuration and drives it."""

    def run(self, config: SFTConfig) -> None:
        """Load data and model, train.

        Raises:
            DataError: a data file is unusable.
            ResourceError: there are fewer processes or devices than asked for.
        """
        from verl.utils import hf_tokenizer
        from verl.utils.dataset import create_rl_sampler, create_sft_dataset, sft_collate_fn
        from verl.workers.engine_workers import TrainingWorker

        model, data, trainer = config.model, config.data, config.trainer
        tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.custom_chat_template,
        )
        train = create_sft_dataset(data.train_files, data, tokenizer, max_samples=data.train_max_samples)
        val = None
        if data.val_files:
            val = create_sft_dataset(data.val_files, data, tokenizer, max_samples=data.val_max_samples)
        steps = total_steps(config, len(cast(Sized, train)))
        config = replace(config, optim=with_total_steps(config.optim, steps))
        controller, device = load_controller(trainer.controller), resolve_device(config)
        ranks = [trainer.n_gpus_per_node] * trainer.nnodes
        pools = controller.pool_manager({"global_pool": ranks}, {"sft": "global_pool"}, device)
        pools.create_resource_pool()
        workers = controller.WorkerGroup(
            resource_pool=pools.get_resource_pool("sft"),
            ray_cls_with_init=controller.WorkerGroup.describe(TrainingWorker, config=config, device_name=device),
            device_name=device,
        )
        workers.init_model()
        sampler = create_rl_sampler(data, train)
        SFTTrainer(config, workers, train, val, sft_collate_fn(tokenizer, data), sampler).fit()


def run_sft(config: SFTConfig) -> None:
    """Run one supervised training, on Ray or in this process (``trainer.controller``)."""
    config = config if isinstance(config, SFTConfig) else load_config(config, SFTConfig)
    run_under_controller(SFTRunner, config)


def main() -> None:
    """The command line; under ``torchrun`` rank 0 drives and starts the ranks through Ray."""
    if int(os.environ.get("RANK", "0")) > 0:
        return
    hydra_entry(run_sft, config_name="sft_trainer", root=SFTConfig)


if __name__ == "__main__":
    main()
