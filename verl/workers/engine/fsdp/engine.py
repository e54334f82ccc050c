"""The FSDP2 implementation of ``BaseEngine`` for language, value and reward models."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.backends import backend_for
from verl.checkpoint.ranks import RankState
from verl.checkpoint.shards import TrainingState, write_world_size
from verl.checkpoint.states import seed_everything
from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.device import ensure_process_group, get_device
from verl.utils.flops_counter import Arithmetic, FlopsCounter, device_peak_flops
from verl.utils.model import hf_config_of, longrope_threshold, torch_dtype
from verl.utils.sharded_tensor import full_tensor, local_rows
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, set_ulysses_sequence_parallel_group
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.adapters import (
    ADAPTER_FOLDER,
    adapter_layers,
    check_same_scale,
    merged,
    scales_of,
    without_adapters,
    write_adapters,
)
from verl.workers.engine.fsdp.experts import ExpertLoad, balance_coefficient, balance_loss, load_metrics
from verl.workers.engine.fsdp.export import weights_on_first_rank, write_model_folder, write_tokenizer
from verl.workers.engine.fsdp.inputs import ModelInputs, check_one_rotation, check_token_ids, prepare_inputs
from verl.workers.engine.fsdp.model import (
    HeadedModel,
    ModelType,
    build_model,
    check_sequence_sharing,
    enable_gradient_checkpointing,
    own_state,
    trained_parameters,
)
from verl.workers.engine.fsdp.optimizer import build_optimizer, build_scheduler, clip_gradients
from verl.workers.engine.fsdp.packing_check import PackingCheck
from verl.workers.engine.fsdp.sharding import (
    make_mesh,
    make_sequence_mesh,
    mixed_precision,
    needs_sharding,
    shard_model,
)
from verl.workers.engine.images import has_images
from verl.workers.engine.loss import (
    BatchTotals,
    LossCallable,
    LossFunction,
    LossMetrics,
    MetricSum,
    PartialSum,
    as_loss_function,
    gathered,
)
from verl.workers.engine.non_finite import LossWatch, in_gradients
from verl.workers.engine.passes import (
    MicroBatch,
    MicroBatchConfig,
    PassAttempt,
    PassSizes,
    largest_of_ranks,
    split_micro_batches,
)
from verl.workers.routers import Choices, Routers, unknown

ROUTING = "routed_experts"
"""Output and column: the experts that each token goes to."""


class FSDPEngine(BaseEngine):
    """One model under FSDP2, as this rank holds it.

    Args:
        model_config: model folder and settings of the model.
        engine_config: with ``forward_only`` the model is frozen and needs no ``optimizer_config``.
        device_name: ``"cuda"``, ``"cpu"``, or None to use a GPU if there is one.
        timeout_s: seconds after which an unfinished collective is an error.
        total_steps: length of the run, where learning-rate schedules end; 0 if unknown.
        frozen: parts of module names, such as ``visual``, whose weights are not trained.
    """

    model_type: ModelType = "language_model"
    output_names = frozenset({"log_probs", "entropy", "sum_pi_squared", ROUTING})

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: FSDPEngineConfig,
        optimizer_config: FSDPOptimizerConfig | None = None,
        device_name: str | None = None,
        timeout_s: float = 600,
        total_steps: int = 0,
        frozen: Sequence[str] = (),
    ) -> None:
        self.frozen = frozen
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.total_steps = total_steps
        self.device = get_device(device_name)
        self.backend = backend_for(self.device)
        ensure_process_group(self.device, timeout_s)
        self.mesh = make_mesh(self.device, engine_config.fsdp_size)
        self.sequence_mesh = make_sequence_mesh(self.device, engine_config.ulysses_sequence_parallel_size)
        self.model: HeadedModel
        self.optimizer: Optimizer | None = None
        self.scheduler: LambdaLR | None = None
        self.is_packed = False
        self._runs_tower = False
        self.balance_weight = 0.0
        self.pass_sizes = PassSizes()
        self._contexts = 0

    # ---- set-up -------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build and shard the model, and make the optimizer; see :class:`BaseEngine`."""
        config = self.engine_config
        if config.full_determinism:
            torch.use_deterministic_algorithms(True)
        seed_everything(config.seed + dist.get_rank())
        dtype = torch_dtype(config.model_dtype)
        is_first = dist.get_rank() == 0
        hf_config = hf_config_of(self.model_config)
        if self.sequence_ranks > 1:
            check_sequence_sharing(hf_config, self.sequence_ranks)
        if not config.forward_only:
            self.balance_weight = balance_coefficient(hf_config, self.model_config.override_config)
        if self.balance_weight and self.sequence_ranks > 1:
            raise ConfigError(
                f"model.override_config.router_aux_loss_coef={self.balance_weight} with "
                f"ulysses_sequence_parallel_size={self.sequence_ranks}: the load of experts is not counted where ranks "
                "share sequences. Set one of them to its default."
            )
        is_trained = not config.forward_only
        model = build_model(self.model_type, self.model_config, dtype, is_first, is_trained, self.frozen)
        if self.model_config.enable_gradient_checkpointing and not config.forward_only:
            enable_gradient_checkpointing(model)
        self.adapters = adapter_layers(model) if self.has_adapters else {}
        # Adapters are stored in fp32 whatever the model is stored in, and FSDP casts both for the passes.
        if needs_sharding(config, self.mesh) or (self.adapters and dtype is not torch.float32):
            shard_model(model, config, self.mesh)
        else:
            model.to(self.device)
        self.model = model.eval()
        self.routers = Routers(model)
        self._units = [module for module in model.modules() if isinstance(module, FSDPModule)]
        self.compute_dtype = mixed_precision(config).param_dtype or dtype
        check = PackingCheck(model, self.device, self.compute_dtype, self.sequence_group)
        self.is_packed = self.model_config.use_remove_padding and check.use_packed()
        if self.sequence_group is not None and not self.is_packed:
            check.use_shared_padding()
        self._reshard()
        self.backend.install(
            model,
            units=self._units,
            group=self.mesh.get_group("shard"),
            dtype=self.compute_dtype,
            name=type(model.hf).__name__,
            difference=lambda: check.difference(self.is_packed),
        )
        self._reshard()  # otherwise the optimizer would receive the gathered copies
        if not config.forward_only:
            if self.optimizer_config is None:
                raise ConfigError("a model that is trained needs optimizer_config; or set forward_only=true.")
            self.optimizer = build_optimizer(trained_parameters(model).values(), self.optimizer_config)
            self.scheduler = build_scheduler(self.optimizer, self.optimizer_config, self.total_steps)
        self._offload()

    # ---- modes and memory ---------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Keep weights and optimizer on the device, and layers in training mode, inside the context."""
        with self._awake(optimizer=True):
            self.model.train()
            try:
                yield
            finally:
                self.model.eval()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Keep weights on the device, and layers in inference mode, inside the context."""
        with self._awake(optimizer=False):
            yield

    @property
    def has_adapters(self) -> bool:
        """Whether LoRA adapters are trained in place of the model's weights."""
        return self.model_config.has_adapters and not self.engine_config.forward_only

    def disable_adapter(self) -> AbstractContextManager[None]:
        """See :meth:`BaseEngine.disable_adapter`."""
        return without_adapters(self.adapters.values()) if self.has_adapters else super().disable_adapter()

    @contextmanager
    def _awake(self, optimizer: bool) -> Iterator[None]:
        self.to(self.device.type, model=True, optimizer=optimizer)
        self._contexts += 1
        outer = get_ulysses_sequence_parallel_group()
        set_ulysses_sequence_parallel_group(self.sequence_group)
        try:
            yield
        finally:
            set_ulysses_sequence_parallel_group(outer)
            self._contexts -= 1
            self._reshard()
            if self._contexts == 0:
                self._offload()

    def _offload(self) -> None:
        config = self.engine_config
        self.to("cpu", model=config.param_offload, optimizer=config.optimizer_offload)

    def _reshard(self) -> None:
        """Free gathered parameters."""
        # FSDP leaves those of some units gathered after a forward pass without a backward pass.
        for unit in self._units:
            unit.reshard()

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights and optimizer state; no-op on a CPU and with FSDP's own offload (``offload_policy``)."""
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

    def _look_for_images(self, batch: DataProto) -> None:
        """Let the vision tower run in all passes of a batch if any rank has an image in it. Collective with a tower."""
        if self.model.vision is not None:
            self._runs_tower = bool(largest_of_ranks(int(has_images(batch)), self.device))

    def _inputs(self, data: DataProto) -> ModelInputs:
        check_token_ids(data, self.model.hf.config.get_text_config().vocab_size)
        check_one_rotation(data, longrope_threshold(self.model.hf.config))
        at_token = self.model_type == "reward_model"
        vision = self.model.vision
        group, tower = self.sequence_group, self._runs_tower
        return prepare_inputs(data, self.is_packed, self.device, at_token, group, vision, tower)

    @torch.no_grad()
    def infer_batch(
        self, batch: DataProto, outputs: set[str], micro: MicroBatchConfig, temperature: float = 1.0
    ) -> dict[str, Tensor]:
        """Compute output columns without gradients; see :class:`BaseEngine`."""
        self._check_request(outputs, temperature)
        shape = batch.batch["response_mask"].shape
        micro = micro.shared_by(self.sequence_ranks)

        self._look_for_images(batch)

        columns: dict[str, Tensor] = {}
        with self.backend.frozen_weights():
            for attempt in self._attempts("infer"):
                with attempt as limit:
                    columns = {name: torch.zeros(shape) for name in outputs - {ROUTING}}
                    for part in self.pass_sizes.watched(split_micro_batches(batch, micro, self.device, limit=limit)):
                        self._infer(part, columns, temperature, len(batch) if ROUTING in outputs else None)
        self._reshard()
        return columns

    def _infer(self, part: MicroBatch, columns: dict[str, Tensor], temperature: float, bsz: int | None = None) -> None:
        """Fill the rows of one micro-batch in ``columns``; add routing for a batch of ``bsz`` rows if that is given."""
        # A function of its own, so that the tensors of this pass are freed before the next one.
        inputs = self._inputs(part.data)
        with self._routing(inputs) as choices:
            flat = self.model(inputs, frozenset(columns.keys() - {ROUTING}), temperature)
        if part.is_filler:
            return
        for name, values in flat.items():
            columns[name][part.rows] = inputs.scatter(values).float().cpu()
        if bsz is None:
            return
        found = choices.stacked(self.model.hf).cpu()
        mask = part.data.batch["attention_mask"].bool().cpu()
        if ROUTING not in columns:
            free = unknown(found.dtype)
            columns[ROUTING] = torch.full((bsz, mask.shape[1], *found.shape[1:]), free, dtype=found.dtype)
        rows = torch.full((*mask.shape, *found.shape[1:]), unknown(found.dtype), dtype=found.dtype)
        rows[mask] = found
        columns[ROUTING][part.rows] = rows

    @contextmanager
    def _routing(self, inputs: ModelInputs) -> Iterator[Choices]:
        """Watch the routers in a pass without gradients, and replay the choices of its ``routed_experts``."""
        with self.routers.replayed(inputs.routed_experts), self.routers.watched(inputs.attention_mask) as choices:
            yield choices

    def forward_backward_batch(
        self,
        batch: DataProto,
        loss_fn: LossFunction | LossCallable,
        micro: MicroBatchConfig,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Accumulate the gradients of one mini-batch; see :class:`BaseEngine`."""
        loss_fn = as_loss_function(loss_fn)
        self._check_request(loss_fn.outputs, temperature)
        group, micro = self.get_data_parallel_group(), micro.shared_by(self.sequence_ranks)
        totals = BatchTotals.of(batch, self.get_data_parallel_size(), self.device, group)
        self._look_for_images(batch)

        metrics, watch, load = MetricSum(totals), LossWatch(self.get_data_parallel_rank()), ExpertLoad()
        with self.backend.frozen_weights():
            for attempt in self._attempts("train"):
                with attempt as limit:
                    metrics, watch = MetricSum(totals), LossWatch(self.get_data_parallel_rank())
                    parts = [*split_micro_batches(batch, micro, self.device, loss_fn.rows_per_unit, limit)]
                    counts = self._expert_counts(parts) if self.balance_weight and len(parts) > 1 else None
                    load = ExpertLoad()
                    for part in self.pass_sizes.watched(parts):
                        columns, loss, found = self._forward_backward(part, loss_fn, totals, temperature, load, counts)
                        watch.add(part.rows, part.data, columns, loss, found)
                        if not part.is_filler:
                            metrics.add(found, part.num_tokens)
        reduced, self.non_finite = metrics.reduce(watch.found(), group)
        # A critic's would have the names of the actor's.
        return reduced | load_metrics(load.total(group)) if self.model_type == "language_model" else reduced

    @torch.no_grad()
    def _expert_counts(self, parts: Sequence[MicroBatch]) -> Tensor:
        """Count the tokens of each expert in all passes of all ranks, (layers, experts), by passes without gradients.

        The balance loss needs them before the first pass with gradients.
        """
        load = ExpertLoad()
        for part in self.pass_sizes.watched(parts):
            inputs = self._inputs(part.data)
            with self._routing(inputs) as choices:
                self.model(inputs, frozenset({"hidden"}), 1.0)
            if not part.is_filler:
                load.add(choices)
        self._reshard()
        return load.total(self.get_data_parallel_group())

    def _attempts(self, kind: str) -> Iterator[PassAttempt]:
        """Yield attempts at all passes of a batch: one, and another with smaller passes whenever memory ran out."""
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        is_fresh = kind == "infer" or all(weight.grad is None for weight in weights)
        while True:
            attempt = PassAttempt(self.pass_sizes.limits.get(kind))
            yield attempt
            error, attempt.error = attempt.error, None
            if error is None:
                return
            # FSDP cannot undo a pass that broke off, neither here nor on ranks that wait in its collectives.
            self.pass_sizes.lower(kind, error, alone=is_fresh and not isinstance(self.model, FSDPModule))
            del error  # its traceback holds the tensors of the pass
            if kind == "train":  # an interrupted backward has added to some gradients but not to others
                for weight in weights:
                    weight.grad = None
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def _forward_backward(
        self,
        part: MicroBatch,
        loss_fn: LossFunction,
        totals: BatchTotals,
        temperature: float,
        load: ExpertLoad,
        counts: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor, LossMetrics]:
        data, inputs = part.data, self._inputs(part.data)
        with self.routers.replayed(inputs.routed_experts):
            with self.routers.watched(inputs.attention_mask) as choices:
                flat = self.model(inputs, loss_fn.outputs, temperature)
            if not part.is_filler and self.sequence_group is None:
                load.add(choices)
            columns = {name: inputs.scatter(values) for name, values in flat.items()}
            loss, metrics = loss_fn(columns, data.to(self.device), totals)
            if self.balance_weight:
                counts = load.total(self.get_data_parallel_group()) if counts is None else counts
                if not part.is_filler:
                    balance = self._balance(choices, counts)
                    loss = loss + self.balance_weight * totals.dp_size * balance
                    if self.model_type == "language_model":
                        metrics = {**metrics, "moe/aux_loss": PartialSum(balance.detach())}
            if not loss.requires_grad:  # every rank must run the same backward collectives
                loss = loss + 0.0 * torch.stack([column.sum() for column in columns.values()]).sum()
            loss.backward()
        return columns, loss, metrics

    def _balance(self, choices: Choices, counts: Tensor) -> Tensor:
        if not choices.per_token:
            raise ConfigError(
                f"model.override_config.router_aux_loss_coef={self.balance_weight}: the routers of "
                f"{type(self.model.hf).__name__} do not return what they choose, so that their load cannot be "
                "balanced. Leave it out."
            )
        return balance_loss(choices, counts)

    # ---- the optimizer ------------------------------------------------------------------------

    def _trained(self) -> tuple[Optimizer, LambdaLR, FSDPOptimizerConfig]:
        if self.optimizer is None or self.scheduler is None or self.optimizer_config is None:
            raise ConfigError("this model is frozen (forward_only=true) and has no optimizer.")
        return self.optimizer, self.scheduler, self.optimizer_config

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients."""
        self._trained()[0].zero_grad(set_to_none=True)

    def optimizer_step(self) -> float:
        """Clip the gradients and update the weights; see :class:`BaseEngine`."""
        optimizer, _, config = self._trained()
        grad_norm = clip_gradients(self.model.parameters(), config.clip_grad)
        if not math.isfinite(grad_norm):
            trained = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
            gradients = ((name, local_rows(grad)[0]) for name, grad in trained)
            self.non_finite = gathered(in_gradients(gradients, dist.get_rank()))
            optimizer.zero_grad(set_to_none=True)
            return grad_norm
        optimizer.step()
        self.weight_version += 1
        return grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; see :class:`BaseEngine`."""
        _, scheduler, _ = self._trained()
        lr = float(scheduler.get_last_lr()[0])
        scheduler.step()
        return lr

    # ---- weights and ranks --------------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`BaseEngine.get_per_tensor_param`."""
        self._reshard()
        weights = self.backend.whole_weights()
        return merged(weights, scales_of(self.adapters)) if self.has_adapters else weights

    @property
    def sequence_group(self) -> dist.ProcessGroup | None:
        """Ranks that share the sequences of this one; None if it has whole sequences."""
        return None if self.sequence_mesh is None else self.sequence_mesh.get_group("sp")

    @property
    def sequence_ranks(self) -> int:
        """Number of ranks that share a sequence."""
        return self.engine_config.ulysses_sequence_parallel_size

    def get_data_parallel_size(self) -> int:
        """Return the number of groups of ranks that share sequences; without such groups the number of ranks."""
        return dist.get_world_size() // self.sequence_ranks

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's group."""
        return dist.get_rank() // self.sequence_ranks

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the ranks with the same place in their group, which together have all rows once."""
        return dist.group.WORLD if self.sequence_mesh is None else self.sequence_mesh.get_group("dp")

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank is the first of those that share its sequences."""
        return dist.get_rank() % self.sequence_ranks == 0

    def arithmetic(self) -> Arithmetic:
        """See :meth:`BaseEngine.arithmetic`. A CPU's peak is measured at the first call, which takes about 0.1 s."""
        counter = FlopsCounter.of(self.model.hf.config, self.model.head.out_features, is_frozen=self.has_adapters)
        return Arithmetic(counter, device_peak_flops(self.device, self.compute_dtype))

    # ---- checkpoints --------------------------------------------------------------------------

    def _training_state(self) -> TrainingState:
        trained = trained_parameters(self.model)
        tensors = trained if self.has_adapters else own_state(self.model)
        return TrainingState(tensors, trained, self.optimizer, self.scheduler)

    def state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """Collect this rank's part of a checkpoint; see :mod:`verl.checkpoint.shards`."""
        numbers = {"weight_version": self.weight_version, "global_step": global_step}
        states = self._training_state().states(contents, numbers, copied)
        weights = weights_on_first_rank(self.get_per_tensor_param()) if "hf_model" in contents else None
        adapters = self._whole_adapters() if self.has_adapters and "model" in contents else None
        if dist.get_rank():
            return RankState(states)

        def describe(folder: Path) -> None:
            write_world_size(folder)
            write_model_folder(self.model.hf, self.model.head_name, weights, folder / "huggingface")
            write_tokenizer(self.model_config, folder / "huggingface")
            if adapters is not None:
                write_adapters(self.model.hf, self.model.head_name, adapters, folder / ADAPTER_FOLDER)

        return RankState(states, describe)

    def _whole_adapters(self) -> dict[str, Tensor]:
        """Copy the adapters to CPU memory on rank 0. Collective."""
        self._reshard()
        trained = trained_parameters(self.model).items()
        return weights_on_first_rank((name, full_tensor(parameter, self.device)) for name, parameter in trained)

    def load_state(self, states: Mapping[str, Mapping[str, Any]]) -> None:
        """Restore what :meth:`state` returned; see :class:`BaseEngine`."""
        numbers = self._training_state().restore(states)
        self.weight_version = int(numbers.get("weight_version", self.weight_version))

    def load_checkpoint(self, local_path: str, contents: Sequence[str] = ("model", "optimizer", "extra")) -> None:
        """Restore from a checkpoint folder; see :class:`BaseEngine`."""
        folder = Path(local_path).expanduser()
        if self.has_adapters and "model" in contents:
            check_same_scale(self.model.hf, folder / ADAPTER_FOLDER)
        numbers = self._training_state().load(folder, contents)
        self.weight_version = int(numbers.get("weight_version", self.weight_version))


@EngineRegistry.register("language_model", ("fsdp", "fsdp2"))
class FSDPLanguageModelEngine(FSDPEngine):
    """Engine of a causal language model: ``log_probs``, ``entropy`` and ``sum_pi_squared`` of response tokens."""


@EngineRegistry.register("value_model", ("fsdp", "fsdp2"))
class FSDPValueModelEngine(FSDPEngine):
    """Engine of a value model: ``values`` of the state before each response token."""

    model_type = "value_model"
    output_names = frozenset({"values"})


@EngineRegistry.register("reward_model", ("fsdp", "fsdp2"))
class FSDPRewardModelEngine(FSDPEngine):
    """Engine of a discriminative reward model: ``scores``, the head's output at each response token itself.

    For training it may start from a causal language model; the head then starts at zero.
    """

    model_type = "reward_model"
    output_names = frozenset({"scores"})
