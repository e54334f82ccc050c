"""Transport on one machine: the sender packs weights into files that the receivers map, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from verl.utils.sharded_tensor import DividedTensor
from verl.workers.rollout.weights import FileBuffer, SharedBuffer, SharedPart
from verl.workers.transfer.transport import Participant, Sent, WeightTransport, register_transfer


class Segments(SharedBuffer):
    """A file for each part, kept from transfer to transfer: receivers that have mapped it see its newest bytes."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[FileBuffer] = []
        self._index = -1

    def parts(self, weights: Iterable[tuple[str, Tensor | DividedTensor]], part_bytes: int) -> Iterator[SharedPart]:
        """See :meth:`SharedBuffer.parts`; here all parts stay."""
        self._index = -1
        yield from super().parts(weights, part_bytes)
        del self._files[self._index + 1 :]

    def _location(self) -> Mapping[str, str]:
        return {"path": self._files[self._index].path}

    def _has_room(self, size: int) -> bool:
        if not self._files[self._index].grow(size):
            return False
        self._memory = self._files[self._index].memory
        return True

    def _make_room(self, size: int, part_bytes: int) -> None:
        self._index += 1
        if self._index == len(self._files):
            self._files.append(FileBuffer())
        self._files[self._index].reserve(size)
        self._memory = self._files[self._index].memory


@register_transfer("shared_memory")
class SharedMemory(WeightTransport):
    """Sender and receivers map the same files, in memory (``/dev/shm``) or else in ``TMPDIR``."""

    needs_one_machine = True
    sends_before_receiving = True

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant)
        self._segments: dict[str, Segments] = {}

    def buffer(self, section: str) -> SharedBuffer:
        """See :meth:`WeightTransport.buffer`."""
        return self._segments.setdefault(section, Segments())

    def send(self, section: str, index: int, part: SharedPart) -> Sent:
        """See :meth:`WeightTransport.send`."""
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        return Sent(part.nbytes)

    def close(self) -> None:
        """See :meth:`WeightTransport.close`."""
        self._segments.clear()
