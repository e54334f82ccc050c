"""Training under FSDP2: what ``BaseEngine`` promises, for language, value and reward models."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.allocator import KEEP_BYTES
from verl.utils.checkpoint import seed_everything
from verl.utils.device import ensure_process_group, get_device
from verl.utils.flops_counter import Arithmetic, FlopsCounter, device_peak_flops
from verl.utils.model import longrope_threshold, torch_dtype
from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine.base import (
    BaseEngine,
    BatchTotals,
    EngineRegistry,
    LossFn,
    Metrics,
    MicroBatchConfig,
    RankState,
)
from verl.workers.engine.fsdp.checkpoint import load_engine, rank_state, restore_rank
from verl.workers.engine.fsdp.inputs import ModelInputs, check_one_rotation, check_token_ids, prepare_inputs
from verl.workers.engine.fsdp.micro_batches import MetricSum, batch_totals, gathered, split_micro_batches
from verl.workers.engine.fsdp.model import (
    HeadedModel,
    ModelType,
    build_model,
    enable_gradient_checkpointing,
)
from verl.workers.engine.fsdp.one_machine import Steadiness, use_shared_memory
from verl.workers.engine.fsdp.optimizer import build_optimizer, build_scheduler, clip_gradients
from verl.workers.engine.fsdp.packing_check import choose_form
from verl.workers.engine.fsdp.sharding import local_part, make_mesh, mixed_precision, needs_sharding, shard_model
from verl.workers.engine.fsdp.whole_weights import WholeWeights
from verl.workers.engine.non_finite import LossWatch, in_gradients
from verl.workers.engine.pass_sizes import PassSizes, is_out_of_memory

T = TypeVar("T")


class FSDPEngine(BaseEngine):
    """One model under FSDP2 on this rank.

    Args:
        model_config: which model, and how it runs.
        engine_config: placement, precision, offload; ``forward_only`` makes it a frozen model.
        optimizer_config: None for a frozen model.
        device_name: ``"cuda"``, ``"cpu"``, or None for what there is.
        timeout_s: seconds after which a collective that does not finish is an error.
    """

    model_type: ModelType = "language_model"
    output_names = frozenset({"log_probs", "entropy", "sum_pi_squared"})

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig | None = None,
        device_name: str | None = None,
        timeout_s: float = 600,
    ) -> None:
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.device = get_device(device_name)
        ensure_process_group(self.device, timeout_s)
        self.mesh = make_mesh(self.device, engine_config.fsdp_size)
        self.model: HeadedModel
        self.optimizer: Optimizer | None = None
        self.scheduler: LambdaLR | None = None
        self.is_packed = False
        self.pass_sizes = PassSizes()
        self._contexts = 0
        self._steadiness: Steadiness | None = None

    # ---- set-up -------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build, shard, and make the optimizer; see :class:`BaseEngine`."""
        config = self.engine_config
        if config.full_determinism:
            torch.use_deterministic_algorithms(True)
        seed_everything(config.seed + dist.get_rank())
        dtype = torch_dtype(config.model_dtype)
        is_first = dist.get_rank() == 0
        model = build_model(self.model_type, self.model_config, dtype, is_first, is_trained=not config.forward_only)
        model.requires_grad_(not config.forward_only)
        if self.model_config.enable_gradient_checkpointing and not config.forward_only:
            enable_gradient_checkpointing(model)
        if needs_sharding(config, self.mesh):
            shard_model(model, config, self.mesh)
        else:
            model.to(self.device)
        self.model = model.eval()
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        group = self._exchange_in_memory()
        self.compute_dtype = mixed_precision(config).param_dtype or dtype
        self.is_packed = choose_form(model, self.model_config.use_remove_padding, self.device, self.compute_dtype)
        self._reshard()  # or the optimizer would be given the gathered copies
        self._whole = WholeWeights(model, self.device, group)
        if not config.forward_only:
            if self.optimizer_config is None:
                raise ConfigError("a model that is trained needs optimizer_config; or set forward_only=true.")
            self.optimizer = build_optimizer(model.parameters(), self.optimizer_config)
            self.scheduler = build_scheduler(self.optimizer, self.optimizer_config)
        self._offload()

    def _exchange_in_memory(self) -> dist.ProcessGroup | None:
        """The ranks that hold the rows of each weight, if they are several and exchange through memory. Collective."""
        group = self.mesh.get_group("shard")
        if self.device.type != "cpu" or dist.get_world_size(group) == 1:
            return None
        nbytes = sum(weight.numel() * weight.dtype.itemsize for weight in self.model.parameters())
        self._steadiness = use_shared_memory(self._units, group, is_cheap=nbytes <= KEEP_BYTES)
        return None if self._steadiness is None else group

    def _steady_weights(self) -> AbstractContextManager[None]:
        """Around passes between which no weight changes."""
        return nullcontext() if self._steadiness is None else self._steadiness()

    # ---- modes and memory ---------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Weights and optimizer on the device, layers in training mode."""
        with self._awake(optimizer=True):
            self.model.train()
            try:
                yield
            finally:
                self.model.eval()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Weights on the device, layers in inference mode."""
        with self._awake(optimizer=False):
            yield

    @contextmanager
    def _awake(self, optimizer: bool) -> Iterator[None]:
        self.to(self.device.type, model=True, optimizer=optimizer)
        self._contexts += 1
        try:
            yield
        finally:
            self._contexts -= 1
            self._reshard()
            if self._contexts == 0:
                self._offload()

    def _offload(self) -> None:
        config = self.engine_config
        self.to("cpu", model=config.param_offload, optimizer=config.optimizer_offload)

    def _reshard(self) -> None:
        """Give gathered parameters back; a forward without a backward leaves those of some units."""
        for unit in self._units:
            unit.reshard()

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state; nothing to do on a CPU, or where FSDP itself streams from the host."""
        if self.device.type == "cpu" or self.engine_config.offload_policy:
            return
        target = torch.device("cpu") if device == "cpu" else self.device
        if model:
            self.model.to(target)
        if optimizer and self.optimizer is not None:
            for state in self.optimizer.state.values():
                for key, value in state.items():
                    if isinstance(value, Tensor) and value.dim():
                        state[key] = value.to(target, non_blocking=True)
        if target.type == "cpu":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()

    # ---- computing ----------------------------------------------------------------------------

    def _inputs(self, data: DataProto) -> ModelInputs:
        check_token_ids(data, self.model.hf.config.get_text_config().vocab_size)
        check_one_rotation(data, longrope_threshold(self.model.hf.config))
        return prepare_inputs(data, self.is_packed, self.device, at_token=self.model_type == "reward_model")

    @torch.no_grad()
    def infer_batch(
        self, batch: DataProto, outputs: set[str], micro: MicroBatchConfig, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Columns without gradients; see :class:`BaseEngine`."""
        self._check_outputs(outputs)
        _check_temperature(temperature)
        assert batch.batch is not None
        shape = batch.batch["response_mask"].shape

        def compute(limit: int | None) -> dict[str, Tensor]:
            columns = {name: torch.zeros(shape) for name in outputs}
            for part in self.pass_sizes.watched(split_micro_batches(batch, micro, self.device, limit=limit)):
                inputs = self._inputs(part.data)
                flat = self.model(inputs, frozenset(outputs), temperature)
                for name in () if part.is_filler else outputs:
                    columns[name][part.rows] = inputs.scatter(flat[name]).float().cpu()
            return columns

        with self._steady_weights():
            columns = self._in_passes_that_fit("infer", compute)
        self._reshard()
        return columns

    def forward_backward_batch(
        self, batch: DataProto, loss_fn: LossFn, micro: MicroBatchConfig, temperature: float = 1.0
    ) -> dict[str, float]:
        """Gradients of one mini-batch; see :class:`BaseEngine`."""
        outputs = frozenset(getattr(loss_fn, "outputs", {"log_probs"}))
        self._check_outputs(outputs)
        _check_temperature(temperature)
        totals = batch_totals(batch, self.get_data_parallel_size(), self.device)
        unit = getattr(loss_fn, "rows_per_unit", 1)

        def compute(limit: int | None) -> tuple[MetricSum, LossWatch]:
            metrics, watch = MetricSum(totals), LossWatch(dist.get_rank())
            for part in self.pass_sizes.watched(split_micro_batches(batch, micro, self.device, unit, limit)):
                columns, loss, found = self._forward_backward(part.data, loss_fn, outputs, totals, temperature)
                watch.add(part.rows, part.data, columns, loss, found)
                if not part.is_filler:
                    metrics.add(found, part.num_tokens)
            return metrics, watch

        with self._steady_weights():
            metrics, watch = self._in_passes_that_fit("train", compute)
        reduced, self.non_finite = metrics.reduce(watch.found())
        return reduced

    def _in_passes_that_fit(self, kind: str, compute: Callable[[int | None], T]) -> T:
        """``compute(limit)``; if a pass does not fit the memory, all of it again with smaller passes.

        A backward that breaks off leaves some gradients with its part and some without, so they begin anew.
        """
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        is_fresh = kind == "infer" or all(weight.grad is None for weight in weights)
        while True:
            try:
                return compute(self.pass_sizes.limits.get(kind))
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                # What FSDP has begun cannot be taken back, here or on the ranks that wait in its collectives.
                self.pass_sizes.lower(kind, error, alone=is_fresh and not isinstance(self.model, FSDPModule))
            # Behind the except clause: the error held the tensors of its pass.
            if kind == "train":
                for weight in weights:
                    weight.grad = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _forward_backward(
        self, data: DataProto, loss_fn: LossFn, outputs: frozenset[str], totals: BatchTotals, temperature: float
    ) -> tuple[dict[str, Tensor], Tensor, Metrics]:
        inputs = self._inputs(data)
        flat = self.model(inputs, outputs, temperature)
        columns = {name: inputs.scatter(values) for name, values in flat.items()}
        loss, metrics = loss_fn(columns, data.to(self.device), totals)
        if not loss.requires_grad:  # every rank must run the same backward collectives
            loss = loss + 0.0 * torch.stack([column.sum() for column in columns.values()]).sum()
        loss.backward()
        return columns, loss, dict(metrics)

    def _check_outputs(self, outputs: set[str] | frozenset[str]) -> None:
        if unknown := outputs - self.output_names:
            raise ConfigError(
                f"a {self.model_type} has no output {', '.join(sorted(unknown))}; it has "
                f"{', '.join(sorted(self.output_names))}."
            )

    # ---- the optimizer ------------------------------------------------------------------------

    def _trained(self) -> tuple[Optimizer, LambdaLR, FSDPOptimizerConfig]:
        if self.optimizer is None or self.scheduler is None or self.optimizer_config is None:
            raise ConfigError("this model is frozen (forward_only=true) and has no optimizer.")
        return self.optimizer, self.scheduler, self.optimizer_config

    def optimizer_zero_grad(self) -> None:
        """Forget the gradients."""
        self._trained()[0].zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        """Clip and update; see :class:`BaseEngine`."""
        optimizer, _, config = self._trained()
        grad_norm = clip_gradients(self.model.parameters(), config.clip_grad)
        if not math.isfinite(grad_norm):
            gradients = ((name, _own_part(weight.grad)) for name, weight in self.model.named_parameters())
            self.non_finite = gathered(in_gradients(gradients, dist.get_rank()))
            optimizer.zero_grad(set_to_none=True)
            return grad_norm
        optimizer.step()
        self.weight_version += 1
        return grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; the learning rate until now."""
        _, scheduler, _ = self._trained()
        lr = float(scheduler.get_last_lr()[0])
        scheduler.step()
        return lr

    # ---- weights and ranks --------------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """See :mod:`verl.workers.engine.fsdp.whole_weights`."""
        self._reshard()
        return iter(self._whole)

    def get_data_parallel_size(self) -> int:
        """All ranks hold different rows."""
        return dist.get_world_size()

    def get_data_parallel_rank(self) -> int:
        """The number of this rank."""
        return dist.get_rank()

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """The default group."""
        return dist.group.WORLD

    def arithmetic(self) -> Arithmetic:
        """From the model's config; a CPU's peak is measured once, in a tenth of a second."""
        counter = FlopsCounter.of(self.model.hf.config, outputs=self.model.head.out_features)
        return Arithmetic(counter, device_peak_flops(self.device, self.compute_dtype))

    def state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """Rows of this rank; see :mod:`verl.workers.engine.fsdp.checkpoint`."""
        return rank_state(self, global_step, contents, copied)

    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Put them back; see :mod:`verl.workers.engine.fsdp.checkpoint`."""
        restore_rank(self, states)

    def load_checkpoint(self, local_path: str, contents: Sequence[str] = ("model", "optimizer", "extra")) -> None:
        """Read a checkpoint back; see :mod:`verl.workers.engine.fsdp.checkpoint`."""
        load_engine(self, local_path, contents)


def _own_part(gradient: Tensor | None) -> Tensor | None:
    return None if gradient is None else local_part(gradient)[0]


def _check_temperature(temperature: float) -> None:
    if temperature <= 0:
        raise ConfigError(f"temperature={temperature}: log-probs need one above 0; a greedy policy is scored at 1.")


@EngineRegistry.register("language_model", ("fsdp", "fsdp2"))
class FSDPLanguageModelEngine(FSDPEngine):
    """A causal language model: log_probs, entropy and sum_pi_squared of response tokens."""


@EngineRegistry.register("value_model", ("fsdp", "fsdp2"))
class FSDPValueModelEngine(FSDPEngine):
    """A value model: ``values`` of the state before each response token."""

    model_type = "value_model"
    output_names = frozenset({"values"})


@EngineRegistry.register("reward_model", ("fsdp", "fsdp2"))
class FSDPRewardModelEngine(FSDPEngine):
    """A discriminative reward model: ``scores``, the head's output at the tokens themselves.

    Trained, it may start from a causal language model, with a head that starts at zero.
    """

    model_type = "reward_model"
    output_names = frozenset({"scores"})
