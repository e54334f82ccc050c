"""The interface of training engines: one model on this rank, and its optimizer unless it is frozen.

    engine = EngineRegistry.new("language_model", "fsdp2", model_config=..., engine_config=..., ...)
    engine.initialize()
    with engine.eval_mode():
        columns = engine.infer_batch(batch, {"log_probs", "entropy"}, micro, temperature=1.0)
    with engine.train_mode():
        metrics = engine.train_batch(mini_batch, loss_fn, micro, temperature=1.0)   # one optimizer step

Every method is called by all ranks together, each with its own part of the batch; ranks that share sequences have the
same part. Batches have the layout of ``verl.schema``; outputs have one value per response token.
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import torch
import torch.distributed as dist
from torch import Tensor

from verl.base.plugins import import_module
from verl.base.registry import Registry
from verl.base.requirements import install_command
from verl.checkpoint.ranks import RankState, save_together
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.flops_counter import Arithmetic
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.engine.loss import LossCallable, LossFunction
from verl.workers.engine.loss_scale import LossScale
from verl.workers.engine.non_finite import NonFinite
from verl.workers.engine.passes import MicroBatchConfig, PassSizes

if TYPE_CHECKING:
    from verl.checkpoint.states import State
    from verl.workers.engine.model.divergence import FullDivergence, OutputMatrix

logger = logging.getLogger(__name__)


class BaseEngine(ABC):
    """One model on this rank, and its optimizer unless it is frozen."""

    model_type: str
    """Name of the kind of model in the registry of engines."""
    output_names: frozenset[str]
    """The columns that it can compute."""
    device: torch.device
    """Device of the computation."""
    weight_version: int = 0
    """Number of optimizer steps that changed the weights; restored by ``load_checkpoint``."""
    loss_scale: LossScale | None = None
    """Loss scaling of a model that is trained in fp16; None in other formats."""
    pass_sizes: PassSizes
    """Known limits of the size of its passes."""
    non_finite: Sequence[NonFinite] = ()
    """Non-finite values of the last mini-batch, over all ranks and the same on each; empty if all were finite."""
    expert_counts: Tensor | None = None
    """(layers with experts, experts) tokens that each expert got in the last mini-batch, over all ranks; None if the
    model is no policy, or its routers do not return their choices."""

    ids_below: int | None = None
    """The ids below this one are the vocabulary of what is computed without gradients; None for all rows of the output
    matrix. A teacher gets the size of the policy's vocabulary, so that both are distributions over the same ids."""
    divergence: FullDivergence | None = None
    """Teachers that the output ``divergence`` compares this model with; set before a batch whose loss reads it."""

    def _check_request(
        self, outputs: set[str] | frozenset[str], temperature: float, topk: int = 0, vocab_size: int = 0
    ) -> None:
        if unknown := outputs - self.output_names:
            raise ConfigError(
                f"a {self.model_type} has no output {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(self.output_names))}."
            )
        if temperature <= 0:
            raise ConfigError(f"temperature={temperature}: log-probs need one above 0; a greedy policy is scored at 1.")
        vocab_size = min(vocab_size, self.ids_below or vocab_size)
        if outputs & {"top_ids", "top_log_probs"} and not 0 < topk <= vocab_size:
            raise ConfigError(f"topk={topk}: the model has {vocab_size} tokens. Use 1 to {vocab_size}.")

    @abstractmethod
    def initialize(self) -> None:
        """Build the model from its folder, distribute it over the ranks, create the optimizer and schedule.

        Raises:
            ConfigError: the folder is missing or holds another kind of model.
        """

    def check_shared_prompts(self, key: str) -> None:
        """Check that passes with ``MicroBatchConfig.shares_prompts`` give this model's results. Collective.

        ``key`` is the setting that asks for them, for errors.

        Raises:
            ConfigError: they do not, or the engine has no such passes.
        """
        raise ConfigError(
            f"{key}=true: {type(self).__name__} computes every row with its own prompt. Set it "
            "false, or use strategy=fsdp2."
        )

    @abstractmethod
    def train_mode(self) -> AbstractContextManager[None]:
        """Context for updates: weights and optimizer on the device; offloaded again at the end."""

    @abstractmethod
    def eval_mode(self) -> AbstractContextManager[None]:
        """Context for passes without gradients: weights on the device; offloaded again at the end."""

    def disable_adapter(self) -> AbstractContextManager[None]:
        """Context in which the model computes without its LoRA adapters, as the model that they were added to.

        Raises:
            ConfigError: the model has none.
        """
        raise ConfigError("this model has no adapters to switch off: it is trained without model.lora_rank.")

    @abstractmethod
    def infer_batch(
        self, batch: DataProto, outputs: set[str], micro: MicroBatchConfig, temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        """Compute model outputs without gradients.

        Args:
            batch: this rank's rows.
            outputs: of ``log_probs``, ``entropy``, ``sum_pi_squared``, ``top_ids``, ``top_log_probs``, ``hidden``
                (language models, see :func:`~verl.workers.engine.model.outputs.language_outputs`); ``values`` (value
                models); ``scores`` (reward models).
            micro: size of the passes.
            temperature: of the policy; logits are divided by it.
            topk: number K of the most likely tokens in ``top_ids`` and ``top_log_probs``, and of those whose log-probs
                are ``topk_log_probs``.

        Returns:
            each output as (bsz, response_length) float32 on the CPU, 0 where ``response_mask`` is 0; ``top_ids`` int32
            and ``top_log_probs`` (bsz, response_length, K); ``hidden``, the last hidden states that predict the tokens,
            (bsz, response_length, hidden size) in the format of the computation.
        """

    def output_matrix(self) -> OutputMatrix:
        """Return the whole projection from last hidden states to logits, without gradient, on this rank. Collective.

        It does not change with later updates of the model. Of a pipeline only the last stage, where it is used, has
        rows of it.

        Raises:
            ConfigError: the model is no language model.
        """
        raise ConfigError(f"a {self.model_type} has no output matrix: it is no language model.")

    @abstractmethod
    def forward_backward_batch(
        self,
        batch: DataProto,
        loss_fn: LossFunction | LossCallable,
        micro: MicroBatchConfig,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Accumulate the gradients of one mini-batch; return its global metrics, the same on every rank.

        A loss that is not finite on one rank is in ``non_finite`` on all of them.
        """

    @abstractmethod
    def optimizer_zero_grad(self) -> None:
        """Clear the gradients."""

    @abstractmethod
    def optimizer_step(self) -> float:
        """Clip the gradients and update the weights; return the gradient norm before clipping.

        If the norm, which is the same on every rank, is not finite, weights and optimizer stay as they are,
        ``weight_version`` does not change, and ``non_finite`` names the parameters.
        """

    @abstractmethod
    def lr_scheduler_step(self) -> float:
        """Advance the schedule; return the learning rate before that.

        It is also called for steps whose update was skipped, so that the schedule ends with the run.
        """

    @abstractmethod
    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """Iterate over the full weights by Transformers name. Collective: every rank iterates to the end.

        A tensor is valid until the next iteration only: it may be the trainer's own, or a buffer that is reused.
        """

    def weights_for_rollout(self, dtype: torch.dtype, divided: bool = False) -> Iterator[tuple[str, Tensor]]:
        """Iterate as :meth:`get_per_tensor_param` does; weights may have been converted to the rollout's ``dtype``.

        With ``divided`` those that ranks divide may be DTensors, which are not gathered.
        """
        return self.get_per_tensor_param()

    def trained_weights(self) -> Mapping[str, Tensor]:
        """Return the parameters that are trained, by name, as this rank holds them: no gathered copies are left.

        Raises:
            ConfigError: the engine does not hold them as one tensor each.
        """
        raise ConfigError(
            f"{type(self).__name__} does not hold each trained weight as one tensor, so that there is no average of "
            "them. Use strategy=fsdp2."
        )

    def adapted_weights(self) -> AdaptedWeights:
        """Return base weights and LoRA adapters apart, for a rollout engine that applies adapters by itself.

        Raises:
            ConfigError: the model has no adapters.
        """
        raise ConfigError("this model has no adapters to send: it is trained without model.lora_rank.")

    @abstractmethod
    def get_data_parallel_size(self) -> int:
        """Number of ranks that hold different rows."""

    @abstractmethod
    def get_data_parallel_rank(self) -> int:
        """Index of this rank among the data-parallel ranks."""

    @abstractmethod
    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Process group of the data-parallel ranks."""

    @abstractmethod
    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank's outputs are used; of the ranks that hold the same rows, only one's are."""

    @abstractmethod
    def arithmetic(self) -> Arithmetic:
        """Work of the model's passes, and the peak rate of this rank where known."""

    @abstractmethod
    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state to ``"cpu"`` or to the engine's device."""

    @abstractmethod
    def state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """Return this rank's part of ``contents``. Collective.

        Args:
            global_step: stored with the state.
            contents: of ``model``, ``optimizer``, ``extra`` (schedule, random states, weight version) and
                ``hf_model`` (weights for Transformers; each rank has some of the files).
            copied: return copies, which later steps do not change.
        """

    @abstractmethod
    def state_bytes(self) -> int:
        """Return the size in bytes of the tensors of :meth:`state`, with the moments that the first step makes."""

    @abstractmethod
    def load_state(self, states: Mapping[str, State]) -> None:
        """Restore the ``states`` of :meth:`state`, bit for bit, on the same rank of the same number of ranks.

        Raises:
            CheckpointError: they are of another rank, another number of ranks, or another model.
        """

    def save_checkpoint(
        self, local_path: str, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra")
    ) -> None:
        """Write ``contents`` to the folder ``local_path`` atomically. Collective.

        Raises:
            CheckpointError: on every rank, if any rank could not write; an earlier ``local_path`` is kept.
        """
        save_together(Path(local_path), self.state(global_step, contents, copied=False).write)

    @abstractmethod
    def load_checkpoint(self, local_path: str, contents: Sequence[str] = ("model", "optimizer", "extra")) -> None:
        """Restore ``contents``, also if another number of ranks wrote them.

        Raises:
            CheckpointError: a file is missing, damaged or of another model; the message names it.
        """

    def train_batch(
        self,
        batch: DataProto,
        loss_fn: LossFunction | LossCallable,
        micro: MicroBatchConfig,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Run one optimizer step on one mini-batch.

        A loss or a gradient that is not finite on any rank leaves weights and optimizer of all ranks as they were. In
        fp16 a mini-batch whose gradients overflow is computed again, with smaller loss scales; metric ``loss_scale``.

        Returns:
            the loss function's metrics over all ranks and micro-batches, with ``grad_norm`` and
            ``skipped_steps`` (1 if the update was skipped; ``non_finite`` then has the reason).
        """
        scale, before = self.loss_scale, self.weight_version
        while True:
            can_fall = scale is not None and scale.can_fall
            self.non_finite = tuple[NonFinite, ...]()
            self.optimizer_zero_grad()
            metrics = self.forward_backward_batch(batch, loss_fn, micro, temperature)
            metrics["grad_norm"] = math.nan if self.non_finite else self.optimizer_step()
            self.optimizer_zero_grad()  # gradients would hold memory while the rollout engine needs it
            # What else is not finite, a smaller scale does not mend. The same on every rank.
            overflowed = bool(self.non_finite) and all(problem.kind == "gradient" for problem in self.non_finite)
            if not (can_fall and overflowed):
                break
            logger.info("gradients overflow in fp16: the mini-batch is computed again, its loss times %s", scale)
        metrics["skipped_steps"] = float(self.weight_version == before)
        if scale is not None:
            metrics["loss_scale"] = float(scale.value)
        return metrics


class EngineRegistry:
    """Engines by kind of model and back end."""

    _engines: Registry[type[BaseEngine]] = Registry("training engine")
    _on_demand: ClassVar[Mapping[str, str]] = {
        "megatron": "verl.plugins.megatron",
        "veomni": "verl.plugins.veomni",
    }
    """Modules that are imported when their back end is asked for, because they need packages that few have."""

    @classmethod
    def register(
        cls,
        model_type: str,
        backend: str | Sequence[str],
        device: str | Sequence[str] = "cuda",
        vendor: str | Sequence[str] | None = None,
    ) -> Callable[[type], type]:
        """Register the decorated class, under one or several back-end names.

        ``device`` and ``vendor`` may be stated, as elsewhere; an engine is found whatever the device is.
        """

        def decorator(engine: type) -> type:
            for name in [backend] if isinstance(backend, str) else backend:
                cls._engines.register(f"{model_type}/{name}")(engine)
            return engine

        return decorator

    @classmethod
    def get_engine_cls(cls, model_type: str, backend: str) -> type[BaseEngine]:
        """Look up the engine for ``language_model``, ``value_model`` or ``reward_model``.

        Raises:
            ConfigError: there is none; the message lists the known ones.
        """
        if module := cls._on_demand.get(backend):
            _load_backend(backend, module)
        return cls._engines.get(f"{model_type}/{backend}")

    @classmethod
    def new(cls, model_type: str, backend: str, **arguments: object) -> BaseEngine:
        """Create an engine; it is not initialised yet."""
        return cls.get_engine_cls(model_type, backend)(**arguments)


def _load_backend(backend: str, module: str) -> None:
    try:
        import_module(module)
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"strategy={backend} needs the package {error.name}, which is not installed. Install what it needs by "
            f"{install_command(backend)}, or use strategy=fsdp2."
        ) from error
    except (ImportError, OSError) as error:
        raise ConfigError(
            f"strategy={backend}: a package that it needs cannot be imported: {error}. Install the versions that it "
            f"needs by {install_command(backend)}, or use strategy=fsdp2."
        ) from error
