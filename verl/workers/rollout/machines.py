"""An engine whose ranks are on several machines: where its processes meet, and how the first learns of the others' end.

The first rank of the engine has its server; the first rank on each further machine has the processes there, which serve
nothing. They start together (:meth:`EngineMachines.meet`). From then on each further machine tells the first, through a
store that its rank keeps, that its processes run (:class:`NodeReporter`, :class:`OtherMachines`).
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, TypedDict

import torch.distributed as dist

from verl.single_controller.base.worker import free_port
from verl.utils.device import address_towards
from verl.workers.rollout.engine_process import EngineProcess, Loss
from verl.workers.rollout.ranks import EXCHANGE_S, EnginePlacement

_REPORT_S = 1.0
"""Interval of the reports of a machine."""
_SILENCE_S = 15.0
"""Longest time without a report before its processes seem to hang."""
_STORE_TIMEOUT = datetime.timedelta(seconds=60)


@dataclass(frozen=True)
class Meeting:
    """Address and ports at which the processes of one start of an engine meet."""

    address: str
    """Address of the first machine, in the network of the others."""
    port: int
    """Free port on the first machine, for the engine's own processes."""
    second_port: int
    """Second free port on the first machine, for the engine's own processes."""
    report_port: int
    """Port on the first machine, of the store for reports."""


class _Report(TypedDict):
    loss: dict[str, Any] | None
    """Fields of :class:`Loss`."""
    problem: str | None
    """Reason why the processes seem to hang; None if they do not."""
    count: int
    """Number of earlier reports."""


class EngineMachines:
    """The machines of this rank's engine. The constructor is collective over all ranks, :meth:`meet` over the engine's.

    Args:
        rank: of this process.
        ranks_per_engine: consecutive ranks that share an engine.
        placement: of this rank's engine.
    """

    def __init__(self, rank: int, ranks_per_engine: int, placement: EnginePlacement) -> None:
        self.placement = placement
        self.meeting: Meeting | None = None
        """Meeting point of the last start."""
        self.address = address_towards(os.environ["MASTER_ADDR"])
        """Address of this machine, in the network of the ranks."""
        self.watch: OtherMachines | None = None
        """State of the other machines, on the first rank."""
        for first in range(0, dist.get_world_size(), ranks_per_engine):
            ranks = [*range(first, first + ranks_per_engine)]
            group = dist.new_group(ranks, backend="gloo", timeout=datetime.timedelta(seconds=EXCHANGE_S))
            if rank in ranks:
                assert isinstance(group, dist.ProcessGroup)
                self._group, self._leads = group, rank == first

    def have_all(self, runs: bool) -> bool:
        """Return whether the processes of all machines run; a rank without processes says that they do."""
        values = [runs] * self._group.size()
        dist.all_gather_object(values, runs, group=self._group)
        return all(values)

    @property
    def serves_nothing(self) -> bool:
        """True if this rank is the first one of the engine on a machine without the engine's server."""
        return self.placement.leads_node and self.placement.node_rank > 0

    def meet(self) -> None:
        """Agree where the processes meet that are started now: ``meeting``, and on the first rank ``watch``."""
        meetings: list[Meeting | None] = [None] * self._group.size()
        mine = None
        if self._leads:
            store = dist.TCPStore(self.address, 0, is_master=True, wait_for_workers=False, timeout=_STORE_TIMEOUT)
            mine = Meeting(self.address, free_port(), free_port(), store.port)
            self.watch = OtherMachines(store, self.placement.nodes)
        dist.all_gather_object(meetings, mine, group=self._group)
        self.meeting = meetings[0]

    @contextlib.contextmanager
    def reporting_failure(self) -> Iterator[None]:
        """Report an error in the context to the first machine, so that it does not wait for processes here."""
        assert self.meeting is not None
        try:
            yield
        except Exception as error:  # the first machine waits for this one, whatever it raises; raised again below
            loss = Loss(f"its processes could not be started: {type(error).__name__}: {error}", was_killed=False)
            report: _Report = {"loss": asdict(loss), "problem": None, "count": 0}
            _store_of(self.meeting).set(_key(self.placement.node_rank), json.dumps(report))
            raise

    def report(self, process: EngineProcess) -> NodeReporter:
        """Report the state of this machine's processes to the first machine from now on."""
        assert self.meeting is not None
        return NodeReporter(process, self.meeting, self.placement.node_rank)


class NodeReporter:
    """A machine's reports to the first one, from a thread, until :meth:`close` or until the first one has ended."""

    def __init__(self, process: EngineProcess, meeting: Meeting, node_rank: int) -> None:
        self._process, self._node_rank = process, node_rank
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._report, args=(meeting,), name="engine-node", daemon=True)
        self._thread.start()

    def _report(self, meeting: Meeting) -> None:
        with contextlib.suppress(dist.DistError):  # the first machine's rank has ended
            store = _store_of(meeting)
            for count in itertools.count():
                loss = self._process.loss()
                if self._over.is_set():
                    return
                report: _Report = {
                    "loss": loss and asdict(loss),
                    "problem": self._process.stopped_text(),
                    "count": count,
                }
                store.set(_key(self._node_rank), json.dumps(report))
                self._over.wait(_REPORT_S)

    def close(self) -> None:
        """End the reports."""
        self._over.set()
        self._thread.join()


class OtherMachines:
    """State of an engine's other machines, as its first machine sees it; a ``ProcessesElsewhere``."""

    def __init__(self, store: dist.TCPStore, nodes: int) -> None:
        self._store = store
        self._reports = dict.fromkeys(range(1, nodes), "")
        self._heard_at = dict.fromkeys(range(1, nodes), time.monotonic())

    def loss(self) -> Loss | None:
        """See :class:`~verl.workers.rollout.engine_process.ProcessesElsewhere`."""
        for node_rank in self._reports:
            if (report := self._read(node_rank)) and report["loss"]:
                loss = Loss(**report["loss"])
                return Loss(f"Machine {node_rank} of the engine: {loss.text}", loss.was_killed)
        return None

    def problem(self) -> str | None:
        """See :class:`~verl.workers.rollout.engine_process.ProcessesElsewhere`."""
        for node_rank in self._reports:
            report = self._read(node_rank)
            if report and report["problem"]:
                return f"{report['problem']} on machine {node_rank} of the engine"
            if time.monotonic() - self._heard_at[node_rank] > _SILENCE_S:
                return f"hears nothing of machine {node_rank} of the engine"
        return None

    def _read(self, node_rank: int) -> _Report | None:
        if not self._store.check([_key(node_rank)]):
            return None
        text = self._store.get(_key(node_rank)).decode()
        if text != self._reports[node_rank]:
            self._reports[node_rank], self._heard_at[node_rank] = text, time.monotonic()
        return json.loads(text)


def _store_of(meeting: Meeting) -> dist.TCPStore:
    return dist.TCPStore(meeting.address, meeting.report_port, timeout=_STORE_TIMEOUT, wait_for_workers=False)


def _key(node_rank: int) -> str:
    return f"node-{node_rank}"
