"""Engines in processes of their own, which may be lost: started again, given the weights again, asked again.

Inside of :meth:`RestartingRollout.awake` the loss of an engine changes no response: each has its own seed, the weights
come from the trainer again and are verified as ever, and only what was not answered is asked again. On several ranks
the weights are gathered by all ranks together, so the ranks agree after each part of the work whether one of them has
lost its engine. That costs one exchange of small numbers, after generation and before weights are loaded.
"""

from __future__ import annotations

import datetime
import logging
import time
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import IntEnum
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Self

import torch
import torch.distributed as dist
from torch import Tensor

from verl.errors import EngineLostError, ProcessLostError, RolloutError
from verl.workers.rollout.base import NO_WEIGHTS, BaseRollout, RolloutOutput, RolloutRequest

if TYPE_CHECKING:
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)

MAX_RESTARTS = 3
"""Restarts of an engine without a finished ``generate`` between them."""
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0
"""Before a restart; each further one waits twice as long."""
_AGREEMENT_S = 6 * 3600.0
"""How long a rank may wait for the others: they may generate, and restart an engine. What hangs is found elsewhere."""


class _State(IntEnum):
    DONE = 0
    AGAIN = 1
    """The engine was lost; there is another one, without weights."""
    FAILED = 2
    LOST = 3
    """The engine was lost, for good."""


class RestartingRollout(BaseRollout):
    """What engines share that are other processes; arguments as for :class:`BaseRollout`.

    An engine implements ``_start_engine``, ``_end_engine`` and ``_answer``, and what :class:`BaseRollout` leaves
    open but ``generate``. All of them, but for ``_end_engine`` and ``sleep``, may raise
    :class:`~verl.errors.EngineLostError`.
    """

    def set_up(self) -> None:
        """See :meth:`BaseRollout.set_up`."""
        self.restarts = 0
        """How often an engine was started in place of a lost one."""
        self._losses: list[str] = []
        """Since the last ``generate`` that came to its end."""
        self._source: tuple[Callable[[], Iterable[tuple[str, Tensor]]], int] | None = None
        self._everyone: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            patience = datetime.timedelta(seconds=_AGREEMENT_S)
            group = dist.new_group(backend="gloo", timeout=patience)
            assert isinstance(group, dist.ProcessGroup)
            self._everyone = group

    @abstractmethod
    def _start_engine(self) -> None:
        """Start an engine, asleep and without weights; on a rank that leads, where none runs."""

    @abstractmethod
    def _end_engine(self) -> Path | None:
        """End all processes of the engine at once, dead or alive; a copy of its log if there is one. Idempotent."""

    @abstractmethod
    def _answer(
        self, requests: Mapping[int, RolloutRequest], outputs: dict[int, RolloutOutput], aborted: Event
    ) -> None:
        """Put the outputs of the requests into ``outputs``, also of those that a lost engine has answered."""

    # ---- weights

    @contextmanager
    def awake(self, weights: Callable[[], Iterable[tuple[str, Tensor]]], version: int) -> Iterator[Self]:
        """See :meth:`BaseRollout.awake`; ``weights`` is called again when an engine was lost.

        Raises:
            ProcessLostError: more than ``MAX_RESTARTS`` engines were lost without a finished ``generate``.
        """
        self._source = weights, version
        try:
            self._make_ready()
            yield self
        finally:
            self._source = None
            self.sleep()

    def _make_ready(self) -> None:
        """Awake, with the weights, on all ranks."""
        assert self._source is not None
        weights, version = self._source
        ready = False
        while not ready:
            ready = self._together(self.wake)
            lacks_weights = self.weight_version != version
            if ready and self._any_rank(lacks_weights):
                ready = self._together(lambda lacks=lacks_weights: self._load(weights(), version, lacks))

    def _load(self, weights: Iterable[tuple[str, Tensor]], version: int, lacks_weights: bool) -> None:
        if lacks_weights:
            self.load_weights(weights, version)
        else:  # another rank lacks them, and gathering them is everyone's work
            for _ in weights:
                pass

    # ---- generation

    def generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        """See :meth:`BaseRollout.generate`. Inside of :meth:`awake` the ranks call it together."""
        if not self.leads:
            raise RolloutError("this rank shares an engine with others and does not lead: the first of them generates.")
        return self._generate(requests)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """See :meth:`BaseRollout.generate_sequences`."""
        if self.leads:
            return super().generate_sequences(prompts)
        from verl.protocol import DataProto

        self._generate([])
        return DataProto()

    def _generate(self, requests: list[RolloutRequest]) -> list[RolloutOutput]:
        outputs: dict[int, RolloutOutput] = {}
        with self.until_aborted() as aborted:
            while not self._together(lambda: self._ask(requests, outputs, aborted)):
                self._make_ready()
        self._losses.clear()
        return [outputs[number] for number in range(len(requests))]

    def _ask(self, requests: list[RolloutRequest], outputs: dict[int, RolloutOutput], aborted: Event) -> None:
        left = {number: request for number, request in enumerate(requests) if number not in outputs}
        if aborted.is_set():  # while the engine was restarted
            outputs |= dict.fromkeys(left, RolloutOutput([], [], "abort", self.weight_version))
        elif left:
            self._answer(left, outputs, aborted)

    # ---- restarts

    def _together(self, work: Callable[[], None]) -> bool:
        """Do a part of the work that all ranks do at the same time.

        Returns:
            whether all have done it; if not, some had to restart their engine, which has no weights.

        Raises:
            RolloutError: another rank failed, and says why itself.
            EngineLostError: an engine was lost for good.
        """
        try:
            state = self._attempt(work)
        except Exception as error:
            self._agree(_State.LOST if isinstance(error, ProcessLostError) else _State.FAILED)
            raise
        states = self._agree(state)
        worst = max(states)
        if worst >= _State.FAILED:
            kind = EngineLostError if worst is _State.LOST else RolloutError
            raise kind(f"the rollout of rank {states.index(worst)} failed, and this rank cannot go on alone.")
        return worst is _State.DONE

    def _attempt(self, work: Callable[[], None]) -> _State:
        try:
            work()
        except EngineLostError as error:
            if self._source is None:  # nobody could give the weights to another engine
                raise EngineLostError(self._end_lost(error)) from error
            self._replace(error)
            return _State.AGAIN
        return _State.DONE

    def _end_lost(self, error: RolloutError) -> str:
        """End what is left of a lost engine; the error, with the place of the engine's log."""
        self.weight_version = NO_WEIGHTS
        log = self._end_engine()
        return f"{error}{f' The whole log: {log}.' if log else ''}"

    def _start_or_replace(self) -> None:
        """Start an engine; also one that is killed while it starts is replaced.

        Raises:
            EngineLostError: too many were lost.
        """
        try:
            self._start_engine()
        except EngineLostError as error:
            self._replace(error)

    def _replace(self, error: RolloutError) -> None:
        """Start another engine in place of a lost one.

        Raises:
            EngineLostError: too many were lost.
        """
        while True:
            self._losses.append(self._end_lost(error))
            if len(self._losses) > MAX_RESTARTS:
                raise EngineLostError(self._given_up()) from error
            pause_s = min(FIRST_PAUSE_S * 2 ** (len(self._losses) - 1), LONGEST_PAUSE_S)
            logger.warning(
                "%s engine lost; restart %d of %d in %g s. %s",
                *(self.config.name, len(self._losses), MAX_RESTARTS, pause_s, self._losses[-1]),
            )
            time.sleep(pause_s)
            self.restarts += 1
            try:
                self._start_engine()
                return
            except RolloutError as next_error:  # also one that ends by itself: the machine may still be clearing away
                error = next_error

    def _given_up(self) -> str:
        count = len(self._losses)
        return (
            f"the {self.config.name} engine was lost {count} times without a finished generation; the first time: "
            f"{self._losses[0]}\nThe last time: {self._losses[-1]}"
        )

    # ---- agreement of the ranks

    def _any_rank(self, value: bool) -> bool:
        return any(self._exchange(int(value)))

    def _agree(self, state: _State) -> list[_State]:
        return [_State(value) for value in self._exchange(state)]

    def _exchange(self, value: int) -> list[int]:
        """The values of all ranks; outside of :meth:`awake`, where the others may do something else, of this one."""
        if self._everyone is None or self._source is None:
            return [value]
        found = [torch.zeros(1, dtype=torch.long) for _ in range(self._everyone.size())]
        dist.all_gather(found, torch.tensor([value]), group=self._everyone)
        return [int(one) for one in found]
