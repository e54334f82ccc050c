"""Division of a rank's rows into forward passes: equally many on every rank, smaller after running out of memory."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from types import TracebackType

import torch
import torch.distributed as dist

from verl.errors import ConfigError, PassTooLargeError, ResourceError, SchemaError, VerlError
from verl.protocol import DataProto
from verl.schema import COUNTED
from verl.supervision.processes import show_life
from verl.utils.seqlen_balancing import micro_batches_by_tokens
from verl.workers.engine.loss import num_valid_tokens
from verl.workers.shared_prompts import Siblings

logger = logging.getLogger(__name__)

OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_failed")
"""Messages of out-of-memory errors that have no class of their own: CPU allocators, CUDA calls, CUDA libraries."""

REMEDY = (
    "Shorten the sequences (data.max_prompt_length, data.max_response_length, data.max_length), set "
    "model.enable_gradient_checkpointing=true, leave less memory to the rollout (rollout.gpu_memory_utilization), "
    "offload (fsdp_config.param_offload, optimizer_offload), or use more ranks."
)


@dataclass(frozen=True, kw_only=True)
class MicroBatchConfig:
    """Size of one forward pass of one rank. Results do not depend on it."""

    micro_batch_size_per_gpu: int | None = None
    """Units per pass: sequences, or groups of sequences that a loss couples. None: the whole batch in one pass."""
    use_dynamic_bsz: bool = False
    """Fill passes up to ``max_token_len_per_gpu`` tokens instead of a number of units."""
    max_token_len_per_gpu: int | None = None
    shares_prompts: bool = False
    """Compute a prompt once for all rows of a pass that have it, and put such rows into the same passes. A prompt then
    counts once in ``max_token_len_per_gpu``; see :mod:`verl.workers.shared_prompts`."""

    def __post_init__(self) -> None:
        if self.use_dynamic_bsz and self.max_token_len_per_gpu is None:
            raise ConfigError("use_dynamic_bsz=true needs a token budget: set max_token_len_per_gpu.")

    def shared_by(self, ranks: int) -> MicroBatchConfig:
        """Return the size of a pass whose tokens ``ranks`` ranks share: the budget is that of all of them."""
        budget = self.max_token_len_per_gpu
        return replace(self, max_token_len_per_gpu=None if budget is None else budget * ranks)


@dataclass(frozen=True)
class MicroBatch:
    """The rows of one forward pass."""

    rows: list[int]
    data: DataProto
    is_filler: bool
    """True if it has no valid token and is computed only so that all ranks take part in the same collectives."""
    rows_per_unit: int = 1
    shares_prompts: bool = False
    """True if a prompt of several rows is computed once."""

    @property
    def num_tokens(self) -> int:
        """Tokens with ``response_mask`` 1."""
        return num_valid_tokens(self.data)

    def unit_lengths(self) -> list[int]:
        """Tokens of each unit, prompts and responses; a shared prompt counts in each."""
        return _unit_lengths(self.data, self.rows_per_unit)


def split_micro_batches(
    batch: DataProto,
    micro: MicroBatchConfig,
    device: torch.device,
    rows_per_unit: int = 1,
    limit: int | None = None,
    multiple: int = 1,
) -> Iterator[MicroBatch]:
    """Iterate over the forward passes of ``batch``, equally many on every rank; the last may be fillers. Collective.

    Args:
        batch: this rank's rows.
        micro: size of the passes.
        device: of the process group.
        rows_per_unit: rows k·n to k·n + n - 1 are never separated, and stay in their order.
        limit: maximum number of tokens per pass, each row counted with its own prompt; larger passes are divided, also
            if ``micro`` allows them.
        multiple: the number of passes is a multiple of this.

    Raises:
        ConfigError: on every rank, if one has a unit over the token budget.
        SchemaError: the rows do not divide into units.
    """
    if len(batch) % rows_per_unit:
        raise SchemaError(
            f"{len(batch)} rows do not divide into units of {rows_per_unit}: the loss reads so many rows together, and "
            "each rank must get all rows of a unit."
        )
    units = len(batch) // rows_per_unit
    lengths = _unit_lengths(batch, rows_per_unit)
    is_shared = micro.shares_prompts and rows_per_unit == 1
    siblings = (
        Siblings.from_batch(batch) if is_shared else Siblings([[unit] for unit in range(units)], [0] * units, lengths)
    )
    order = [unit for group in siblings.groups for unit in group]
    size = micro.micro_batch_size_per_gpu or units
    parts = [order[start : start + size] for start in range(0, units, size)]
    if micro.use_dynamic_bsz:
        assert micro.max_token_len_per_gpu is not None
        longest = largest_of_ranks(max(lengths), device)
        budget = micro.max_token_len_per_gpu
        # The longest of all ranks, so that each raises if one is over the budget and none waits for the others.
        parts = _parts_by_tokens(siblings, budget) if longest <= budget else micro_batches_by_tokens([longest], budget)
    parts = cut(parts, lengths, limit)
    count = -(-largest_of_ranks(len(parts), device) // multiple) * multiple
    # Spread the rows over as many passes as the rank with the most has, instead of adding fillers.
    if micro.use_dynamic_bsz and limit is None:
        assert micro.max_token_len_per_gpu is not None
        parts = _parts_by_tokens(siblings, micro.max_token_len_per_gpu, count)
    for part in parts:
        rows = [unit * rows_per_unit + row for unit in part for row in range(rows_per_unit)]
        yield MicroBatch(
            rows, batch.select_idxs(rows), is_filler=False, rows_per_unit=rows_per_unit, shares_prompts=is_shared
        )
    for _ in range(count - len(parts)):
        yield MicroBatch([], _filler(batch, rows_per_unit), True, rows_per_unit, shares_prompts=is_shared)


def _parts_by_tokens(siblings: Siblings, budget: int, count: int = 1) -> list[list[int]]:
    """Rows of passes of at most ``budget`` tokens, if possible at least ``count``; siblings that fit are together."""
    bundles = siblings.bundles(budget, count)
    parts = micro_batches_by_tokens([siblings.tokens(bundle) for bundle in bundles], budget, count)
    return [[row for bundle_index in part for row in bundles[bundle_index]] for part in parts]


def _unit_lengths(batch: DataProto, rows_per_unit: int) -> list[int]:
    return batch.batch["attention_mask"].view(len(batch) // rows_per_unit, -1).sum(-1).tolist()


def _filler(batch: DataProto, rows_per_unit: int) -> DataProto:
    """Return a copy of the first unit in which no token counts."""
    unit = batch.select_idxs(list(range(rows_per_unit)))
    columns = dict(unit.batch.items())
    columns |= {name: torch.zeros_like(columns[name]) for name in COUNTED if name in columns}
    return DataProto.from_dict(tensors=columns, non_tensors=unit.non_tensor_batch, meta_info=unit.meta_info)


def largest_of_ranks(value: int, device: torch.device) -> int:
    """Return the largest ``value`` of all ranks. Collective."""
    if dist.get_world_size() == 1:
        return value
    largest = torch.tensor(value, dtype=torch.int64, device=device)
    dist.all_reduce(largest, op=dist.ReduceOp.MAX)
    return int(largest)


def cut(parts: Iterable[Sequence[int]], lengths: Sequence[int], limit: int | None) -> list[list[int]]:
    """Halve the parts of more than ``limit`` tokens until they fit; a single unit is not divided.

    >>> cut([[0, 1, 2, 3]], [5, 1, 1, 5], limit=6)
    [[0, 1], [2, 3]]

    Parts are units of a pass, ``lengths`` the tokens of each unit; without a limit the parts stay as they are.
    """
    done: list[list[int]] = []
    for part in parts:
        if limit is None or len(part) == 1 or sum(lengths[unit] for unit in part) <= limit:
            done.append(list(part))
        else:
            done += cut(_halves(part, lengths), lengths, limit)
    return done


def _halves(part: Sequence[int], lengths: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Divide where the larger half is smallest; both have a unit."""
    sums = [sum(lengths[unit] for unit in part[:index]) for index in range(len(part) + 1)]
    index = min(range(1, len(part)), key=lambda index: max(sums[index], sums[-1] - sums[index]))
    return part[:index], part[index:]


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation failed, on a GPU or in host memory."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    text = str(error).lower()
    return (
        isinstance(error, RuntimeError) and not isinstance(error, VerlError) and any(w in text for w in OUT_OF_MEMORY)
    )


class PassAttempt:
    """Context of all passes of a batch; stores an out-of-memory error in ``error`` and suppresses it.

    Args:
        limit: maximum number of tokens per pass; the value of the context.
    """

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.error: BaseException | None = None

    def __enter__(self) -> int | None:
        return self.limit

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if error is None or not is_out_of_memory(error):
            return False
        self.error = error
        return True


@dataclass
class PassSizes:
    """Known limits of the size of an engine's passes.

    Passes with gradients (``train``) and without (``infer``) need different amounts of memory, so each kind has its own
    limit.
    """

    may_cut: bool = True
    limits: dict[str, int] = field(default_factory=dict)
    """Maximum tokens per pass, by kind; absent until a pass of that kind ran out of memory."""
    cuts: int = 0
    """Number of times that a limit was lowered."""
    _running: MicroBatch | None = None

    def watched(self, parts: Iterable[MicroBatch]) -> Iterator[MicroBatch]:
        """Iterate over ``parts``, recording which of them is being computed."""
        for part in parts:
            self._running = part
            show_life()
            yield part
        self._running = None

    def attempts(
        self, kind: str, device: torch.device, is_alone: bool, clear_gradients: Callable[[], None]
    ) -> Iterator[PassAttempt]:
        """Yield attempts at all passes of a batch: one, and a smaller one (:meth:`lower`) when memory ran out.

        Args:
            kind: ``train`` or ``infer``.
            device: whose cached memory is released before another attempt.
            is_alone: no other rank waits for this one, and an interrupted pass can be undone.
            clear_gradients: undoes a pass of kind ``train``: it has added to some gradients but not to others.
        """
        while True:
            attempt = PassAttempt(self.limits.get(kind))
            yield attempt
            error, attempt.error = attempt.error, None
            if error is None:
                return
            self.lower(kind, error, is_alone)
            del error  # its traceback holds the tensors of the pass
            if kind == "train":
                clear_gradients()
            if device.type == "cuda":
                torch.cuda.empty_cache()

    def lower(self, kind: str, error: BaseException, alone: bool) -> None:
        """Lower the limit of a kind of pass after the running one did not fit the memory.

        Args:
            kind: ``train`` or ``infer``.
            error: the out-of-memory error.
            alone: no other rank waits for this one, and the model is as it was before the pass.

        Raises:
            ResourceError: passes must not be divided, or this one is a single sequence (or unit of the loss).
            PassTooLargeError: other ranks wait, so all have to be restarted, with the limit in the error.
        """
        if self._running is None:
            raise ResourceError(f"out of memory between two passes ({_first_line(error)}). {REMEDY}") from error
        lengths = self._running.unit_lengths()
        counted = " with a prompt in each" if self._running.shares_prompts else ""
        tokens, what = sum(lengths), f"a pass of {len(lengths)} sequence(s) or pairs, {sum(lengths)} tokens{counted},"
        failure = f"{what} does not fit the memory ({'with' if kind == 'train' else 'without'} gradients)"
        if len(lengths) == 1:
            raise ResourceError(f"{failure}, and cannot be cut: {_first_line(error)} {REMEDY}") from error
        if not self.may_cut:
            raise ResourceError(
                f"{failure}, and trainer.recovery.split_on_out_of_memory=false: {_first_line(error)} Lower "
                "ppo_micro_batch_size_per_gpu or ppo_max_token_len_per_gpu (log_prob_... for log-probs)."
            ) from error
        limit = max(sum(lengths[unit] for unit in half) for half in _halves(range(len(lengths)), lengths))
        if not alone:
            raise PassTooLargeError(
                f"{failure}: {_first_line(error)} Other ranks wait for this one, so all are started again, with passes "
                f"of at most {limit} tokens. To save the restart, lower ppo_micro_batch_size_per_gpu or "
                "ppo_max_token_len_per_gpu (log_prob_... for log-probs).",
                kind,
                limit,
            ) from error
        self.limits[kind] = limit
        self.cuts += 1
        logger.warning("%s: from now on passes have at most %d tokens. %s", failure, limit, _first_line(error))
        assert limit < tokens


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return text[0] if text else type(error).__name__
