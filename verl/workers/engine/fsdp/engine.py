"""The FSDP2 implementation of ``BaseEngine`` for language, value and reward models: its passes and its optimizer."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from verl.base.device_copies import to_device
from verl.config import FSDPOptimizerConfig
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.model import longrope_threshold
from verl.utils.sharded_tensor import full_tensor, local_rows
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.activations import activations_on_cpu
from verl.workers.engine.fsdp.experts import ExpertLoad, balance_loss, load_metrics
from verl.workers.engine.fsdp.packing_check import shared_prompt_difference
from verl.workers.engine.fsdp.sharded_model import ShardedModel
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
from verl.workers.engine.model.divergence import OutputMatrix
from verl.workers.engine.model.head import NO_TOP, TopTokens
from verl.workers.engine.model.images import has_images
from verl.workers.engine.model.inputs import ModelInputs, check_one_rotation, check_token_ids, prepare_inputs
from verl.workers.engine.model.outputs import LANGUAGE_OUTPUTS, empty_columns, without_hidden
from verl.workers.engine.non_finite import LossWatch, in_gradients
from verl.workers.engine.optimizer import clip_gradients
from verl.workers.engine.passes import (
    MicroBatch,
    MicroBatchConfig,
    PassAttempt,
    PassSizes,
    largest_of_ranks,
    split_micro_batches,
)
from verl.workers.routers import ROUTING, Choices, unknown

logger = logging.getLogger(__name__)


class FSDPEngine(ShardedModel):
    """One model under FSDP2; arguments as of :class:`ShardedModel`."""

    output_names = LANGUAGE_OUTPUTS | {ROUTING}

    def initialize(self) -> None:
        """Build and shard the model, and make the optimizer; see :class:`BaseEngine`."""
        super().initialize()
        self.pass_sizes = PassSizes()
        self._runs_tower = False

    def check_shared_prompts(self, key: str) -> None:
        """See :meth:`BaseEngine.check_shared_prompts`."""
        name, text = type(self.model.hf).__name__, None
        if not self.is_packed:
            text = f"{name} runs padded"
        elif self.model.vision is not None:
            text = f"{name} is a model with images"
        elif self.balance_weight:
            text = "the load of experts is balanced over all tokens (router_aux_loss_coef)"
        elif difference := shared_prompt_difference(self.model, self.device, self.compute_dtype, self.sequence_group):
            text = f"results of {name} change by {difference:.2g} if responses share their prompt"
        self._reshard()
        if text is not None:
            raise ConfigError(f"{key}=true: {text}. Set it false for this model.")

    # ---- computing ----------------------------------------------------------------------------

    def _set_runs_tower(self, batch: DataProto) -> None:
        """Run the vision tower in all passes of a batch if any rank has an image in it. Collective with a tower."""
        # Every rank must run the same collectives, and FSDP gathers the tower's weights by some.
        if self.model.vision is not None:
            self._runs_tower = bool(largest_of_ranks(int(has_images(batch)), self.device))

    def _inputs(self, part: MicroBatch) -> ModelInputs:
        data = part.data
        check_token_ids(data, self.model.hf.config.get_text_config().vocab_size)
        check_one_rotation(data, longrope_threshold(self.model.hf.config))
        at_token = self.model_type == "reward_model"
        vision = self.model.vision
        group, tower = self.sequence_group, self._runs_tower
        shares = part.shares_prompts
        return prepare_inputs(data, self.is_packed, self.device, at_token, group, vision, tower, shares)

    @torch.no_grad()
    def infer_batch(
        self, batch: DataProto, outputs: set[str], micro: MicroBatchConfig, temperature: float = 1.0, topk: int = 0
    ) -> dict[str, Tensor]:
        """Compute output columns without gradients; see :class:`BaseEngine`."""
        self._check_request(outputs, temperature, topk, self.model.head.out_features)
        if micro.shares_prompts and ROUTING in outputs:
            raise ConfigError(
                "actor.use_prefix_grouper=true: the experts of a shared prompt are not recorded for each row. Set "
                "actor.router_replay.mode=disabled, or use_prefix_grouper=false."
            )
        shape, top = batch.batch["response_mask"].shape, TopTokens(topk, self.ids_below)
        micro = micro.shared_by(self.sequence_ranks)
        self._set_runs_tower(batch)
        columns: dict[str, Tensor] = {}
        with self.backend.frozen_weights():
            for attempt in self._attempts("infer"):
                with attempt as limit:
                    # On the device, so that no pass waits for the one before to be copied.
                    size = self.model.head.in_features
                    columns = empty_columns(shape, outputs - {ROUTING}, topk, size, self.compute_dtype, self.device)
                    for part in self.pass_sizes.watched(split_micro_batches(batch, micro, self.device, limit=limit)):
                        self._infer(part, columns, temperature, top, len(batch) if ROUTING in outputs else None)
        self._reshard()
        return {name: values.cpu() for name, values in columns.items()}

    def _infer(
        self,
        part: MicroBatch,
        columns: dict[str, Tensor],
        temperature: float,
        top: TopTokens = NO_TOP,
        bsz: int | None = None,
    ) -> None:
        """Fill the rows of one micro-batch in ``columns``; add routing for a batch of ``bsz`` rows if that is given."""
        # A function of its own, so that the tensors of this pass are freed before the next one.
        inputs = self._inputs(part)
        with self._routing(inputs) as choices:
            flat = self.model(inputs, frozenset(columns.keys() - {ROUTING}), temperature, top, self.divergence)
        if part.is_filler:
            return
        for name, values in flat.items():
            column = columns[name]
            rows = to_device(torch.tensor(part.rows), column.device)
            column.index_copy_(0, rows, inputs.scatter(values).to(column))
        if bsz is None:
            return
        experts = inputs.joined_expert_ids(choices.stacked(self.model.hf)).cpu()
        mask = part.data.batch["attention_mask"].bool().cpu()
        if ROUTING not in columns:
            free = unknown(experts.dtype)
            columns[ROUTING] = torch.full((bsz, mask.shape[1], *experts.shape[1:]), free, dtype=experts.dtype)
        rows = torch.full((*mask.shape, *experts.shape[1:]), unknown(experts.dtype), dtype=experts.dtype)
        rows[mask] = experts
        columns[ROUTING][part.rows] = rows

    @contextmanager
    def _routing(self, inputs: ModelInputs) -> Iterator[Choices]:
        """Watch the routers in a pass without gradients, and replay the choices of its ``routed_experts``."""
        with self.routers.replayed(inputs.routed_experts), self.routers.watched(inputs.real) as choices:
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
        totals = BatchTotals.from_batch(batch, self.get_data_parallel_size(), self.device, group)
        self._set_runs_tower(batch)

        metrics, watch, load = MetricSum(totals), LossWatch(self.get_data_parallel_rank()), ExpertLoad()
        with self.backend.frozen_weights():
            for attempt in self._attempts("train"):
                with attempt as limit:
                    # Anew in each attempt: the passes before one that ran out of memory have added theirs.
                    metrics, watch = MetricSum(totals), LossWatch(self.get_data_parallel_rank())
                    parts = [*split_micro_batches(batch, micro, self.device, loss_fn.rows_per_unit, limit)]
                    counts = self._expert_counts(parts) if self.balance_weight and len(parts) > 1 else None
                    load = ExpertLoad()
                    for part in self.pass_sizes.watched(parts):
                        self._sum_gradients_after(part is parts[-1])
                        columns, loss, part_metrics = self._forward_backward(
                            part, loss_fn, totals, temperature, load, counts
                        )
                        watch.add(part.rows, without_hidden(part.data), columns, loss, part_metrics)
                        if not part.is_filler:
                            metrics.add(part_metrics, part.num_tokens)
        reduced, self.non_finite = metrics.reduce(watch.problems(), group)
        if self.model_type != "language_model":  # a critic's metrics would have the names of the actor's
            return reduced
        counts = self._total(load)
        self.expert_counts = counts if counts.numel() else None
        return reduced | load_metrics(counts)

    def _sum_gradients_after(self, is_last: bool) -> None:
        """Choose whether the next backward pass sums gradients over the ranks; the last of a mini-batch always does."""
        if isinstance(self.model, FSDPModule):
            is_deferred = self.engine_config.use_no_sync_for_gradient_accumulation and not is_last
            self.model.set_requires_gradient_sync(not is_deferred)

    def _total(self, load: ExpertLoad) -> Tensor:
        """Sum the load over all ranks. Collective."""
        shared = [] if self.sequence_group is None else [self.sequence_group]
        return load.total(self.get_data_parallel_group(), *shared)

    @torch.no_grad()
    def _expert_counts(self, parts: Sequence[MicroBatch]) -> Tensor:
        """Count the tokens of each expert in all passes of all ranks, (layers, experts), by passes without gradients.

        The balance loss needs them before the first pass with gradients.
        """
        load = ExpertLoad()
        for part in self.pass_sizes.watched(parts):
            inputs = self._inputs(part)
            with self._routing(inputs) as choices:
                self.model(inputs, frozenset({"hidden"}), 1.0)
            if not part.is_filler:
                load.add(choices)
        self._reshard()
        return self._total(load)

    def _attempts(self, kind: str) -> Iterator[PassAttempt]:
        weights = [weight for weight in self.model.parameters() if weight.requires_grad]
        is_fresh = kind == "infer" or all(weight.grad is None for weight in weights)

        def clear() -> None:
            for weight in weights:
                weight.grad = None

        # FSDP cannot undo a pass that broke off, neither here nor on ranks that wait in its collectives.
        is_alone = is_fresh and not isinstance(self.model, FSDPModule)
        return self.pass_sizes.attempts(kind, self.device, is_alone, clear)

    def _forward_backward(
        self,
        part: MicroBatch,
        loss_fn: LossFunction,
        totals: BatchTotals,
        temperature: float,
        load: ExpertLoad,
        counts: Tensor | None,
    ) -> tuple[dict[str, Tensor], Tensor, LossMetrics]:
        data, inputs = without_hidden(part.data), self._inputs(part)
        with self.routers.replayed(inputs.routed_experts):
            offload = activations_on_cpu() if self.model_config.enable_activation_offload else nullcontext()
            with offload, self.routers.watched(inputs.real) as choices:
                flat = self.model(inputs, loss_fn.outputs, temperature, divergence=self.divergence)
            if not part.is_filler:
                load.add(choices)
            columns = {name: inputs.scatter(values) for name, values in flat.items()}
            loss, metrics = loss_fn(columns, data.to(self.device), totals)
            if self.balance_weight:
                counts = self._total(load) if counts is None else counts
                if not part.is_filler:
                    balance = self._balance(choices, counts)
                    # Each rank that shares the sequences adds the part of its own tokens, and gradients are means over
                    # all ranks.
                    loss = loss + self.balance_weight * totals.dp_size * self.sequence_ranks * balance
                    if self.model_type == "language_model":
                        sequence_balance = balance.detach().clone()
                        if self.sequence_group is not None:
                            dist.all_reduce(sequence_balance, group=self.sequence_group)
                        metrics = {**metrics, "moe/aux_loss": PartialSum(sequence_balance)}
            if not loss.requires_grad:  # every rank must run the same backward collectives
                loss = loss + 0.0 * torch.stack([column.sum() for column in columns.values()]).sum()
            (loss if self.loss_scale is None else loss * self.loss_scale.value).backward()
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
        scale = 1 if self.loss_scale is None else self.loss_scale.value
        grad_norm = clip_gradients(self.model.parameters(), config.clip_grad, scale)
        if not math.isfinite(grad_norm):
            trained = ((name, p.grad) for name, p in self.model.named_parameters() if p.grad is not None)
            gradients = ((name, local_rows(grad)[0]) for name, grad in trained)
            self.non_finite = gathered(in_gradients(gradients, dist.get_rank()))
            optimizer.zero_grad(set_to_none=True)
            if self.loss_scale is not None:
                self.loss_scale.overflowed()
            return grad_norm
        optimizer.step()
        if self.loss_scale is not None:
            self.loss_scale.updated()
        self.weight_version += 1
        return grad_norm

    def lr_scheduler_step(self) -> float:
        """Advance the schedule; see :class:`BaseEngine`."""
        _, scheduler, _ = self._trained()
        lr = float(scheduler.get_last_lr()[0])  # that of the steps just taken
        scheduler.step()
        return lr


@EngineRegistry.register("language_model", ("fsdp", "fsdp2"))
class FSDPLanguageModelEngine(FSDPEngine):
    """Engine of a causal language model; see :func:`~verl.workers.engine.model.outputs.language_outputs`."""

    @torch.no_grad()
    def output_matrix(self) -> OutputMatrix:
        """See :meth:`BaseEngine.output_matrix`."""
        self._reshard()
        head = self.model.head

        def gather(parameter: Tensor) -> Tensor:
            full = full_tensor(parameter, self.device, self.compute_dtype).to(self.device, self.compute_dtype)
            is_shared = full.untyped_storage().data_ptr() == local_rows(parameter)[0].untyped_storage().data_ptr()
            return full.clone() if is_shared and parameter.requires_grad else full

        bias = None if head.bias is None else gather(head.bias)
        return OutputMatrix(weight=gather(head.weight), bias=bias, rule=self.model.rule)


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
