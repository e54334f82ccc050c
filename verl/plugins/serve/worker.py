"""The worker of the service: a training engine with the adapters of all clients, and a rollout engine."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim import AdamW

from verl.base.types import JsonMapping
from verl.checkpoint.ranks import on_all_ranks
from verl.config import CheckpointConfig, FSDPOptimizerConfig, ServeConfig, local_copies
from verl.errors import CheckpointError, NonFiniteError
from verl.plugins.serve.adapters import (
    MOMENTS,
    SPEC_FILE,
    AdapterSpec,
    StoredAdapter,
    new_weights,
    read_adapter,
    write_adapter,
)
from verl.plugins.serve.losses import RowLosses, token_losses
from verl.protocol import DataProto
from verl.single_controller.base.decorator import Dispatch, make_nd_compute_dataproto_dispatch_fn, register
from verl.utils.device import get_device
from verl.utils.tokenizer import tokenizer_of
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.engine import MicroBatchConfig
from verl.workers.engine.fsdp.adapter_slots import NO_SLOT, SLOT, AdapterSlotsEngine
from verl.workers.engine.loss import gathered
from verl.workers.engine_worker import EngineWorker
from verl.workers.rollout.base import BaseRollout, get_rollout_class
from verl.workers.rollout.request import RolloutOutput, RolloutRequest


@dataclass(frozen=True, kw_only=True)
class AdamSettings:
    """Settings of one step of AdamW."""

    learning_rate: float = 1e-4
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-12
    weight_decay: float = 0.0
    """Decoupled."""
    grad_clip_norm: float = 0.0
    """Largest norm of the gradients; 0 does not clip."""


class SlotAdapter:
    """A client's adapter in a slot of the engine: this rank's part of weights, summed gradients and moments.

    Args:
        engine: whose slot it is.
        slot: index of the slot.
        stored: what it begins with.
    """

    def __init__(self, engine: AdapterSlotsEngine, slot: int, stored: StoredAdapter) -> None:
        self.engine, self.slot, self.spec = engine, slot, stored.spec
        parts = {n: p for n, p in engine.parts(slot, self.spec.rank).items() if self.spec.trains(n)}
        if parts.keys() != stored.weights.keys():
            absent = sorted(parts.keys() ^ stored.weights.keys())[0]
            raise CheckpointError(f"the adapter is of another base model: one of both has no {absent}.")
        for part in engine.parts(slot).values():  # also of layers that this client does not train, and rows beyond r
            part.values.zero_()
        self._rows = {name: part.rows for name, part in parts.items()}
        # Leaves over the engine's memory, which the optimizer changes in place.
        self._weights = {name: part.values.requires_grad_(False) for name, part in parts.items()}
        for name, weight in self._weights.items():
            weight.copy_(stored.weights[name][self._rows[name]])
        self._gradients = {
            name: gradient[self._rows[name]].to(engine.device, copy=True) for name, gradient in stored.gradients.items()
        }
        self.optimizer = AdamW([weight for weight in self._weights.values() if weight.numel()])
        if stored.moments is not None and stored.steps:
            for name, weight in self._weights.items():
                if weight.numel():
                    row_moments = {
                        m: stored.moments[name][m][self._rows[name]].to(weight.device, copy=True) for m in MOMENTS
                    }
                    self.optimizer.state[weight] = {"step": torch.tensor(float(stored.steps))} | row_moments
        self.steps = stored.steps
        engine.set_scale(slot, self.spec.scale)

    def add_gradients(self) -> None:
        """Add what the engine's last passes gave this slot to the gradients."""
        for name, part in self.engine.parts(self.slot, self.spec.rank, grad=True).items():
            if name not in self._weights:
                continue
            if name in self._gradients:
                self._gradients[name] += part.values
            else:
                self._gradients[name] = part.values.clone()

    def clear_gradients(self) -> None:
        """Drop the gradients."""
        self._gradients = {}

    @torch.no_grad()
    def step(self, settings: AdamSettings) -> dict[str, float]:
        """Make one step with the gradients since the last one, and clear them. Collective.

        Returns:
            the norm of the gradients before clipping.

        Raises:
            NonFiniteError: a gradient is not finite; weights and moments stay as they are.
        """
        gradients, self._gradients = self._gradients, {}
        squares = [gradient.square().sum() for gradient in gradients.values()]
        total = torch.stack(squares).sum() if squares else torch.zeros((), device=self.engine.device)
        if dist.get_world_size() > 1:
            dist.all_reduce(total)  # each rank has other rows
        norm = float(total.sqrt())
        if not math.isfinite(norm):
            raise NonFiniteError(
                "the gradients are not finite, so that no step was made; they were cleared. Lower the learning rate, "
                "or look for extreme advantages and weights in the data."
            )
        limit = settings.grad_clip_norm
        factor = limit / norm if 0 < limit < norm else 1.0
        for name, weight in self._weights.items():
            gradient = gradients.get(name)
            weight.grad = torch.zeros_like(weight) if gradient is None else gradient * factor
        for group in self.optimizer.param_groups:
            group |= {
                "lr": settings.learning_rate,
                "betas": (settings.beta1, settings.beta2),
                "eps": settings.eps,
                "weight_decay": settings.weight_decay,
            }
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.steps += 1
        return {"grad_norm:mean": norm}

    def stored(self, with_optimizer: bool, with_gradients: bool = False) -> StoredAdapter:
        """Gather the whole adapter on every rank. Collective."""
        gather = self.engine.whole
        weights = gather(self._weights)
        if not with_optimizer:
            return StoredAdapter(self.spec, weights)
        by_moment = {m: {n: self.optimizer.state[w].get(m, w * 0) for n, w in self._weights.items()} for m in MOMENTS}
        joined = {m: gather(by_moment[m]) for m in MOMENTS}
        moments = {name: {m: joined[m][name] for m in MOMENTS} for name in weights}
        return StoredAdapter(self.spec, weights, moments, self.steps, gather(self._gradients) if with_gradients else {})


class AdapterWorker(EngineWorker):
    """Worker that trains the adapters of several clients over one base, and samples with any of them.

    Args:
        config: the configuration of the service.
        device_name: see :class:`EngineWorker`.
    """

    def __init__(self, config: ServeConfig, device_name: str | None = None) -> None:
        super().__init__(CheckpointConfig(), device_name)
        self.config = local_copies(config)
        self.micro = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=config.server.max_tokens_per_pass)
        self.adapters: dict[int, SlotAdapter] = {}

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        """Load the base model and start the rollout engine."""
        config = self.config
        self.engine = self.make_engine(
            "adapter_slots", config.engine.strategy, config.trained_model, config.engine, FSDPOptimizerConfig()
        )
        self.slots = cast(AdapterSlotsEngine, self.engine)
        self.scratch = config.server.max_models
        """The slot for saved weights whose prompts are scored."""
        self.slots.divide_adapters(self.scratch + 1)
        self.join_mesh("train", self.slots)
        tokenizer = tokenizer_of(config.model)
        rollout = config.full_rollout
        self.rollout: BaseRollout = get_rollout_class(rollout.name)(
            rollout, config.sampled_model, tokenizer, get_device(self.device_name)
        )
        self._versions: dict[tuple[str, int] | None, int] = {}  # of weights to sample with, by folder and time

    # ---- adapters of clients

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def create_adapter(self, slot: int, spec: AdapterSpec) -> None:
        """Put a new adapter into a slot, in place of what it has."""
        shapes = {name: shape for name, shape in self.slots.shapes(spec.rank).items() if spec.trains(name)}
        self.adapters[slot] = SlotAdapter(self.slots, slot, StoredAdapter(spec, new_weights(shapes, spec)))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_adapter(self, slot: int, folder: str, with_optimizer: bool) -> None:
        """Put a saved adapter into a slot, in place of what it has.

        Raises:
            CheckpointError: it cannot be read, or is of another model; the slot then keeps what it has.
        """
        self.adapters[slot] = SlotAdapter(self.slots, slot, read_adapter(Path(folder), with_optimizer))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def save_adapter(self, slot: int, folder: str, with_optimizer: bool, notes: JsonMapping) -> None:
        """Write the adapter in a slot to a folder, which appears complete or not at all.

        Raises:
            CheckpointError: it could not be written.
        """
        self._write(self.adapters[slot].stored(with_optimizer), folder, notes)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def move_adapter_out(self, slot: int, folder: str) -> None:
        """Move the adapter in a slot, with its gradients, to a folder; :meth:`load_adapter` brings it back."""
        self._write(self.adapters.pop(slot).stored(with_optimizer=True, with_gradients=True), folder, {})

    def _write(self, adapter: StoredAdapter, folder: str, notes: JsonMapping) -> None:
        with on_all_ranks(f"write {folder}"):
            if dist.get_rank() == 0:
                write_adapter(adapter, Path(folder), notes)

    # ---- training

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def forward_backward(self, data: DataProto) -> DataProto:
        """Add the gradients of all rows, each under the adapter of its slot, to those of these adapters.

        Returns:
            ``log_probs`` (rows, length) and ``losses`` (rows,); ``meta_info["finite"]`` tells whether gradients were
            added: if anything is not finite, they are dropped for all.
        """
        engine, losses = self.slots, RowLosses()
        with engine.train_mode():
            engine.optimizer_zero_grad()
            engine.forward_backward_batch(data, losses, self.micro)
            # Every rank has a part of each adapter, also of those that none of its own rows has.
            slots = set(gathered(data.batch[SLOT].unique().tolist())) - {NO_SLOT}
            # An infinite gradient of one adapter's tokens makes those of B not finite for all: 0 · ∞ in their product.
            parts = [part.values for slot in slots for part in engine.parts(slot, grad=True).values()]
            is_mine_finite = not parts or bool(torch.stack([part.isfinite().all() for part in parts]).all())
            is_finite = not engine.non_finite and all(gathered([is_mine_finite]))
            for slot in sorted(slots) if is_finite else ():
                self.adapters[slot].add_gradients()
            engine.optimizer_zero_grad()
        shape, rows = data.batch["response_mask"].shape, data.batch["row_index"].tolist()
        blank = torch.zeros(shape[1])
        log_probs = torch.stack([losses.log_probs.get(row, blank).cpu() for row in rows])
        row_losses = torch.stack([losses.losses.get(row, torch.zeros(())).cpu() for row in rows])
        columns = {"log_probs": log_probs.float(), "losses": row_losses.float()}
        return DataProto.from_dict(tensors=columns, meta_info={"finite": is_finite})

    @register(dispatch_mode=make_nd_compute_dataproto_dispatch_fn(mesh_name="train"))
    def forward(self, data: DataProto) -> DataProto:
        """Compute ``log_probs`` and ``losses`` as :meth:`forward_backward` does, without gradients."""
        with self.slots.eval_mode():
            log_probs = self.slots.infer_batch(data, {"log_probs"}, self.micro)["log_probs"]
        losses = token_losses(log_probs, data).sum(-1)
        return DataProto.from_dict(tensors={"log_probs": log_probs, "losses": losses}, meta_info={"finite": True})

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def optim_step(self, slot: int, settings: AdamSettings) -> dict[str, float]:
        """Make one step of the adapter in a slot; see :meth:`SlotAdapter.step`."""
        return self.adapters[slot].step(settings)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def clear_gradients(self, slot: int) -> None:
        """Drop the gradients of the adapter in a slot."""
        self.adapters[slot].clear_gradients()

    # ---- sampling

    @register(dispatch_mode=Dispatch.ALL_TO_ALL)
    def sample(self, requests: list[RolloutRequest], folder: str | None) -> list[RolloutOutput]:
        """Answer this rank's requests with the saved adapter in ``folder``; None: with the base model."""
        # A name may be saved again with other weights.
        saved = None if folder is None else (folder, (Path(folder) / SPEC_FILE).stat().st_mtime_ns)
        version = self._versions.setdefault(saved, len(self._versions))
        with self.slots.eval_mode():
            weights = self._weights_of(folder)
            is_apart = self.rollout.applies_adapters and folder is not None
            with self.rollout.awake(weights if is_apart else partial(_merged, weights), version) as rollout:
                return rollout.generate(requests)

    def _weights_of(self, folder: str | None) -> AdaptedWeights:
        base = self.slots.adapted_weights().base
        if folder is None:
            return AdaptedWeights(base, dict[str, Tensor]().items, {})
        stored = read_adapter(Path(folder))
        layers = {name.rpartition(".lora_")[0] for name in stored.weights}
        return AdaptedWeights(base, stored.weights.items, dict.fromkeys(sorted(layers), stored.spec.scale))

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def load_for_scoring(self, folder: str) -> int:
        """Put a saved adapter into the slot for scoring, and return the slot."""
        SlotAdapter(self.slots, self.scratch, read_adapter(Path(folder)))
        return self.scratch


def _merged(weights: AdaptedWeights) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the weights of the model, W + s B A where a layer has an adapter."""
    adapters: Mapping[str, Tensor] = dict(weights.adapters())
    for name, tensor in weights.base():
        layer = name.removesuffix(".weight")
        if layer not in weights.scales:
            yield name, tensor
            continue
        down, up = (adapters[f"{layer}.lora_{part}.weight"].to(tensor.device) for part in "AB")
        yield name, torch.addmm(tensor.float(), up, down, alpha=weights.scales[layer]).to(tensor.dtype)
