"""The receiving side of a transfer: the weights that a rank of the rollout holds until the next one.

The ranks of a machine hold one copy together, in files that all of them map. An engine in the worker's process uses
these bytes as its weights where device and format fit; others copy them when they wake.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from verl.config.rollout import CheckpointEngineConfig
from verl.errors import RolloutError
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.rollout.base import NO_WEIGHTS, Weights
from verl.workers.rollout.engine_side.verl_engine import Share, as_text, pin, signed_checksum, unpin, weights_in_part
from verl.workers.rollout.weights import FileBuffer, check_arrival
from verl.workers.transfer.link import Link
from verl.workers.transfer.plan import TransferPlan
from verl.workers.transfer.transport import Participant, WeightTransport, transport_class


@dataclass
class _ReceivedPart:
    """Memory of one part, and the description of its content."""

    file: FileBuffer | None = None
    """The memory, where this rank made it."""
    inode: tuple[int, int] | None = None
    memory: Tensor = field(default_factory=lambda: torch.empty(0, dtype=torch.uint8))
    description: dict[str, Any] = field(default_factory=dict)

    def map(self, path: str) -> None:
        """Map a file of this machine, unless it is mapped already in its full size."""
        status = Path(path).stat()
        inode = (status.st_dev, status.st_ino)
        if inode != self.inode or len(self.memory) < status.st_size:
            self.drop()
            self.memory = torch.from_file(path, shared=True, size=status.st_size, dtype=torch.uint8)
            pin(self.memory, path)
            self.file, self.inode = None, inode

    def reserve(self, size: int) -> str:
        """Make a file of at least ``size`` bytes in this process, or keep the one that is there; return its path."""
        if self.file is None:
            self.drop()
            self.file, self.inode = FileBuffer(), None
        self.file.reserve(size)
        self.memory = self.file.memory
        return self.file.path

    def drop(self) -> None:
        """Release the memory."""
        if self.file is None:
            unpin(self.memory)
        self.file, self.memory = None, torch.empty(0, dtype=torch.uint8)


class ReceivedWeights:
    """Weights that this rank received, verified; they stay until the next transfer, which writes over them.

    Args:
        config: ``rollout.checkpoint_engine``.
        rank: of this process among those of the rollout.
        device: into which NCCL receives; the weights themselves are on the CPU.
    """

    def __init__(self, config: CheckpointEngineConfig, rank: int, device: torch.device) -> None:
        self._config, self._rank, self._device = config, rank, device
        self.version = NO_WEIGHTS
        """Version of the last complete transfer; -1 before the first one."""
        self._unfinished: int | None = None
        """Version of a transfer that ended early."""
        self.digests: dict[str, str] = {}
        """Digests of the complete sections, by name."""
        self._parts: dict[str, list[_ReceivedPart]] = {}
        self._scales: dict[str, float] = {}
        """Scales of adapters, by layer."""
        self._session = ""
        self._store: dist.Store | None = None
        self._transport: WeightTransport | None = None
        self._last: Link | None = None

    @property
    def weights(self) -> Weights:
        """The weights for :meth:`BaseRollout.awake`; valid until the next transfer.

        Raises:
            RolloutError: the last transfer ended early, and what it wrote over is lost.
        """
        if self._unfinished is not None:
            raise RolloutError(
                f"the transfer of weights of version {self._unfinished} ended early, and this rank of the rollout has "
                "no complete weights. Update them again before it samples."
            )
        if "adapters" in self._parts:
            base, adapters = (functools.partial(self._tensors, name) for name in ("base", "adapters"))
            return AdaptedWeights(base, adapters, self._scales)
        return functools.partial(self._tensors, "merged")

    def _tensors(self, section: str) -> Iterator[tuple[str, Tensor]]:
        for part in self._parts[section]:
            yield from weights_in_part(part.description, memory=part.memory)

    def receive(self, plan: TransferPlan, version: int) -> None:
        """Receive what :meth:`WeightSender.send` sends under the same plan, and verify its checksums.

        Raises:
            RolloutError: another version is sent, weights did not arrive as they were sent, the sender failed or was
                lost. This rank has no complete weights then.
        """
        self._unfinished = version
        if plan.address.session != self._session:
            self._begin_session(plan)
        assert self._store is not None
        link = Link(self._store, plan.transfer)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            on_error.callback(self.digests.clear)
            self._receive(plan, version, link)
            on_error.pop_all()
        if self._last is not None:
            self._last.forget()
        self._last = link
        self.version, self._unfinished = version, None

    def close(self) -> None:
        """End the session; the weights stay."""
        if self._transport is not None:
            self._transport.close()
        self._session, self._transport, self._store, self._last = "", None, None, None

    def _begin_session(self, plan: TransferPlan) -> None:
        self.close()
        self._store = plan.address.connect()
        if self._rank in plan.leaders:
            options = self._config.engine_kwargs.get(plan.transport) or {}
            participant_rank, size = 1 + plan.leaders.index(self._rank), 1 + len(plan.leaders)
            participant = Participant(participant_rank, size, self._device, options)
            self._transport = transport_class(self._config, plan.transport)(participant)
        self._session = plan.address.session

    def _receive(self, plan: TransferPlan, version: int, link: Link) -> None:
        leader = plan.leader_of(self._rank)
        if self._rank == leader:
            assert self._transport is not None
            self._transport.link = link
            link.write(f"expects/{leader}", version)
        sent_version = link.read("version")
        if sent_version != version:
            raise RolloutError(
                f"weights of version {sent_version} are sent, and this rank of the rollout expects version {version}. "
                "Give both sides the same number."
            )
        if self._transport is not None:
            self._transport.begin()
        machine_ranks = [rank for rank in range(len(plan.machines)) if plan.leader_of(rank) == leader]
        share = Share(machine_ranks.index(self._rank), len(machine_ranks))
        sections = link.read("sections")
        names, self._scales = sections["names"], sections["scales"]
        for name in names:
            self._receive_section(name, leader, share, link)
        if "merged" in names:
            self._forget("base", "adapters")
        else:
            self._forget("merged")

    def _forget(self, *sections: str) -> None:
        for name in sections:
            self.digests.pop(name, None)
            for part in self._parts.pop(name, []):
                part.drop()

    def _receive_section(self, name: str, leader: int, share: Share, link: Link) -> None:
        self.digests.pop(name, None)
        parts = self._parts.setdefault(name, [])
        index = 0
        while "digest" not in (message := link.read(f"{name}/{index}")):
            if index == len(parts):
                parts.append(_ReceivedPart())
            part, size = parts[index], message["size"]
            if "path" in message:  # it lies where the sender wrote it
                part.map(message["path"])
            elif self._rank == leader:
                assert self._transport is not None
                path = part.reserve(size)
                self._transport.receive(message["sent"], part.memory[:size])
                link.write(f"path/{leader}/{name}/{index}", path)
            else:
                part.map(link.read(f"path/{leader}/{name}/{index}"))
            part.description = {"size": size, "tensors": message["tensors"]}
            self._verify(part, message["checksums"], share)
            index += 1
        for extra in parts[index:]:
            extra.drop()
        del parts[index:]
        self.digests[name] = message["digest"]

    def _verify(self, part: _ReceivedPart, checksums: dict[str, str], share: Share) -> None:
        tensors = list(weights_in_part(part.description, memory=part.memory))
        arrived = as_text({name: signed_checksum(tensor) for i, (name, tensor) in enumerate(tensors) if share.has(i)})
        sent = {name: checksums[name] for i, (name, _) in enumerate(tensors) if share.has(i)}
        check_arrival(sent, arrived, f"the memory of rank {self._rank} of the rollout")
