"""The sending side of a transfer, on each rank of the trainer."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
import torch.distributed as dist
from torch import Tensor

from verl.config.rollout import CheckpointEngineConfig
from verl.errors import RolloutError
from verl.workers.rollout.weights import SharedPart
from verl.workers.transfer.link import Link, serve_store
from verl.workers.transfer.plan import TransferPlan, TransferReport
from verl.workers.transfer.transport import Participant, WeightTransport, transport_class

_MIB = 2**20

Sections = Mapping[str, Callable[[], Iterable[tuple[str, Tensor]]]]
"""Functions that begin a collective iteration over weights, by section: ``merged``, or ``base`` and ``adapters``."""


class WeightSender:
    """Sends the policy's weights: rank 0 packs and sends, the others take part in gathering.

    Args:
        config: ``rollout.checkpoint_engine``.
        rank: of this process among the trainer's.
        device: of its weights.
        dtype: of the weights in the rollout engine, to which they are converted before they are sent.
    """

    def __init__(self, config: CheckpointEngineConfig, rank: int, device: torch.device, dtype: torch.dtype) -> None:
        self._config, self._rank, self._device, self._dtype = config, rank, device, dtype
        self._served: dist.TCPStore | None = None
        self._session = ""
        self._store: dist.Store | None = None
        self._transport: WeightTransport | None = None
        self._last: Link | None = None
        self._digests: dict[str, str] = {}
        """Digest of each section as it was last sent."""

    def serve_store(self, host: str) -> int:
        """Serve the store of this rank's transfers, from the first call on; return its port."""
        self._served = self._served or serve_store(host)
        return self._served.port

    def send(self, plan: TransferPlan, sections: Sections, scales: Mapping[str, float] | None = None) -> TransferReport:
        """Send all sections that the receivers lack. Collective over the trainer's ranks.

        ``base`` is sent only if the receivers do not hold it as it was last sent; other sections always are. Adapters
        keep their format, because engines that know no scale multiply by it before they round.

        Args:
            plan: of the transfer.
            sections: what there is to send.
            scales: of adapters, by layer; see :class:`~verl.workers.adapted_weights.AdaptedWeights`.

        Raises:
            RolloutError: a receiver refused or was lost, or there is no memory. All weights have been gathered then,
                so that the trainer can go on.
        """
        if plan.address.session != self._session:
            self._begin_session(plan)
        assert self._store is not None
        link = Link(self._store, plan.transfer)
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)  # the connections may lead to a lost process
            if self._rank == 0:
                report = self._send(plan, sections, scales or {}, link)
            else:
                report = TransferReport()
                for name in link.read("sections")["names"]:
                    _finish(sections[name]())
            on_error.pop_all()
        return report

    def close(self) -> None:
        """End the session."""
        if self._transport is not None:
            self._transport.close()
        self._session, self._transport, self._store, self._last = "", None, None, None
        self._digests.clear()

    def _begin_session(self, plan: TransferPlan) -> None:
        self.close()
        self._store = plan.address.connect()
        if self._rank == 0:
            options = self._config.engine_kwargs.get(plan.transport) or {}
            participant = Participant(0, 1 + len(plan.leaders), self._device, options)
            self._transport = transport_class(self._config, plan.transport)(participant)
        self._session = plan.address.session

    def _send(self, plan: TransferPlan, sections: Sections, scales: Mapping[str, float], link: Link) -> TransferReport:
        assert self._transport is not None
        self._transport.link = link
        held = {name: digest for name, digest in plan.held.items() if self._digests.get(name) == digest}
        names = [name for name in sections if name != "base" or name not in held]
        link.write(
            "sections", {"names": names, "scales": dict(scales)}
        )  # the other ranks wait for it, whatever happens next
        report = TransferReport()
        for name in names:
            weights = iter(sections[name]())
            try:
                if name == names[0]:
                    self._meet(plan, link)
                self._send_section(name, weights, link, report)
            finally:
                _finish(weights)  # gathering is collective
        self._transport.wait()
        if self._last is not None:
            self._last.forget()
        self._last = link
        return report

    def _meet(self, plan: TransferPlan, link: Link) -> None:
        """Send the version of the weights to the receivers, and check that they expect it."""
        assert self._transport is not None
        link.write("version", plan.version)
        if plan.is_in_process:
            self._transport.begin()
            return
        for rank in plan.leaders:
            expected = link.read(f"expects/{rank}")
            if expected != plan.version:
                raise RolloutError(
                    f"rank {rank} of the rollout expects weights of version {expected}, and version {plan.version} is "
                    "sent. Give both sides the same number."
                )
        self._transport.begin()

    def _send_section(
        self, name: str, weights: Iterator[tuple[str, Tensor]], link: Link, report: TransferReport
    ) -> None:
        assert self._transport is not None
        digest, index = hashlib.sha256(), 0
        bucket_bytes = self._config.update_weights_bucket_megabytes * _MIB
        dtype = None if name == "adapters" else self._dtype
        converted = ((weight, tensor.detach().to(dtype or tensor.dtype)) for weight, tensor in weights)
        for index, part in enumerate(self._transport.buffer(name).parts(converted, bucket_bytes), start=1):
            sent = self._transport.send(name, index - 1, part)
            message = {**part.description(), "checksums": dict(part.checksums), "sent": dict(sent.message)}
            link.write(f"{name}/{index - 1}", message)
            digest.update(_content(part))
            report.bytes_sent += sent.nbytes
            report.bytes_of_weights += part.nbytes
        link.write(f"{name}/{index}", {"digest": digest.hexdigest()})
        self._digests[name] = digest.hexdigest()


def _content(part: SharedPart) -> bytes:
    """Return what makes a part equal to another: its layout and checksums, wherever it lies."""
    layout = [[name, str(dtype), list(shape), start] for name, (dtype, shape, start) in part.tensors.items()]
    return json.dumps([layout, dict(part.checksums)]).encode()


def _finish(collective: Iterable[object]) -> None:
    """Iterate to the end: gathering is collective, so every rank must finish it, also after an error."""
    for _ in collective:
        pass
