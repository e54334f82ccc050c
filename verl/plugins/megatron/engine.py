"""The Megatron implementation of ``BaseEngine`` for language, value and reward models."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from verl.base.device_copies import to_device
from verl.checkpoint.boxes import write_layout
from verl.checkpoint.ranks import RankState
from verl.checkpoint.states import seed_everything
from verl.config import FSDPOptimizerConfig, HFModelConfig, McoreEngineConfig
from verl.errors import ConfigError
from verl.plugins.megatron.adapters import as_in_peft, without_adapters
from verl.plugins.megatron.balance import Mixtures, RouterTraining
from verl.plugins.megatron.checkpoint import MegatronState
from verl.plugins.megatron.groups import Layout, join, use
from verl.plugins.megatron.inputs import megatron_inputs
from verl.plugins.megatron.library import (
    DistributedDataParallel,
    DistributedDataParallelConfig,
    finalize_model_grads,
    get_forward_backward_func,
    parallel_state,
)
from verl.plugins.megatron.model import BuiltModel, build
from verl.plugins.megatron.offload import OffloadedMemory
from verl.plugins.megatron.optimizer import Matrices, MegatronOptimizer
from verl.plugins.megatron.outputs import outputs_at
from verl.plugins.megatron.prediction import PredictionLoss, TokensAhead
from verl.plugins.megatron.replay import RouterReplay
from verl.plugins.megatron.weights import ShardRegion, WeightGatherer
from verl.protocol import DataProto
from verl.utils.device import ensure_process_group, get_device
from verl.utils.flops_counter import Arithmetic, FlopsCounter, device_peak_flops
from verl.utils.model import torch_dtype
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.engine.base import BaseEngine, EngineRegistry
from verl.workers.engine.fsdp.experts import balance_coefficient
from verl.workers.engine.loss import (
    BatchTotals,
    LossCallable,
    LossFunction,
    MetricSum,
    as_loss_function,
    gathered,
)
from verl.workers.engine.model.adapters import (
    ADAPTER_FOLDER,
    adapter_layers,
    base_of,
    check_same_scale,
    linear_adapters,
    merged,
    require_linear,
    write_adapters,
)
from verl.workers.engine.model.divergence import OutputMatrix
from verl.workers.engine.model.export import (
    WeightFiles,
    copy_companions,
    untrained_heads,
    weights_on_first_rank,
    write_in_turn,
    write_model_folder,
)
from verl.workers.engine.model.head import NO_TOP, LogitRule, TopTokens
from verl.workers.engine.model.headed import ModelType
from verl.workers.engine.model.inputs import ModelInputs, check_token_ids
from verl.workers.engine.model.outputs import LANGUAGE_OUTPUTS, empty_columns, without_hidden
from verl.workers.engine.muon import hidden_matrices, is_hidden_matrix
from verl.workers.engine.non_finite import LossWatch, NonFinite, in_gradients
from verl.workers.engine.optimizer import build_scheduler
from verl.workers.engine.passes import MicroBatch, MicroBatchConfig, PassAttempt, PassSizes, split_micro_batches
from verl.workers.routers import ROUTING

if TYPE_CHECKING:
    from verl.checkpoint.states import State

PassFunction = Callable[[MicroBatch, ModelInputs, dict[str, Tensor]], Tensor]
"""Function of the outputs of one pass, (N,) each; it returns the loss."""


class MegatronEngine(BaseEngine):
    """One model under megatron-core, as this rank holds it.

    Args:
        model_config: model folder and settings of the model.
        engine_config: with ``forward_only`` the model is frozen and needs no ``optimizer_config``.
        device_name: ``"cuda"``, ``"cpu"``, or None to use a GPU if there is one.
        timeout_s: seconds after which an unfinished collective is an error.
        frozen: parts of module names, such as ``visual``, whose weights are not trained.
    """

    model_type: ModelType = "language_model"
    output_names = LANGUAGE_OUTPUTS | {ROUTING}

    def __init__(
        self,
        model_config: HFModelConfig,
        engine_config: McoreEngineConfig,
        optimizer_config: FSDPOptimizerConfig | None = None,
        device_name: str | None = None,
        timeout_s: float = 600,
        frozen: Sequence[str] = (),
    ) -> None:
        for problem in (*engine_config.problems("megatron"), *engine_config.pipeline_problems("megatron")):
            raise ConfigError(str(problem))
        self.model_config = model_config
        self.engine_config = engine_config
        self.optimizer_config = optimizer_config
        self.frozen = frozen
        # CUDA reads it when it starts: with one queue, kernels and collectives of tensor parallelism run in the order
        # in which megatron-core launches them, so that they overlap.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
        self.device = get_device(device_name)
        ensure_process_group(self.device, timeout_s)
        self.layout = Layout.from_config(engine_config)
        join(self.layout, self.device, engine_config.seed)
        self._copies = parallel_state.get_data_parallel_group()
        is_first = parallel_state.get_tensor_model_parallel_rank() == parallel_state.get_context_parallel_rank() == 0
        self._is_source = is_first and parallel_state.is_pipeline_last_stage(ignore_virtual=True)
        self.optimizer: MegatronOptimizer | None = None
        self.scheduler: LambdaLR | None = None
        self.pass_sizes = PassSizes()
        self.memory = OffloadedMemory()
        self._has_gradients = False
        self.model: BuiltModel
        self._wrapped: list[object]
        self._contexts = 0

    # ---- set-up -------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Build this rank's part of the model, and make the optimizer; see :class:`BaseEngine`."""
        use(self.layout)
        config = self.engine_config
        seed_everything(config.seed + dist.get_rank())
        self.model = build(self.model_type, self.model_config, config, self.layout, self.device, self.frozen)
        self.model.pieces.eval()
        self.weights = WeightGatherer(self.model.shapes, self.model.regions)
        self.checkpointed = self._checkpointed()
        weight = balance_coefficient(self.model.hf_config, self.model_config.override_config)
        is_policy = self.model_type == "language_model" and not config.forward_only
        override = config.override_transformer_config if is_policy else {}
        routers = RouterTraining.from_settings(0.0 if config.forward_only else weight, override)
        self.mixtures = Mixtures(self.model.pieces, self.layout, routers)
        self.replay = RouterReplay(self.model.pieces, self.layout)
        self.prediction = PredictionLoss(
            self.model.heads.count,
            self.model.last,
            self.model.head_weight,
            self.model.text_config.vocab_size,
            self.model_config.mtp,
            self.device,
        )
        self._wrapped = list(self.model.pieces)
        self.memory.add("weights", self.model.pieces.parameters)
        if config.forward_only:
            return
        if self.optimizer_config is None:
            raise ConfigError("a model that is trained needs optimizer_config; or set forward_only=true.")
        reduction = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=config.use_distributed_optimizer
        )
        self._wrapped = [
            DistributedDataParallel(config=piece.config, ddp_config=reduction, module=piece)
            for piece in self.model.pieces
        ]
        self.optimizer = MegatronOptimizer(
            self._wrapped, self.optimizer_config, config.use_distributed_optimizer, self._counted(), self._matrices()
        )
        self.memory.add("optimizer", self.optimizer.tensors)
        self.memory.add("gradients", self.optimizer.buffers)
        self.scheduler = build_scheduler(self.optimizer.torch, self.optimizer_config)
        self._offload()

    def _counted(self) -> set[str]:
        """Parameters that this rank counts in the gradient norm: of equal copies that of one rank."""
        is_first = parallel_state.get_tensor_model_parallel_rank() == 0
        is_first_of_expert = parallel_state.get_expert_tensor_parallel_rank() == 0
        last = self.model.last
        counted = {
            weight.parameter
            for weight in self.model.regions
            if weight.is_divided or (is_first_of_expert if ".experts." in weight.name else is_first)
        }
        if last.share_embeddings_and_output_weights and not last.pre_process:
            # The first pipeline stage counts the embedding.
            counted.discard(f"{self.layout.pieces - 1}.output_layer.weight")
        counted.discard(f"{self.layout.pieces - 1}.heads.embedding.word_embeddings.weight")
        return counted

    def _matrices(self) -> Matrices:
        """Weights for Muon: matrices of the model's hidden layers, and of its heads of multi-token prediction."""
        model = self.model
        head_matrices = {name for name in model.heads.trained if is_hidden_matrix(name, model.shapes[name])}
        names = frozenset(hidden_matrices(model.skeleton, model.skeleton.head).keys() | head_matrices)
        return Matrices(names, model.shapes, model.regions)

    # ---- modes and memory ---------------------------------------------------------------------

    @contextmanager
    def train_mode(self) -> Iterator[None]:
        """Keep the optimizer on the device, and layers in training mode, inside the context."""
        with self._awake(optimizer=True):
            self.model.pieces.train()
            try:
                yield
            finally:
                self.model.pieces.eval()

    @contextmanager
    def eval_mode(self) -> Iterator[None]:
        """Keep layers in inference mode inside the context."""
        with self._awake(optimizer=False):
            yield

    @contextmanager
    def _awake(self, optimizer: bool) -> Iterator[None]:
        use(self.layout)
        self.to(self.device.type, optimizer=optimizer)
        self._contexts += 1
        try:
            yield
        finally:
            self._contexts -= 1
            if self._contexts == 0:
                self._offload()

    def _offload(self) -> None:
        config = self.engine_config
        self.to("cpu", model=config.param_offload, optimizer=config.optimizer_offload)
        # Buffers of gradients that were used are zeros: freed, they cost an allocation at the next update.
        if self.device.type != "cpu" and (config.grad_offload or not self._has_gradients):
            self.memory.offload("gradients", keep=self._has_gradients)

    def to(self, device: str, model: bool = True, optimizer: bool = True) -> None:
        """Move weights, and the state of the optimizer with the gradients that it reads. No-op on a CPU."""
        if self.device.type == "cpu":
            return
        for part in [*(["weights"] if model else []), *(["optimizer"] if optimizer else [])]:
            if device == "cpu":
                self.memory.offload(part)
            else:
                self.memory.restore(part)
        if device != "cpu" and optimizer:
            self.memory.restore("gradients")

    # ---- computing ----------------------------------------------------------------------------

    @torch.no_grad()
    def infer_batch(
        self, batch: DataProto, outputs: set[str], micro: MicroBatchConfig, temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        """Compute output columns without gradients; see :class:`BaseEngine`.

        Only ranks of the last pipeline stage have them; on others they are 0.
        """
        use(self.layout)
        self._check_request(outputs, temperature, topk, self.model.text_config.vocab_size)
        records, outputs = ROUTING in outputs, outputs - {ROUTING}
        columns: dict[str, Tensor] = {}
        top = TopTokens(topk, self.ids_below)
        micro = micro.shared_by(self.layout.context)

        def fill(part: MicroBatch, inputs: ModelInputs, columns_of_part: dict[str, Tensor]) -> Tensor:
            for name in () if part.is_filler else outputs:
                column = columns[name]
                rows = to_device(torch.tensor(part.rows), column.device)
                column.index_copy_(0, rows, inputs.scatter(columns_of_part[name]).to(column))
            return torch.zeros((), device=self.device)

        for attempt in self._attempts("infer"):
            with attempt as limit:
                shape = batch.batch["response_mask"].shape
                size, dtype = self.model.text_config.hidden_size, torch_dtype(self.engine_config.dtype)
                columns = empty_columns(shape, outputs, topk, size, dtype, self.device)
                if records:
                    self.replay.record(len(batch), batch.batch["attention_mask"].shape[1])
                parts = self._parts(batch, micro, 1, limit)
                self._passes(parts, frozenset(outputs), temperature, fill, forward_only=True, top=top)
        routing = {ROUTING: self.replay.recorded(self.device)} if records else {}
        return {name: values.cpu() for name, values in columns.items()} | routing

    def forward_backward_batch(
        self,
        batch: DataProto,
        loss_fn: LossFunction | LossCallable,
        micro: MicroBatchConfig,
        temperature: float = 1.0,
    ) -> dict[str, float]:
        """Accumulate the gradients of one mini-batch; see :class:`BaseEngine`."""
        use(self.layout)
        loss_fn = as_loss_function(loss_fn)
        self._check_request(loss_fn.outputs, temperature)
        self._trained()
        self._has_gradients = True
        group, micro = self.get_data_parallel_group(), micro.shared_by(self.layout.context)
        totals = BatchTotals.from_batch(batch, self.get_data_parallel_size(), self.device, group)
        metrics, watch = MetricSum(totals), LossWatch(self.get_data_parallel_rank())

        def add(part: MicroBatch, inputs: ModelInputs, part_metrics: dict[str, Tensor]) -> Tensor:
            columns = {name: inputs.scatter(values) for name, values in part_metrics.items()}
            data = without_hidden(part.data)
            loss, terms = loss_fn(columns, data.to(self.device), totals)
            if not loss.requires_grad:  # every rank must run the same backward collectives
                loss = loss + 0.0 * torch.stack([column.sum() for column in columns.values()]).sum()
            watch.add(part.rows, data, columns, loss, terms)
            if not part.is_filler:
                metrics.add(terms, part.num_tokens)
            return loss

        def nothing(part: MicroBatch, inputs: ModelInputs, outputs: dict[str, Tensor]) -> Tensor:
            return torch.zeros((), device=self.device)

        for attempt in self._attempts("train"):
            with attempt as limit:
                metrics, watch = MetricSum(totals), LossWatch(self.get_data_parallel_rank())
                self.mixtures.reset()
                self.prediction.begin(batch, totals.dp_size, group)
                parts = self._parts(batch, micro, loss_fn.rows_per_unit, limit)
                if self.mixtures.training.needs_load:  # the loss needs the load of all tokens before the first gradient
                    with torch.no_grad():
                        self._passes(parts, frozenset(), temperature, nothing, forward_only=True, is_counted=True)
                    self.mixtures.add_loss(group)
                self.mixtures.begin(batch, group)
                self._passes(
                    parts, loss_fn.outputs, temperature, add, False, is_counted=True, heads=self.model.heads.count
                )
        reduced = self._on_all_stages(metrics, watch, group)
        if self.model_type != "language_model":  # a critic's metrics would have the names of the actor's
            return reduced
        reduced |= self.mixtures.metrics(group) | self.prediction.metrics()
        self.expert_counts = self.mixtures.counts
        return reduced

    def _on_all_stages(self, metrics: MetricSum, watch: LossWatch, group: dist.ProcessGroup | None) -> dict[str, float]:
        """Reduce metrics where they are, on the last pipeline stage, and tell the others."""
        sums: list[tuple[dict[str, float], list[NonFinite]]] = [({}, [])]
        if self.model.last.post_process:
            sums = [metrics.reduce(watch.problems(), group)]
        if self.layout.pipeline > 1:
            stages = parallel_state.get_pipeline_model_parallel_group()
            last = parallel_state.get_pipeline_model_parallel_last_rank()
            dist.broadcast_object_list(sums, src=last, group=stages, device=self.device)
        reduced, self.non_finite = sums[0]
        return reduced

    def _parts(
        self, batch: DataProto, micro: MicroBatchConfig, rows_per_unit: int, limit: int | None
    ) -> list[MicroBatch]:
        # An interleaved schedule takes so many passes at once: as many as there are stages, unless it is set.
        multiple = self.model.first.config.microbatch_group_size_per_vp_stage if self.layout.pieces > 1 else 1
        return list(split_micro_batches(batch, micro, self.device, rows_per_unit, limit, multiple))

    def _passes(
        self,
        parts: Sequence[MicroBatch],
        outputs: frozenset[str],
        temperature: float,
        function: PassFunction,
        forward_only: bool,
        is_counted: bool = False,
        top: TopTokens = NO_TOP,
        heads: int = 0,
    ) -> None:
        """Run the passes by megatron-core's schedule: one after the other, or through the pipeline. Collective."""

        def step(data: Iterator[MicroBatch], module: Any) -> tuple[Tensor, Callable[[Tensor], tuple[Tensor, dict]]]:
            part = next(data)
            inputs, ahead = self._inputs(part.data, heads)
            assert inputs.attention_mask is not None
            padding = torch.ones_like(inputs.attention_mask) if part.is_filler else ~inputs.attention_mask
            with self.mixtures.watched(is_counted), self.replay.replayed(inputs, is_trained=not forward_only):
                ids_ahead = [tokens.ids for tokens in ahead]
                hidden = module(
                    inputs.input_ids, inputs.position_ids, inputs.packing, padding, inputs.images, ids_ahead
                )
            self.replay.keep(part, inputs)

            def loss(hidden: Tensor) -> tuple[Tensor, dict]:
                columns = outputs_at(
                    self.model, self.model_type, hidden, inputs, outputs, temperature, top, self.divergence
                )
                # The schedule divides by the number of passes and multiplies by the ranks that share a sequence; our
                # losses are terms of a sum, and gathering outputs multiplies their gradients already.
                total = function(part, inputs, columns) * (len(parts) / self.layout.context)
                if ahead:  # each rank that shares sequences has the term of its own tokens
                    total = total + self.prediction.add(ahead, not part.is_filler) * len(parts)
                return total, {}

            return hidden, loss

        self.replay.reset()
        get_forward_backward_func()(
            forward_step_func=step,
            data_iterator=[self.pass_sizes.watched(parts) for _ in self._wrapped],
            model=self._wrapped,
            num_microbatches=len(parts),
            seq_length=1,  # ignored: stages send each other the sizes of their passes (variable_seq_lengths)
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def _inputs(self, data: DataProto, heads: int) -> tuple[ModelInputs, tuple[TokensAhead, ...]]:
        check_token_ids(data, self.model.text_config.vocab_size)
        return megatron_inputs(
            data,
            self.model_config.use_remove_padding,
            self.device,
            at_token=self.model_type == "reward_model",
            multiple=self.layout.tensor if self.model.first.config.sequence_parallel else 1,
            group=parallel_state.get_context_parallel_group() if self.layout.context > 1 else None,
            vision=self.model.skeleton.vision,
            needs_pixels=self.model.first.pre_process,
            heads=heads,
        )

    def _attempts(self, kind: str) -> Iterator[PassAttempt]:
        return self.pass_sizes.attempts(kind, self.device, dist.get_world_size() == 1, self.optimizer_zero_grad)

    # ---- the optimizer ------------------------------------------------------------------------

    def _trained(self) -> tuple[MegatronOptimizer, LambdaLR, FSDPOptimizerConfig]:
        if self.optimizer is None or self.scheduler is None or self.optimizer_config is None:
            raise ConfigError("this model is frozen (forward_only=true) and has no optimizer.")
        return self.optimizer, self.scheduler, self.optimizer_config

    def optimizer_zero_grad(self) -> None:
        """Clear the gradients."""
        self._trained()[0].zero_grad()
        self._has_gradients = False

    def optimizer_step(self) -> float:
        """Sum the gradients over ranks, clip them, and update the weights; see :class:`BaseEngine`."""
        use(self.layout)
        optimizer, _, config = self._trained()
        self._has_gradients = False  # they are of no use after this
        finalize_model_grads(self._wrapped)
        self._add_up_embedding()
        norm = optimizer.grad_norm()
        if not math.isfinite(norm):
            self.non_finite = gathered(in_gradients(optimizer.gradients(), dist.get_rank()))
            optimizer.zero_grad()
            return norm
        optimizer.step(scale=min(1.0, config.clip_grad / (norm + 1e-6)))  # as torch.nn.utils.clip_grad_norm_
        self.mixtures.update_biases()
        self.weight_version += 1
        return norm

    def _add_up_embedding(self) -> None:
        """Add up the gradients of the embedding and of the copy that heads on another stage read. Collective."""
        if (
            not self.model.heads.count
            or self.layout.pipeline == 1
            or self.model.last.share_embeddings_and_output_weights
        ):
            return  # megatron-core sums the gradients of a tied embedding itself
        first, last = self.model.first, self.model.last
        if first.pre_process or last.post_process:
            embedding = first.embedding if first.pre_process else last.heads.embedding
            dist.all_reduce(embedding.word_embeddings.weight.main_grad, group=parallel_state.get_embedding_group())

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; see :class:`BaseEngine`."""
        _, scheduler, _ = self._trained()
        lr = float(scheduler.get_last_lr()[0])
        scheduler.step()
        return lr

    # ---- weights and ranks --------------------------------------------------------------------

    def get_per_tensor_param(self) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`BaseEngine.get_per_tensor_param`; with the heads of multi-token prediction that are trained."""
        weights = self._gathered(self.weights)
        if self.has_adapters:
            return merged(weights, self.model.targets)
        copies = self.model.heads.copies
        return ((other, tensor) for name, tensor in weights for other in (name, *copies.get(name, ())))

    def weights_for_rollout(self, dtype: torch.dtype, divided: bool = False) -> Iterator[tuple[str, Tensor]]:
        """See :meth:`BaseEngine.weights_for_rollout`; with trained heads if an engine proposes tokens by them."""
        heads = self.model.heads
        skipped = {*chain.from_iterable(heads.copies.values())}
        if not self.model_config.mtp.is_in_rollout:
            skipped |= heads.shapes.keys()
        return ((name, tensor) for name, tensor in self.get_per_tensor_param() if name not in skipped)

    def _gathered(self, weights: WeightGatherer) -> Iterator[tuple[str, Tensor]]:
        """Iterate over whole weights by their name in the skeleton. Collective: every rank iterates to the end."""
        parameters, dtype = self._parameters(), torch_dtype(self.engine_config.dtype)

        def box(weight: ShardRegion) -> Tensor:
            return weight.read(parameters[weight.parameter].detach())

        return ((name, as_in_peft(name, tensor)) for name, tensor in weights.gather(box, dtype, self.device))

    @property
    def has_adapters(self) -> bool:
        """True if LoRA adapters are trained instead of the model's weights."""
        return bool(self.model.targets)

    def disable_adapter(self) -> AbstractContextManager[None]:
        """See :meth:`BaseEngine.disable_adapter`."""
        return without_adapters(self.model.pieces) if self.has_adapters else super().disable_adapter()

    def adapted_weights(self) -> AdaptedWeights:
        """See :meth:`BaseEngine.adapted_weights`."""
        if not self.has_adapters:
            return super().adapted_weights()
        require_linear(adapter_layers(self.model.skeleton))
        scales = {name: target.scale for name, target in self.model.targets.items()}
        return AdaptedWeights(
            lambda: base_of(self._gathered(self.weights)),
            lambda: linear_adapters(self._gathered(self.checkpointed)),
            scales,
        )

    def _parameters(self) -> dict[str, Tensor]:
        return dict(self.model.pieces.named_parameters())

    def get_data_parallel_size(self) -> int:
        """Return the number of copies of the model."""
        return dist.get_world_size(self._copies)

    def get_data_parallel_rank(self) -> int:
        """Return the index of this rank's copy of the model."""
        return dist.get_rank(self._copies)

    def get_data_parallel_group(self) -> dist.ProcessGroup | None:
        """Return the ranks with the same part of each copy, which together have all rows once."""
        return self._copies

    def is_mp_src_rank_with_outputs(self) -> bool:
        """Return whether this rank is the first of its copy's last pipeline stage."""
        return self._is_source

    def arithmetic(self) -> Arithmetic:
        """See :meth:`BaseEngine.arithmetic`. A CPU's peak is measured at the first call, which takes about 0.1 s."""
        outputs = self.model.skeleton.head.out_features
        heads = self.model.heads.count
        counter = FlopsCounter.from_config(
            self.model.hf_config, outputs=outputs, is_frozen=self.has_adapters, heads=heads
        )
        return Arithmetic(counter, device_peak_flops(self.device, torch_dtype(self.engine_config.dtype)))

    # ---- checkpoints --------------------------------------------------------------------------

    def _checkpointed(self) -> WeightGatherer:
        """Return the weights that a checkpoint has: all, or with adapters those that are trained. Collective."""
        if not self.has_adapters:
            return self.weights
        shapes = {name: shape for name, shape in self.model.shapes.items() if name not in self.model.frozen}
        regions = [weight for weight in self.model.regions if weight.name in shapes]
        has_weights: list[bool] = [False] * dist.get_world_size()
        dist.all_gather_object(has_weights, bool(regions))
        if not all(has_weights):
            raise ConfigError(
                f"megatron.{self.layout}: rank {has_weights.index(False)} has no layer with an adapter, so nothing is "
                "trained on its pipeline stage. Choose layers of every stage in model.target_modules, or a smaller "
                "pipeline_model_parallel_size."
            )
        return WeightGatherer(shapes, regions)

    def _state(self) -> MegatronState:
        regions, parameters = self.model.regions, self._parameters()
        frozen = self.model.frozen if self.optimizer is not None else frozenset()
        if self.has_adapters:
            regions = [weight for weight in regions if weight.name not in frozen]
            parameters = {weight.parameter: parameters[weight.parameter] for weight in regions}
        return MegatronState(self.checkpointed, regions, parameters, self.optimizer, self.scheduler, frozen)

    def state_bytes(self) -> int:
        """See :meth:`BaseEngine.state_bytes`: fp32 weights and moments."""
        if self.optimizer is None:
            return sum(parameter.nbytes for parameter in self._parameters().values())
        return self.optimizer.state_bytes()

    def state(
        self, global_step: int = 0, contents: Sequence[str] = ("model", "optimizer", "extra"), copied: bool = True
    ) -> RankState:
        """Collect this rank's part of a checkpoint; see :mod:`verl.checkpoint.boxes`."""
        numbers = {"weight_version": self.weight_version, "global_step": global_step}
        with self._awake(optimizer=True):
            states = self._state().states(contents, numbers, copied)
            has_weights, skeleton = "hf_model" in contents, self.model.skeleton
            is_without = self.model_type == "language_model" and not self.model.heads.count
            heads = untrained_heads(self.model_config.path, skeleton.hf.config) if has_weights and is_without else ()
            export = None
            if has_weights and copied:
                export = WeightFiles.collect(self.get_per_tensor_param(), skeleton, stored=heads)
            adapters = None
            if self.has_adapters and "model" in contents:
                adapters = weights_on_first_rank(self._gathered(self.checkpointed))

        def describe(folder: Path) -> None:
            if export is not None:
                export.write(folder / "huggingface")
            if dist.get_rank():
                return
            write_layout(folder, dist.get_world_size(), vars(self.layout))
            write_model_folder(self.model_config, skeleton, has_weights, folder / "huggingface")
            if adapters is not None:
                write_adapters(skeleton.hf, skeleton.head_name, adapters, folder / ADAPTER_FOLDER)
                copy_companions(folder / "huggingface", folder / ADAPTER_FOLDER)

        def write_weights(folder: Path) -> None:
            with self._awake(optimizer=False):
                write_in_turn(self.get_per_tensor_param(), skeleton, folder / "huggingface", stored=heads)

        return RankState(states, describe, write_weights if has_weights and not copied else None)

    def load_state(self, states: Mapping[str, State]) -> None:
        """Restore what :meth:`state` returned; see :class:`BaseEngine`."""
        with self._awake(optimizer=True):
            self._restore_version(self._state().restore(states))

    def load_checkpoint(self, local_path: str, contents: Sequence[str] = ("model", "optimizer", "extra")) -> None:
        """Restore from a checkpoint folder; see :class:`BaseEngine`."""
        folder = Path(local_path).expanduser()
        if self.has_adapters and "model" in contents:
            check_same_scale(self.model.skeleton.hf, folder / ADAPTER_FOLDER)
        with self._awake(optimizer=True):
            self._restore_version(self._state().load(folder, contents))

    def _restore_version(self, numbers: State) -> None:
        self.weight_version = int(numbers.get("weight_version", self.weight_version))


@EngineRegistry.register("language_model", "megatron")
class MegatronLanguageModelEngine(MegatronEngine):
    """Engine of a causal language model; see :func:`~verl.workers.engine.model.outputs.language_outputs`."""

    @torch.no_grad()
    def output_matrix(self) -> OutputMatrix:
        """See :meth:`BaseEngine.output_matrix`. It has rows on the last pipeline stage only, where it is used."""
        use(self.layout)
        config, dtype = self.model.text_config, torch_dtype(self.engine_config.dtype)
        weight = torch.empty(0, config.hidden_size, dtype=dtype, device=self.device)
        if self.model.last.post_process:
            part = self.model.head_weight().detach().to(dtype).contiguous()
            group = parallel_state.get_tensor_model_parallel_group()
            parts = [torch.empty_like(part) for _ in range(dist.get_world_size(group))]
            dist.all_gather(parts, part, group=group)
            weight = torch.cat(parts)[: config.vocab_size]
        return OutputMatrix(weight=weight, bias=None, rule=LogitRule())


@EngineRegistry.register("value_model", "megatron")
class MegatronValueModelEngine(MegatronEngine):
    """Engine of a value model: ``values`` of the state before each response token."""

    model_type = "value_model"
    output_names = frozenset({"values"})


@EngineRegistry.register("reward_model", "megatron")
class MegatronRewardModelEngine(MegatronEngine):
    """Engine of a discriminative reward model: ``scores``, the head's output at each response token itself."""

    model_type = "reward_model"
    output_names = frozenset({"scores"})
