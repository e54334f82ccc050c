"""The interface of transports, which carry the bytes of weights from one rank to the receiving machines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, TypeVar, cast

import torch
from torch import Tensor

from verl.base.import_utils import load_module
from verl.base.registry import Registry
from verl.config.rollout import CheckpointEngineConfig
from verl.workers.rollout.weights import SharedBuffer, SharedPart
from verl.workers.transfer.link import Link


@dataclass(frozen=True)
class Participant:
    """One of the processes that a transport connects."""

    rank: int
    """0 sends; the others are the first receiving rank of each machine."""
    size: int
    """Number of these processes."""
    device: torch.device
    """Device of this process."""
    options: Mapping[str, Any]
    """``checkpoint_engine.engine_kwargs`` of the transport's name."""


@dataclass(frozen=True)
class Sent:
    """Result of :meth:`WeightTransport.send` for a part of the weights."""

    nbytes: int
    """Bytes that each receiving machine is sent."""
    message: Mapping[str, Any] = field(default_factory=dict)
    """Facts, as JSON, that a receiver needs besides the layout of the part."""


class WeightTransport(ABC):
    """Carries weights part by part; made once for a set of processes, in each of them.

    Weights are packed into parts, flat memory of at most ``update_weights_bucket_megabytes`` (or one larger tensor).
    Layout and checksums of each part go with :attr:`link`, whatever the transport is: it carries the bytes alone, and a
    part that arrives otherwise than it was sent is refused.

    Args:
        participant: the processes of the transfer.
    """

    needs_one_machine: ClassVar[bool] = False
    """True if it reaches only receivers on the sender's machine."""
    sends_before_receiving: ClassVar[bool] = False
    """True if ``send`` returns before a receiver has begun, so that one process can be both sides."""

    def __init__(self, participant: Participant) -> None:
        self.participant = participant
        self.link: Link
        """Messages of the transfer under way."""

    def begin(self) -> None:  # noqa: B027  there may be nothing to do
        """Begin a transfer: all processes are there, and have :attr:`link`."""

    @abstractmethod
    def buffer(self, section: str) -> SharedBuffer:
        """Sender: return the memory into which a section of the weights is packed, part by part.

        A part whose location has a ``path`` is where the receivers reach it already; others are received.
        """

    @abstractmethod
    def send(self, section: str, index: int, part: SharedPart) -> Sent:
        """Sender: begin to send a part, and return without waiting for its arrival.

        Args:
            section: ``merged`` weights, or the ``base`` and the ``adapters`` of a model.
            index: of the part in its section.
            part: the bytes; they stay until :meth:`wait`, or until the buffer gives its memory to another part.
        """

    def wait(self) -> None:  # noqa: B027  nothing may be under way
        """Sender: wait until all parts are sent."""

    def receive(self, message: Mapping[str, Any], memory: Tensor) -> None:
        """Receiver: write the bytes of a part into ``memory``.

        Args:
            message: :attr:`Sent.message`.
            memory: uint8, on the CPU, of the size of the part.
        """
        raise NotImplementedError

    def close(self) -> None:  # noqa: B027  there may be nothing to release
        """Release connections and memory; also after a failure, in which other processes may have been lost."""


_transports: Registry[type[WeightTransport]] = Registry("transfer of weights")


T = TypeVar("T", bound=type[WeightTransport])


def register_transfer(name: str) -> Callable[[T], T]:
    """Register the decorated class as value of ``rollout.checkpoint_engine.backend``."""
    return cast(Any, _transports.register(name))


def transport_class(config: CheckpointEngineConfig, name: str) -> type[WeightTransport]:
    """Return the class of a transport, after the module ``custom_backend_module`` was imported.

    Raises:
        ConfigError: there is no such module, or nothing is registered under the name.
    """
    if config.custom_backend_module:
        load_module(config.custom_backend_module, "rollout.checkpoint_engine.custom_backend_module")
    return _transports.get(name)
