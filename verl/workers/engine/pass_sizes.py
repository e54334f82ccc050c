"""Passes that do not fit the memory: cut in two, done again, and the size that fitted remembered."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch

from verl.errors import PassTooLargeError, ResourceError, VerlError

if TYPE_CHECKING:
    from verl.workers.engine.fsdp.micro_batches import MicroBatch

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
"""What errors say that are not of a class of their own: the allocators of CPUs, CUDA's own calls, its libraries."""

REMEDY = (
    "Shorten the sequences (data.max_prompt_length, data.max_response_length, data.max_length), set "
    "model.enable_gradient_checkpointing=true, leave less memory to the rollout (rollout.gpu_memory_utilization), "
    "offload (fsdp_config.param_offload, optimizer_offload), or use more ranks."
)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed, on a GPU or in host memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return (
        isinstance(error, RuntimeError) and not isinstance(error, VerlError) and any(w in text for w in OUT_OF_MEMORY)
    )


def cut(parts: Iterable[Sequence[int]], lengths: Sequence[int], limit: int | None) -> list[list[int]]:
    """Parts of at most ``limit`` tokens, each made by cutting in two what is larger; a single unit stays whole.

    >>> cut([[0, 1, 2, 3]], [5, 1, 1, 5], limit=6)
    [[0, 1], [2, 3]]

    Args:
        parts: units of each pass.
        lengths: tokens of each unit.
        limit: None leaves them as they are.
    """
    done: list[list[int]] = []
    for part in parts:
        if limit is None or len(part) == 1 or sum(lengths[unit] for unit in part) <= limit:
            done.append(list(part))
        else:
            done += cut(_halves(part, lengths), lengths, limit)
    return done


def _halves(part: Sequence[int], lengths: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Cut where the larger half is smallest; both have a unit."""
    sums = [sum(lengths[unit] for unit in part[:place]) for place in range(len(part) + 1)]
    place = min(range(1, len(part)), key=lambda place: max(sums[place], sums[-1] - sums[place]))
    return part[:place], part[place:]


@dataclass
class PassSizes:
    """How large the passes of one engine may be, as far as it is known.

    Passes with gradients (``train``) and without (``infer``) take different memory, and have limits of their own.
    """

    may_cut: bool = True
    limits: dict[str, int] = field(default_factory=dict)
    """Tokens of a pass, by kind; none is known before one did not fit."""
    cuts: int = 0
    """How often a limit was lowered."""
    _running: MicroBatch | None = None

    def watched(self, parts: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """``parts``, and which of them is being computed."""
        for part in parts:
            self._running = part
            yield part
        self._running = None

    def lower(self, kind: str, error: BaseException, alone: bool) -> None:
        """The running pass did not fit: the next ones are smaller.

        Args:
            kind: ``train`` or ``infer``.
            error: that said so.
            alone: no other rank waits for this one, and the model is as it was before the pass.

        Raises:
            ResourceError: passes are not to be cut, or this one is a single sequence (or unit of the loss).
            PassTooLargeError: others wait, and have to be started again with this one.
        """
        if self._running is None:
            raise ResourceError(f"out of memory between two passes ({_first_line(error)}). {REMEDY}") from error
        lengths = self._running.unit_lengths()
        tokens, what = sum(lengths), f"a pass of {len(lengths)} sequence(s) or pairs, {sum(lengths)} tokens,"
        said = f"{what} does not fit the memory ({'with' if kind == 'train' else 'without'} gradients)"
        if len(lengths) == 1:
            raise ResourceError(f"{said}, and cannot be cut: {_first_line(error)} {REMEDY}") from error
        if not self.may_cut:
            raise ResourceError(
                f"{said}, and trainer.recovery.split_on_out_of_memory=false: {_first_line(error)} Lower "
                "ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu (log_prob_... for log-probs)."
            ) from error
        limit = max(sum(lengths[unit] for unit in half) for half in _halves(range(len(lengths)), lengths))
        if not alone:
            raise PassTooLargeError(
                f"{said}: {_first_line(error)} Other ranks wait for this one, so all are started again, with passes of "
                f"at most {limit} tokens. To save the restart, lower ppo_micro_batch_size_per_gpu or "
                "ppo_max_token_len_per_gpu (log_prob_... for log-probs).",
                kind,
                limit,
            ) from error
        self.limits[kind] = limit
        self.cuts += 1
        logger.warning("%s: from now on passes have at most %d tokens. %s", said, limit, _first_line(error))
        assert limit < tokens


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
