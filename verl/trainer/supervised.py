"""Training on data that is already there: what supervised, reward-model and preference runs share.

A trainer says what a batch of rows looks like to the engine (:meth:`SupervisedTrainer.to_batch`) and what
is measured on the validation rows; a runner says which worker, data set and trainer belong together.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sized
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.errors import DataError
from verl.protocol import DataProto
from verl.trainer.checkpoint import CheckpointPlan, TrainerCheckpoint
from verl.trainer.config.sizes import resolve_device
from verl.trainer.controller import load_controller
from verl.trainer.loop import Metrics, TrainingLoop
from verl.trainer.ppo.balance import layout_for_ranks
from verl.trainer.schedule import Schedule, with_total_steps
from verl.trainer.timing import Stopwatch, stage
from verl.utils.dataset.loading import ending_with_driver
from verl.utils.flops_counter import Arithmetic
from verl.workers.engine.non_finite import in_batch_order

if TYPE_CHECKING:
    from torch.utils.data import Dataset

    from verl.single_controller.base import ClassWithInitArgs
    from verl.single_controller.base.resource_pool import PoolManager
    from verl.trainer.config import SFTConfig
    from verl.trainer.config.preference import DPOConfig, RMConfig

    Config = SFTConfig | RMConfig | DPOConfig


@dataclass
class Ranks:
    """The workers of a supervised run: one group, over all ranks."""

    role: str
    worker: ClassWithInitArgs
    pools: PoolManager
    group_class: type
    device: str
    hang_timeout_s: float | None
    group: Any = None
    """The worker group, once started."""

    def start(self) -> Any:
        """Start the workers and load their model; the group."""
        self.pools.create_resource_pool()
        pool = self.pools.get_resource_pool(self.role)
        self.group = self.group_class(resource_pool=pool, ray_cls_with_init=self.worker, device_name=self.device)
        self.group.guard(self.hang_timeout_s)
        self.group.init_model()
        return self.group

    def end(self) -> None:
        """End the workers and give their places back; they can be started again."""
        if self.group is not None:
            self.group.shutdown()
            self.group = None
        self.pools.release()


class SupervisedTrainer(TrainingLoop):
    """Fits a model to the rows of a data set, one optimizer step per batch.

    Args:
        config: the whole configuration.
        ranks: where the workers live, and how they start.
        train_dataset, val_dataset: rows, or pairs of them; validation may be None.
        collate_fn: items of the data set to the columns of a batch.
        train_sampler: order of the training items.
    """

    rows_per_unit: ClassVar[int] = 1
    """Rows of the engine's batch that belong together: 1, or 2 for the sides of a pair."""

    def __init__(
        self,
        config: Config,
        ranks: Ranks,
        train_dataset: Any,
        val_dataset: Any,
        collate_fn: Callable,
        train_sampler: Any,
    ) -> None:
        super().__init__(config.trainer)
        self.config = config
        self.ranks = ranks
        data, trainer = config.data, config.trainer
        self.train_dataloader = StatefulDataLoader(
            train_dataset,
            batch_size=data.train_batch_size,
            num_workers=min(data.num_workers, os.cpu_count() or 1),
            sampler=train_sampler,
            drop_last=True,
            generator=self.own_draws(),
            worker_init_fn=ending_with_driver(),
            collate_fn=collate_fn,
        )
        self.val_dataloader = None
        if val_dataset is not None:
            self.val_dataloader = StatefulDataLoader(
                val_dataset, batch_size=data.train_batch_size, generator=self.own_draws(), collate_fn=collate_fn
            )
        self.total_training_steps = total_steps(config, len(train_dataset))
        self.schedule = Schedule.of(trainer, self.total_training_steps)
        plan = CheckpointPlan.of(trainer, keep={".": trainer.max_ckpt_to_keep})
        self.checkpoint = TrainerCheckpoint(plan, {})

    @property
    def trained_groups(self) -> dict[str, Any]:
        """See :meth:`TrainingLoop.trained_groups`."""
        return {".": self.workers}

    def start_workers(self) -> None:
        """See :meth:`TrainingLoop.start_workers`."""
        self.workers: Any = self.ranks.start()
        self.pass_limits.tell([self.workers])
        self.arithmetic = Arithmetic.of_ranks(self.workers.arithmetic())
        self.checkpoint.workers_replaced(self.trained_groups)

    def end_workers(self) -> None:
        """See :meth:`TrainingLoop.end_workers`."""
        self.ranks.end()

    def to_batch(self, rows: Mapping[str, Any]) -> DataProto:
        """Columns of the data set to the layout that the engine reads."""
        raise NotImplementedError(f"{type(self).__name__} must say what a batch looks like.")

    def validate(self) -> Metrics:
        """Metrics over the whole validation set, named ``val/...``."""
        raise NotImplementedError(f"{type(self).__name__} must say what is measured.")

    def fit(self) -> None:
        """Train to the last step: resume, step, validate, save, log."""
        self.recovery.protect(lambda: None if self.ranks.group else self.start_workers())
        self._train(self.config.trainer, self.config.to_dict())
        self.end_workers()

    def _one_step(self, rows: Mapping[str, Any]) -> Metrics:
        self.stopwatch = Stopwatch()
        batch = self.to_batch(rows)
        metrics = self.update(batch)
        if self.val_dataloader is not None and self.schedule.due("test", self.global_steps):
            metrics |= self.validate()
        self._save_if_due()
        seconds = self.stopwatch.seconds["update"]
        mfu = self.arithmetic.utilization(self.useful_flops(batch), seconds)
        return metrics | {"train/time(s)": seconds} | ({} if mfu is None else {"train/mfu": mfu})

    @stage("update")
    def update(self, batch: DataProto) -> Metrics:
        """One optimizer step over the batch; units are dealt out to the ranks whole."""
        unit = self.rows_per_unit
        lengths = batch.batch["attention_mask"].view(len(batch) // unit, -1).sum(-1).tolist()
        order, _ = layout_for_ranks(
            lengths, dp_size=self.workers.world_size, num_mini_batches=1, balance=self.config.data.balance_dp_token
        )
        dealt = batch.select_idxs([unit * i + row for i in order for row in range(unit)])
        report = self.train_on(dealt).meta_info
        self.pass_limits.see("update", report["metrics"])
        metrics = {f"train/{name.removeprefix('perf/')}": value for name, value in report["metrics"].items()}
        problems = in_batch_order(report["non_finite"], range(len(dealt)), self.workers.world_size)
        self.bad_steps.see(self.global_steps, "update", metrics, dealt, problems)
        return metrics | {
            "train/global_tokens": float(sum(lengths)),
            "training/epoch": self.epochs.epoch,
            **self.bad_steps.metrics(),
        }

    def useful_flops(self, batch: DataProto) -> float | None:
        """Arithmetic of one optimizer step, None where it is not known."""
        columns = batch.batch
        lengths = columns["attention_mask"].sum(-1).tolist()
        return self.arithmetic.training_flops(lengths, int(columns["response_mask"].sum()))

    def train_on(self, batch: DataProto) -> DataProto:
        """What the workers do with a batch whose rows lie as the ranks get them; returns its metrics."""
        return self.workers.train_batch(batch)


def total_steps(config: Config, rows: int) -> int:
    """Steps of a run over ``rows`` training items; an incomplete last batch of an epoch is left out.

    Raises:
        DataError: there is not one whole batch.
    """
    batch_size = config.data.train_batch_size
    if rows < batch_size:
        raise DataError(
            f"the training data has {rows} rows, fewer than one batch of data.train_batch_size={batch_size}. "
            "Give more data, or lower data.train_batch_size."
        )
    return config.trainer.total_training_steps or config.trainer.total_epochs * (rows // batch_size)


def read_first(dataset: Any, count: int = 32) -> None:
    """Read some rows before a model is loaded: a template that cannot be learned from shows in the first of them.

    Raises:
        DataError: a row cannot be used.
    """
    for item in range(min(len(dataset), count)):
        _ = dataset[item]


class SupervisedRunner:
    """Assembles a run from its configuration and drives it; subclasses name the parts."""

    role: ClassVar[str]
    """Name of the worker group."""
    trainer_class: ClassVar[type[SupervisedTrainer]]

    def worker_class(self) -> type:
        """The worker; imported here, so that a refused configuration is answered before the engines are loaded."""
        raise NotImplementedError

    def open_data(self, config: Any, tokenizer: Any, files: Any, max_samples: int) -> Dataset:
        """The data set over ``files``."""
        raise NotImplementedError

    def collate_fn(self, config: Any, tokenizer: Any) -> Callable:
        """Items of the data set to the columns of a batch."""
        raise NotImplementedError

    def run(self, config: Any) -> None:
        """Load data and model, train.

        Raises:
            DataError: a data file is unusable.
            ResourceError: there are fewer processes or devices than asked for.
        """
        from verl.utils import hf_tokenizer
        from verl.utils.dataset import create_rl_sampler
        from verl.utils.model import check_tokenizer_fits, hf_config_of

        model, data, trainer = config.model, config.data, config.trainer
        tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.custom_chat_template,
        )
        check_tokenizer_fits(tokenizer, hf_config_of(model))
        train = self.open_data(config, tokenizer, data.train_files, data.train_max_samples)
        val = self.open_data(config, tokenizer, data.val_files, data.val_max_samples) if data.val_files else None
        read_first(train)
        steps = total_steps(config, len(cast(Sized, train)))
        config = replace(config, optim=with_total_steps(config.optim, steps))
        controller, device = load_controller(trainer.controller), resolve_device(config)
        pools = controller.pool_manager(
            {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}, {self.role: "global_pool"}, device
        )
        worker = controller.WorkerGroup.describe(self.worker_class(), config=config, device_name=device)
        ranks = Ranks(self.role, worker, pools, controller.WorkerGroup, device, trainer.recovery.hang_timeout_s)
        try:
            sampler = create_rl_sampler(data, train)
            self.trainer_class(config, ranks, train, val, self.collate_fn(config, tokenizer), sampler).fit()
        finally:
            pools.release()  # a Ray cluster that goes on may have another run to place
