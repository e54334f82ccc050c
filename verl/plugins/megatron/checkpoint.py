"""Checkpoints of a Megatron model: boxes of weights and moments under Transformers names.

The files are those of :mod:`verl.checkpoint.boxes`. The weights in a checkpoint are the optimizer's fp32 copies.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from torch.optim.lr_scheduler import LambdaLR

from verl.checkpoint.boxes import Boxes, StoredBox, boxes_state, saved_ranks
from verl.checkpoint.ranks import on_all_ranks
from verl.checkpoint.shards import (
    KINDS,
    check_kind,
    copied_to_cpu,
    extra_of,
    kind_of,
    load_extra,
    read_state,
    shard_file,
)
from verl.errors import CheckpointError
from verl.plugins.megatron.optimizer import MegatronOptimizer
from verl.plugins.megatron.weights import ShardRegion, WeightGatherer

if TYPE_CHECKING:
    from verl.checkpoint.states import State

Cut = Callable[[str, ShardRegion], Tensor]
"""Returns the box of a region out of the tensor of that name."""


@dataclass(frozen=True)
class MegatronState:
    """Weights, optimizer and schedule of this rank, to be saved and restored."""

    weights: WeightGatherer
    regions: Sequence[ShardRegion]
    parameters: Mapping[str, Tensor]
    """Parameters by their name in megatron-core."""
    optimizer: MegatronOptimizer | None
    """None for a frozen model."""
    scheduler: LambdaLR | None
    frozen: frozenset[str]
    """Names of the weights that the optimizer does not have."""

    # ---- out of the model -----------------------------------------------------------------------

    def states(self, contents: Sequence[str], numbers: Mapping[str, int], copied: bool) -> dict[str, dict[str, object]]:
        """Collect the contents of this rank's files, by file name. Collective; see :class:`TrainingState`."""
        states: dict[str, dict[str, object]] = {}
        kinds: dict[str, dict[str, Tensor]] = {"main": dict(self.parameters)}
        other: dict[str, object] = {}
        if self.optimizer is not None and {"model", "optimizer"} & set(contents):
            kinds, other = self.optimizer.state()
            kinds["main"] = {**self.parameters, **kinds["main"]}
        if "model" in contents:
            states["model"] = boxes_state(self._boxes({"": kinds["main"]}), copied)
        if "optimizer" in contents and self.optimizer is not None:
            moments = {f"/{kind}": tensors for kind, tensors in kinds.items() if kind != "main"}
            states["optim"] = boxes_state(self._boxes(moments), copied)
            states["optim"] |= {"other": copied_to_cpu(other), "optimizer": kind_of(self.optimizer.torch)}
        if "extra" in contents:
            states["extra_state"] = extra_of(self.scheduler, numbers)
        return {shard_file(kind, dist.get_world_size(), dist.get_rank()): state for kind, state in states.items()}

    def _boxes(self, kinds: Mapping[str, Mapping[str, Tensor]]) -> list[StoredBox]:
        """The boxes that this rank owns, in tensors of the shapes of the parameters, by ending of their name."""
        return [
            StoredBox(weight.name + ending, self.weights.shapes[weight.name], weight.start, weight.read(tensor))
            for ending, tensors in kinds.items()
            for weight in self.weights.owned()
            if (tensor := tensors.get(weight.parameter)) is not None
        ]

    # ---- back into it ---------------------------------------------------------------------------

    def load(self, folder: Path, contents: Sequence[str]) -> State:
        """Load ``contents`` from disk, whatever layout wrote them. Collective; see :class:`TrainingState`."""
        kinds: dict[str, dict[str, Tensor]] = {}
        other: State = {}
        extra: State = {}
        with on_all_ranks(f"resume from {folder}"):
            if "model" in contents:
                model = Boxes.read(folder, "model")
                model.check(self.weights.shapes)
                kinds["main"] = self._fill_regions(lambda weight: model.cut(weight.name, *weight.box), frozenset())
            if "optimizer" in contents and self.optimizer is not None:
                moments = Boxes.read(folder, "optim")
                other = self._check_moments(moments, self.optimizer)
                for kind in _moments_of(moments):
                    kinds[kind] = self._fill_regions(
                        lambda weight, kind=kind: moments.cut(f"{weight.name}/{kind}", *weight.box),
                        self._without(kind, self.optimizer),
                    )
            if "extra" in contents:
                ranks, rank = saved_ranks(folder), dist.get_rank()
                extra = read_state(folder / shard_file("extra_state", ranks, min(rank, ranks - 1)))
        self._put(kinds, other)
        if extra:
            load_extra(self.scheduler, extra, has_own_rng=dist.get_rank() < saved_ranks(folder))
        return extra

    def restore(self, states: Mapping[str, State]) -> State:
        """Restore :meth:`states` on the same rank of the same layout. Collective; see :class:`TrainingState`."""
        rank, ranks = dist.get_rank(), dist.get_world_size()
        files = {kind: shard_file(kind, ranks, rank) for kind in KINDS}
        if unknown := states.keys() - set(files.values()):
            raise CheckpointError(
                f"rank {rank} of {ranks} cannot load the state {', '.join(sorted(unknown))}: a snapshot in memory "
                "can only be loaded by the same rank of the same number of ranks. For another number of ranks, "
                "resume from a checkpoint on disk."
            )
        tensors = {kind: states[file] for kind, file in files.items() if file in states}
        kinds: dict[str, dict[str, Tensor]] = {}
        other: State = {}
        if "model" in tensors:
            kinds["main"] = self._gather(Boxes([tensors["model"]], "in memory"), "", frozenset())
        if "optim" in tensors and self.optimizer is not None:
            moments = Boxes([tensors["optim"]], "in memory")
            other = self._check_moments(moments, self.optimizer)
            names: list[set[str]] = [set()] * ranks
            dist.all_gather_object(names, _moments_of(moments))  # a rank may own no box, and so know no kind
            for kind in sorted(set().union(*names)):
                kinds[kind] = self._gather(moments, f"/{kind}", self._without(kind, self.optimizer))
        self._put(kinds, other)
        extra = tensors.get("extra_state", {})
        if extra:
            load_extra(self.scheduler, extra, has_own_rng=True)
        return extra

    def _without(self, kind: str, optimizer: MegatronOptimizer) -> Set[str]:
        """Names of the weights that have no moment of a kind."""
        return self.frozen | {name for name in self.weights.shapes if optimizer.lacks(kind, name)}

    def _gather(self, boxes: Boxes, ending: str, without: Set[str]) -> dict[str, Tensor]:
        """Fill the parameters, but for weights ``without``, from the boxes that all ranks stored. Collective."""
        mine: dict[str, list[ShardRegion]] = {}
        for weight in self.regions:
            mine.setdefault(weight.name, []).append(weight)
        tensors = {name: torch.empty_like(p, dtype=torch.float32) for name, p in self.parameters.items()}
        device = next(iter(self.parameters.values())).device

        def stored(weight: ShardRegion) -> Tensor:
            return boxes.cut(weight.name + ending, *weight.box)

        for name, full in self.weights.gather(stored, torch.float32, device, without):
            for weight in mine.get(name, []):
                part = tuple(slice(a, a + n) for a, n in zip(weight.start, weight.size, strict=True))
                weight.write(tensors[weight.parameter], full[part])
        return tensors

    def _fill_regions(self, cut: Callable[[ShardRegion], Tensor], without: Set[str]) -> dict[str, Tensor]:
        tensors = {name: torch.zeros_like(p, dtype=torch.float32) for name, p in self.parameters.items()}
        for weight in self.regions:
            if weight.name not in without:
                weight.write(tensors[weight.parameter], cut(weight))
        return tensors

    @staticmethod
    def _check_moments(moments: Boxes, optimizer: MegatronOptimizer) -> State:
        state = moments.states[0]
        check_kind(optimizer.torch, state.get("optimizer"))
        return state.get("other", {})

    @torch.no_grad()
    def _put(self, kinds: dict[str, dict[str, Tensor]], other: Mapping[str, object]) -> None:
        has_optimizer = self.optimizer is not None
        if self.optimizer is not None:
            self.optimizer.load(kinds, other)
        for name, parameter in self.parameters.items() if "main" in kinds else ():
            if not (has_optimizer and parameter.requires_grad):
                parameter.copy_(kinds["main"][name])


def _moments_of(boxes: Boxes) -> set[str]:
    return {name.rsplit("/", 1)[1] for name in boxes.names()}
