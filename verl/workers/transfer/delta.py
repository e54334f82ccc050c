"""Transport of changes: of each weight only the elements whose bits differ from those that were sent before.

After an update by a small learning rate most weights of bfloat16 are the same as before, because the change is less
than half the distance to the next number. The changed elements of a tensor go as their values and the gaps between
them, each gap in as few bytes as make the whole smallest; a tensor of which that would be more than all its bytes goes
whole. What arrives is verified whole, as by any transport.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.workers.rollout.weights import SharedPart
from verl.workers.transfer.broadcast import Broadcast
from verl.workers.transfer.transport import Participant, Sent, register_transfer

_GAPS = {1: torch.uint8, 2: torch.uint16, 4: torch.int32}
"""Formats of gaps by their width in bytes."""
_ELEMENTS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Formats in which elements are compared, by their size: as integers, 0.0 differs from -0.0 and NaN equals itself."""
_ALIGNMENT = 8  # of each piece of a payload
_WHOLE = 0
"""Width of gaps of a tensor that is sent whole."""


@dataclass(frozen=True)
class Changes:
    """What changed of one tensor, as it is sent."""

    start: int
    """First byte of the tensor in its part."""
    nbytes: int
    """Of the tensor."""
    itemsize: int
    width: int
    """Of a gap, in bytes; 0 if the tensor is sent whole."""
    entries: int
    """Elements that are sent: those that changed, and some between them that bridge larger gaps."""

    def elements(self, memory: Tensor) -> Tensor:
        """Return the elements of the tensor in the memory of its part, as integers."""
        return memory[self.start : self.start + self.nbytes].view(_ELEMENTS[self.itemsize])

    def read(self, payload: Tensor, start: int) -> tuple[Tensor | None, Tensor, int]:
        """Return positions (None for all) and values from byte ``start`` of a payload, and where they end."""
        positions, end = None, start
        if self.width:
            gaps = payload[start : start + self.entries * self.width].view(_GAPS[self.width])
            positions = (gaps.long() + 1).cumsum(0) - 1
            end = _aligned(start + self.entries * self.width)
        values = payload[end : end + self.entries * self.itemsize].view(_ELEMENTS[self.itemsize])
        return positions, values, _aligned(end + self.entries * self.itemsize)


def changes_of(new: Tensor, old: Tensor, start: int) -> tuple[Changes | None, list[Tensor], int]:
    """Compare the elements of a tensor.

    Args:
        new: integers of the bits, flat.
        old: the same of the tensor before.
        start: first byte of the tensor in its part.

    Returns:
        the changes, None without any; gaps and values, or all values; the number of changed elements.
    """
    differs = new != old
    count, itemsize = int(differs.count_nonzero()), new.itemsize
    if not count:
        return None, [], 0
    whole = Changes(start, new.nbytes, itemsize, _WHOLE, new.numel())
    if count * (min(_GAPS) + itemsize) >= new.nbytes:  # before positions are collected, which takes longer
        return whole, [new], count
    changed = differs.nonzero().squeeze(-1)
    skipped = changed.clone()  # elements between a changed one and the changed one before
    skipped[1:] -= changed[:-1] + 1
    bridges = {width: int((skipped >> 8 * width).sum()) if width < 4 else 0 for width in _GAPS}
    sizes = {width: (count + bridges[width]) * (width + itemsize) for width in _GAPS}
    width = min(sizes, key=lambda width: sizes[width])
    if sizes[width] >= new.nbytes or new.numel() > torch.iinfo(torch.int32).max:
        return whole, [new], count
    gaps = skipped
    if bridges[width]:
        step = 1 << 8 * width
        ends = (skipped // step + 1).cumsum(0) - 1
        gaps = skipped.new_full((count + bridges[width],), step - 1)
        gaps[ends] = skipped % step
        changed = (gaps + 1).cumsum(0) - 1
    return (
        Changes(start, new.nbytes, itemsize, width, len(gaps)),
        [gaps.to(_GAPS[width]), new[changed]],
        count,
    )


def apply(changes: list[Changes], payload: Tensor, memory: Tensor) -> None:
    """Write the changes of a part into its memory, which has the bytes from before."""
    start = 0
    for change in changes:
        positions, values, start = change.read(payload, start)
        elements = change.elements(memory)
        if positions is None:
            elements.copy_(values)
        else:
            elements[positions] = values


@register_transfer("delta_sharded")
class Delta(Broadcast):
    """Sends what changed; the whole, if a receiver does not hold what was sent last.

    The sender keeps a copy of what it sent on the CPU, pinned if it is on a GPU.
    """

    def __init__(self, participant: Participant) -> None:
        super().__init__(participant)
        encoding = participant.options.get("encoding", "indices")
        if encoding != "indices":
            raise ConfigError(
                f"rollout.checkpoint_engine.engine_kwargs.delta_sharded.encoding='{encoding}' is unknown. Leave it "
                "out, or set it to 'indices': the positions of changed elements, in as few bytes as they need."
            )
        self._bases: dict[tuple[str, int], tuple[object, Tensor]] = {}
        """Layout and bytes of each part as it was last sent."""

    def send(self, section: str, index: int, part: SharedPart, is_base_held: bool) -> Sent:
        """See :meth:`WeightTransport.send`."""
        layout, base = self._bases.pop((section, index), (None, None))
        if base is None or layout != part.tensors or not is_base_held:
            base = torch.empty(len(part.memory), dtype=torch.uint8, pin_memory=part.memory.is_cuda)
            base.copy_(part.memory)
            self._bases[section, index] = part.tensors, base
            return super().send(section, index, part, is_base_held)
        before = base.to(part.memory.device, non_blocking=True)
        changes, pieces, compared, changed = [], [], 0, 0
        for dtype, shape, start in part.tensors.values():
            whole = slice(start, start + shape.numel() * dtype.itemsize)
            new, old = (memory[whole].view(_ELEMENTS[dtype.itemsize]) for memory in (part.memory, before))
            of_tensor, sent, count = changes_of(new, old, start)
            if of_tensor is not None:
                changes.append(of_tensor)
                pieces += sent
            compared, changed = compared + len(new), changed + count
        payload = _joined(pieces, part.memory.device)
        self.wait_until_sent(all_but=1)
        if len(payload):
            self.start(payload)
        apply(changes, payload.cpu(), base)
        self._bases[section, index] = part.tensors, base
        rows = [[one.start, one.nbytes, one.itemsize, one.width, one.entries] for one in changes]
        return Sent(len(payload), {"payload": len(payload), "changes": rows}, compared, changed)

    def receive(self, message: Mapping[str, Any], memory: Tensor) -> None:
        """See :meth:`WeightTransport.receive`."""
        if "changes" not in message:
            super().receive(message, memory)
        elif message["payload"]:
            payload = torch.empty(message["payload"], dtype=torch.uint8, device=self.participant.device)
            self.fetch(payload)
            apply([Changes(*row) for row in message["changes"]], payload.cpu(), memory)


def _aligned(size: int) -> int:
    return -(-size // _ALIGNMENT) * _ALIGNMENT


def _joined(pieces: list[Tensor], device: torch.device) -> Tensor:
    """Return the bytes of all pieces, each from a multiple of the alignment on."""
    ends = [0]
    for piece in pieces:
        ends.append(_aligned(ends[-1] + piece.nbytes))
    payload = torch.zeros(ends[-1], dtype=torch.uint8, device=device)
    for start, piece in zip(ends, pieces, strict=False):
        payload[start : start + piece.nbytes] = piece.view(torch.uint8)
    return payload
