"""Training on a fixed data set: the common part of supervised, reward-model and preference runs.

A trainer defines how rows become a batch (:meth:`SupervisedTrainer.to_batch`) and how to validate; a runner chooses
worker, data set and trainer.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sized
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar, cast

from torchdata.stateful_dataloader import StatefulDataLoader

from verl.checkpoint.resume import CheckpointPlan
from verl.config import local_copies
from verl.datasets.loading import bound_to_driver
from verl.errors import DataError
from verl.protocol import DataProto
from verl.single_controller.base.worker_group import WorkerGroup
from verl.trainer.balance import deal
from verl.trainer.config.sizes import resolve_device
from verl.trainer.driver import load_controller
from verl.trainer.loop import Schedule, TrainingLoop
from verl.trainer.worker_groups import WorkerGroups
from verl.utils.console import status
from verl.utils.flops_counter import Arithmetic
from verl.utils.metric import Metrics
from verl.utils.step_context import StepContext

if TYPE_CHECKING:
    from torch.utils.data import Dataset, Sampler
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.config import SupervisedConfig


class SupervisedTrainer(TrainingLoop):
    """Train a model on the rows of a data set, one optimizer step per batch.

    Args:
        config: the whole configuration.
        worker_groups: worker groups with a single role, the trained model.
        train_dataset, val_dataset: map-style datasets of rows or pairs; without ``val_dataset`` nothing is validated.
        collate_fn: turns a list of items into the columns of a batch.
        train_sampler: order of the training items.
    """

    rows_per_unit: ClassVar[int] = 1
    """Adjacent rows of a batch that must stay on one rank: 1, or 2 for the sides of a pair."""

    def __init__(
        self,
        config: SupervisedConfig,
        worker_groups: WorkerGroups,
        train_dataset: Any,
        val_dataset: Any,
        collate_fn: Callable,
        train_sampler: Sampler,
    ) -> None:
        data, trainer = config.data, config.trainer
        plan = CheckpointPlan.from_config(trainer, keep={".": trainer.max_ckpt_to_keep})
        super().__init__(config, plan, worker_groups)
        self.train_dataloader = StatefulDataLoader(
            train_dataset,
            batch_size=data.train_batch_size,
            num_workers=min(data.num_workers, os.cpu_count() or 1),
            sampler=train_sampler,
            drop_last=True,
            generator=self.loader_generator(),
            worker_init_fn=bound_to_driver(),
            collate_fn=collate_fn,
        )
        self.val_dataloader = None
        if val_dataset is not None:
            self.val_dataloader = StatefulDataLoader(
                val_dataset, batch_size=data.train_batch_size, generator=self.loader_generator(), collate_fn=collate_fn
            )
        self.total_training_steps = total_steps(config, len(train_dataset))
        self.typed_config = replace(config, optim=config.optim.with_length(self.total_training_steps))
        self.schedule = Schedule.from_config(trainer, self.total_training_steps)

    @property
    def trained_groups(self) -> Mapping[str, WorkerGroup]:
        """See :meth:`TrainingLoop.trained_groups`."""
        return {".": self.workers}

    def start_workers(self) -> None:
        """See :meth:`TrainingLoop.start_workers`."""
        (role,) = self.worker_groups.worker_classes
        self.workers = self.worker_groups.start({role: {"config": self.typed_config}})[role]
        self.pass_limits.send_to([self.workers])
        self.arithmetic = Arithmetic.from_ranks(self.workers.arithmetic())
        self.checkpoint.workers_replaced(self.trained_groups)

    @property
    def validates(self) -> bool:
        """See :meth:`TrainingLoop.validates`."""
        return self.val_dataloader is not None

    def step(self, context: StepContext) -> DataProto:
        """Take one optimizer step on the next batch; ``rows_per_unit`` adjacent rows go to the same rank."""
        batch = self.next_batch()
        with context.stage("update"):
            balance = self.typed_config.data.balance_dp_token
            parts = self.workers.num_parts("train_batch")
            dealt = deal(batch, parts, balance=balance, rows_per_unit=self.rows_per_unit)
            updated = self.train_on(dealt.rows)
            self._keep_expert_counts(updated, context)
            report = updated.meta_info
            self.pass_limits.take_splits("update", report["metrics"])
            metrics = {f"train/{name.removeprefix('perf/')}": value for name, value in report["metrics"].items()}
            problems = dealt.problems(report["non_finite"])
            self.bad_steps.record(context.number, "update", metrics, batch, problems)
        context.metrics |= metrics | {
            "train/global_tokens": float(batch.batch["attention_mask"].sum()),
            "training/epoch": self.epochs.epoch,
            **self.bad_steps.metrics(),
        }
        return batch

    def step_metrics(self, batch: DataProto, context: StepContext) -> Metrics:
        """See :meth:`TrainingLoop.step_metrics`."""
        seconds = context.seconds["update"]
        mfu = self.arithmetic.utilization(self.useful_flops(batch), seconds)
        return {"train/time(s)": seconds} | ({} if mfu is None else {"train/mfu": mfu})

    def useful_flops(self, batch: DataProto) -> float | None:
        """Floating-point operations of one optimizer step; None if they are not known."""
        columns = batch.batch
        lengths = columns["attention_mask"].sum(-1).tolist()
        return self.arithmetic.training_flops(lengths, int(columns["response_mask"].sum()))

    def train_on(self, batch: DataProto) -> DataProto:
        """Take one optimizer step on a batch whose rows are ordered by rank; return its metrics."""
        return self.workers.train_batch(batch)


def total_steps(config: SupervisedConfig, rows: int) -> int:
    """Steps of a run over ``rows`` training items; an incomplete last batch of an epoch is dropped.

    Raises:
        DataError: there are fewer rows than one batch.
    """
    batch_size = config.data.train_batch_size
    if rows < batch_size:
        raise DataError(
            f"the training data has {rows} rows, fewer than one batch of data.train_batch_size={batch_size}. "
            "Give more data, or lower data.train_batch_size."
        )
    return config.trainer.total_training_steps or config.trainer.total_epochs * (rows // batch_size)


def processor_of(config: SupervisedConfig) -> ProcessorMixin | None:
    """Load the processor of the model that is trained; None if it takes no images."""
    from verl.utils import hf_processor

    model = local_copies(config).model
    return hf_processor(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)


def read_first(dataset: Any, count: int = 32) -> None:
    """Read the first rows before a model is loaded, so that an unusable chat template or data set fails early."""
    for item in range(min(len(dataset), count)):
        _ = dataset[item]


class SupervisedRunner:
    """Assemble a run from its configuration and drive it; subclasses choose the parts."""

    role: ClassVar[str]
    """Name of the worker group."""
    trainer_class: ClassVar[type[SupervisedTrainer]]

    def worker_class(self, config: SupervisedConfig) -> type:
        """The worker class; imported inside, so that an invalid configuration fails before the slow engine imports."""
        raise NotImplementedError

    def open_data(self, config: object, tokenizer: PreTrainedTokenizerBase, files: object, max_samples: int) -> Dataset:
        """Open the data set in ``files``."""
        raise NotImplementedError

    def collate_fn(self, config: object, tokenizer: PreTrainedTokenizerBase) -> Callable:
        """A function that turns a list of items into the columns of a batch."""
        raise NotImplementedError

    def check_further_models(self, config: Any, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check models beside the trained one, whose ``tokenizer`` is given, before any is loaded."""

    def run(self, config: SupervisedConfig) -> None:
        """Load the data, start the workers and train.

        Raises:
            DataError: a data file or the tokenizer is unusable.
            ResourceError: fewer processes or devices are available than configured.
        """
        from verl.datasets import create_rl_sampler
        from verl.utils.model import check_has_experts, check_tokenizer_fits, hf_config_of
        from verl.utils.tokenizer import tokenizer_of

        status("reading the tokenizer and the data")
        here = local_copies(config)  # the ranks, perhaps on other machines, make copies of their own
        model, data, trainer = here.model, here.data, config.trainer
        tokenizer = tokenizer_of(model)
        check_tokenizer_fits(tokenizer, hf_config_of(model))
        if trainer.log_expert_counts:
            check_has_experts(hf_config_of(model), "trainer.log_expert_counts")
        self.check_further_models(here, tokenizer)
        train = self.open_data(config, tokenizer, data.train_files, data.train_max_samples)
        val = self.open_data(config, tokenizer, data.val_files, data.val_max_samples) if data.val_files else None
        read_first(train)
        total_steps(config, len(cast(Sized, train)))  # raises for too few rows before anything starts
        controller, device = load_controller(trainer.controller), resolve_device(config)
        pools = controller.ResourcePoolManager(
            {"global_pool": [trainer.n_gpus_per_node] * trainer.nnodes}, {self.role: "global_pool"}, device
        )
        pools.replacement_timeout_s = trainer.recovery.replacement_timeout_s
        worker_groups = WorkerGroups(
            worker_classes={self.role: self.worker_class(config)},
            pools=pools,
            group_class=controller.WorkerGroup,
            device_name=device,
            start_timeout_s=trainer.ray_wait_register_center_timeout,
            hang_timeout_s=trainer.recovery.hang_timeout_s,
        )
        sampler = create_rl_sampler(data, train)
        collate_fn = self.collate_fn(config, tokenizer)
        try:
            loop = self.trainer_class(config, worker_groups, train, val, collate_fn, sampler)
            loop.fit()
            loop.shutdown()
        finally:
            pools.release()  # the Ray cluster may outlive this run and place another one
