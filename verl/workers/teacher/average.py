"""Earlier weights of a trained model, under which it can compute: those before training, or a moving average."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist

from verl.checkpoint.ranks import RankState
from verl.checkpoint.shards import TrainingState, write_world_size
from verl.checkpoint.states import State
from verl.utils.sharded_tensor import local_rows
from verl.workers.engine import BaseEngine

FOLDER = "self_teacher"
"""Folder of the average inside a checkpoint; its files are those of a model's shards."""


class AveragedWeights:
    """The exponential moving average of an engine's trained weights, in fp32 and sharded as they are.

        average ← decay · average + (1 - decay) · weights        after each step

    It starts at the weights that the engine has now; with ``decay`` 1 it stays there, with 0 it is the weights.

    Args:
        engine: with :meth:`~BaseEngine.trained_weights`.
        decay: share of the average that a step keeps.
    """

    def __init__(self, engine: BaseEngine, decay: float) -> None:
        self._engine, self._decay = engine, decay
        self._average = {
            name: weight.detach().to(torch.float32, copy=True) for name, weight in engine.trained_weights().items()
        }

    @torch.no_grad()
    def update(self) -> None:
        """Add the engine's weights to the average."""
        for _, weight, average in self._pairs():
            average.lerp_(weight.to(average), 1 - self._decay)

    @contextmanager
    def in_model(self) -> Iterator[None]:
        """Compute with the average inside the context; afterwards the engine's weights are back, bit for bit.

        Weights in fp32 change places with the average, so that nothing is copied but one weight at a time; of weights
        in another format a copy is kept. Inside the context the average must neither be updated nor saved.
        """
        exchanged, copies = set[str](), dict[str, torch.Tensor]()
        try:
            with torch.no_grad():
                for name, weight, average in self._pairs():
                    if weight.dtype == average.dtype:
                        _exchange(weight, average)
                        exchanged.add(name)
                    else:
                        copies[name] = weight.clone()
                        weight.copy_(average)
            yield
        finally:  # also of an error between two weights, such as too little memory for a copy
            with torch.no_grad():
                for name, weight, average in self._pairs():  # which frees gathered copies of the average
                    if name in exchanged:
                        _exchange(weight, average)
                    elif name in copies:
                        weight.copy_(copies.pop(name))

    def _pairs(self) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
        """Iterate over names, this rank's part of the engine's weights, and that of the average."""
        for name, weight in self._engine.trained_weights().items():
            yield name, local_rows(weight)[0], local_rows(self._average[name])[0]

    # ---- checkpoints --------------------------------------------------------------------------

    def added_to(self, state: RankState, copied: bool = True) -> RankState:
        """Add this rank's part of the average to the state of its engine."""
        files = self._as_state().states(["model"], {}, copied)

        def describe(folder: Path) -> None:
            if state.describe is not None:
                state.describe(folder)
            if dist.get_rank() == 0:
                (folder / FOLDER).mkdir()
                write_world_size(folder / FOLDER)

        states = state.states | {f"{FOLDER}/{name}": values for name, values in files.items()}
        return replace(state, states=states, describe=describe)

    def load(self, folder: Path) -> None:
        """Restore the average of a checkpoint, whatever number of ranks wrote it. Collective.

        Raises:
            CheckpointError: the checkpoint has none, or it is damaged or of another model.
        """
        self._as_state().load(folder / FOLDER, ["model"])

    def restore(self, states: Mapping[str, State]) -> None:
        """Restore the average among the ``states`` of :meth:`added_to`, on the same rank of as many ranks.

        Raises:
            CheckpointError: it is of another rank, another number of ranks, or another model.
        """
        self._as_state().restore(
            {name.removeprefix(f"{FOLDER}/"): state for name, state in states.items() if name.startswith(FOLDER)}
        )

    def nbytes(self) -> int:
        """The size of this rank's part."""
        return sum(local_rows(average)[0].nbytes for average in self._average.values())

    def _as_state(self) -> TrainingState:
        return TrainingState(self._average, {}, None, None)


def _exchange(first: torch.Tensor, second: torch.Tensor) -> None:
    held = first.clone()
    first.copy_(second)
    second.copy_(held)


def without_average(states: Mapping[str, State]) -> dict[str, State]:
    """The states of the engine alone, without the average's."""
    return {name: state for name, state in states.items() if not name.startswith(FOLDER)}
