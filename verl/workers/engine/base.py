"""The training-engine contract: one model on this rank, and its optimizer unless it is frozen.

    engine = EngineRegistry.new("language_model", "fsdp2", model_config=..., engine_config=..., ...)
    engine.initialize()
    with engine.eval_mode():
        columns = engine.infer_batch(batch, {"log_probs", "entropy"}, micro, temperature=1.0)
    with engine.train_mode():
        metrics = engine.train_batch(mini_batch, loss_fn, micro, temperature=1.0)   # one optimizer step

Every method is called by all data-parallel ranks together, each with its own part of the batch. Batches
have the layout of ``verl.schema``; what comes out has one value per response token.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.utils.checkpoint import LocalFolder, on_all_ranks
from verl.utils.checkpoint.files import FileEntry, sync_tree, write_states
from verl.utils.registry import Registry
from verl.workers.engine.non_finite import NonFinite
from verl.workers.engine.pass_sizes import PassSizes

if TYPE_CHECKING:
    import torch.distributed as dist

    from verl.protocol import DataProto
    from verl.utils.flops_counter import Arithmetic


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """How much one forward pass of one rank holds. Results never depend on it."""

    micro_batch_size_per_gpu: int | None = None
    """Units per pass: sequences, or the groups of sequences that a loss couples; None puts the whole batch into one."""
    use_dynamic_bsz: bool = False
    """Fill passes up to ``max_token_len_per_gpu`` tokens instead of by units."""
    max_token_len_per_gpu: int | None = None

    def __post_init__(self) -> None:
        if self.use_dynamic_bsz and self.max_token_len_per_gpu is None:
            raise ConfigError("use_dynamic_bsz=true needs a token budget: set max_token_len_per_gpu.")


@dataclass(frozen=True, kw_only=True)
class BatchTotals:
    """The denominators of a mini-batch over all ranks and micro-batches."""

    dp_size: int
    """Data-parallel ranks. A rank's loss carries this factor because gradients are averaged over ranks."""
    batch_num_tokens: int
    """Tokens with ``response_mask`` 1, at least 1."""
    global_batch_size: int
    """Sequences."""


@dataclass(frozen=True)
class Share:
    """A metric that is this micro-batch's part of a global sum: the engine adds the parts up as they are."""

    value: Tensor | float


Metrics = Mapping[str, "Tensor | float | Share"]
"""Of one micro-batch. A plain number is the mean over its valid tokens, and is weighted by its share of the
mini-batch's valid tokens; names that end in ``_max`` or ``_min`` are reduced by max or min."""

LossFn = Callable[[dict[str, Tensor], "DataProto", BatchTotals], tuple[Tensor, Metrics]]
"""(outputs, micro-batch, totals) to (loss, metrics). ``outputs`` holds what ``loss_fn.outputs`` names, by
default ``{"log_probs"}``, each (bsz, response_length), zero where ``response_mask`` is 0. A loss that couples
rows says so by ``loss_fn.rows_per_unit`` (2 for pairs; default 1): so many rows, one after the other from the
first row of each rank's part on, always come in one micro-batch and in their order."""


@dataclass(frozen=True)
class RankState:
    """What one rank holds of a training state, as it was when it was asked."""

    states: dict[str, dict[str, Any]]
    """By the name of the file that holds it on disk: tensors on the CPU, numbers and strings."""
    describe: Callable[[Path], None] | None = None
    """On rank 0: writes into a folder what belongs to the whole model, such as its config and tokenizer."""

    def write(self, folder: Path) -> dict[str, FileEntry]:
        """Write this rank's files into a folder that exists, synced; needs no other rank.

        Returns:
            the files by their path below ``folder``.
        """
        files = write_states(folder, self.states)
        if self.describe is None:
            return files
        own = folder / ".rank_0"
        own.mkdir()
        self.describe(own)
        files |= sync_tree(own)
        for path in sorted(own.iterdir()):
            path.replace(folder / path.name)
        own.rmdir()
        return files


class BaseEngine(ABC):
    """One model, and unless it is frozen its optimizer, on this rank."""

    device: torch.device
    """Where it computes."""
    weight_version: int = 0
    """Optimizer steps that have changed the weights; restored by ``load_checkpoint``."""
    pass_sizes: PassSizes
    """How large its passes may be, as far as it is known."""
    non_finite: Sequence[NonFinite] = ()
    """What was not finite in the last mini-batch, of all ranks and the same on each; empty where all was."""

    @abstractmethod
    def initialize(self) -> None:
        """Build the model from its folder, place it on the ranks, make the optimizer and schedule.

        Raises:
            ConfigError: the folder is missing or holds another kind of model.
        """

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Ready to update inside: weights and optimizer on the device; offloaded again at the end."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Ready to compute without gradients inside: weights on the device; offloaded again at the end."""

    @abstractmethod
    def infer_batch(
        self, batch: DataProto, outputs: set[str], micro: MicroBatchConfig, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Columns of the batch, without gradients.

        Args:
            batch: this rank's rows.
            outputs: of ``log_probs``, ``entropy``, ``sum_pi_squared`` (language models) or
                ``values`` (value and reward models).
            micro: size of the passes.
            temperature: of the policy; logits are divided by it.

        Returns:
            each output as (bsz, response_length) float32 on the CPU, 0 where ``response_mask`` is 0.
        """

    @abstractmethod
    def forward_backward_batch(
        self, batch: DataProto, loss_fn: LossFn, micro: MicroBatchConfig, temperature: float = 1.0
    ) -> dict[str, float]:
        """Gradients of one mini-batch, added to those there are; global metrics, the same on every rank.

        A loss that is not finite on one rank is in ``non_finite`` on all of them.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip, then update; the gradient norm before clipping.

        If the norm is not finite, the same on every rank, weights and optimizer stay as they are, ``weight_version``
        does not change, and ``non_finite`` names the parameters.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule; returns the learning rate that was in force until now.

        It counts the steps of the run, also those whose update was left out, so that it ends when the run does.
        """

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Each weight under its Transformers name, whole. Collective: every rank iterates to the end.

        A tensor is lent until the next call: it may be the trainer's own, or memory that the next call fills anew.
        """

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Ranks that hold different rows."""

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """The number of this rank among them."""

    @abstractmethod
    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Their process group."""

    @abstractmethod
    def arithmetic(self) -> Arithmetic:
        """How much work the model's passes are, and what this rank can do in a second at best, where known."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state to ``"cpu"`` or to the engine's device."""

    @abstractmethod
    def state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """What this rank holds of ``contents``. Collective.

        Args:
            global_step: kept beside the state.
            contents: of ``model``, ``optimizer``, ``extra`` (schedule, random states, weight version) and
                ``hf_model`` (weights for Transformers, written by rank 0).
            copied: own copies, which later steps do not change.
        """

    @abstractmethod
    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Put back the ``states`` of :meth:`state`, bit for bit, on the same rank of as many ranks.

        Raises:
            CheckpointError: they are of another rank, another number of ranks, or another model.
        """

    def save_checkpoint(
        self, local_path: str, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra")
    ) -> None:
        """Write ``contents`` to the folder ``local_path``, whole or not at all. Collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write; what was at ``local_path`` stays.
        """
        target = LocalFolder(local_path)
        target.open()
        state = self.state(global_step, contents, copied=False)
        with on_all_ranks(f"write the checkpoint {target.final}"):
            state.write(target.partial)
        target.commit()

    @abstractmethod
    def load_checkpoint(self, local_path: str, contents: Sequence[str] = ("model", "optimizer", "extra")) -> None:
        """Read ``contents`` back, also where another number of ranks wrote them.

        Raises:
            CheckpointError: a file is missing, damaged or of another model; the message names it.
        """

    def train_batch(
        self, batch: DataProto, loss_fn: LossFn, micro: MicroBatchConfig, temperature: float = 1.0
    ) -> dict[str, float]:
        """One optimizer step on one mini-batch.

        A loss or a gradient that is not finite on any rank leaves weights and optimizer of all ranks as they were.

        Returns:
            the loss function's metrics over all ranks and micro-batches, with ``grad_norm`` and
            ``skipped_steps`` (1 if the step was left out; ``non_finite`` then says why).
        """
        self.non_finite = ()
        self.optimizer_zero_grad()
        metrics = self.forward_backward_batch(batch, loss_fn, micro, temperature)
        before = self.weight_version
        if self.non_finite:
            self.optimizer_zero_grad()
        metrics["grad_norm"] = math.nan if self.non_finite else self.optimizer_step()
        metrics["skipped_steps"] = float(self.weight_version == before)
        return metrics


class EngineRegistry:
    """Engines by kind of model and back end."""

    _engines: Registry[type[BaseEngine]] = Registry("training engine")

    @classmethod
    def register(cls, model_type: str, backend: str | Sequence[str]) -> Callable[[type], type]:
        """Class decorator; several back-end names may stand for one engine."""

        def file(engine: type) -> type:
            for name in [backend] if isinstance(backend, str) else backend:
                cls._engines.register(f"{model_type}/{name}")(engine)
            return engine

        return file

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """The engine for ``language_model``, ``value_model`` or ``reward_model`` under ``backend``.

        Raises:
            ConfigError: there is none; the message lists those there are.
        """
        return cls._engines.get(f"{model_type}/{backend}")

    @classmethod
    def new(cls, model_type: str, backend: str, **arguments: Any) -> BaseEngine:
        """An engine, not yet initialised."""
        return cls.get_engine_cls(model_type, backend)(**arguments)
