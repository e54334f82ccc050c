"""Sample next tokens for a batch of responses, and detect where each response ends.

A token depends only on its own row: the logits, the sampling parameters, and the t-th number of the row's random
generator. So a response does not change with the order, size or split of the batch, nor with the number of ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # SGLang's processes load this file too, and their environment may have PyTorch only
    from transformers import PreTrainedTokenizerBase

    from verl.workers.rollout.request import FinishReason, SamplingParams

# Limit of rows x vocabulary that are processed at once in float64: 128 MiB for each temporary tensor.
_CHUNK_ELEMENTS = 1 << 24
_CDF_BLOCK = 512
"""Tokens whose cumulative probabilities are summed at once."""
_NO_TOKEN = -1  # fills rows with fewer ending tokens than others; no token has this id
# Tokens decoded in front of those that can belong to a stop text: some tokenizers drop a text's leading space.
_CONTEXT_TOKENS = 8


def uniforms(seed: int, count: int) -> Tensor:
    """The first ``count`` random numbers in [0, 1) of a seed, float64 on the CPU; a larger count only appends more."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kept_tokens(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Mask of the tokens that min-p, top-k and top-p keep.

    Tokens are ranked by probability, equal ones by id. Kept are those with at least ``min_p`` times the largest
    probability; of those the first ``top_k``; of those the shortest prefix of the ranking with at least ``top_p`` of
    their total mass. The first token is always kept.

    Args:
        probs: (rows, vocab).
        top_k: (rows,) int; 0 or less keeps all.
        top_p: (rows,) in (0, 1]; 1 keeps all.
        min_p: (rows,) in [0, 1]; 0 keeps all.

    Returns:
        (rows, vocab) bool.
    """
    ranked, order = probs.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(probs.shape[-1], device=probs.device)
    within_k = (rank < top_k[:, None]) | (top_k[:, None] <= 0)
    within_k &= ranked >= min_p[:, None] * ranked[:, :1]
    ranked = ranked * within_k
    mass_before = torch.cat([torch.zeros_like(ranked[:, :1]), _cumulative(ranked)[:, :-1]], dim=-1)
    within_p = (mass_before < top_p[:, None] * ranked.sum(-1, keepdim=True)) | (top_p[:, None] >= 1)
    return torch.zeros_like(within_k).scatter(-1, order, within_k & within_p)


def _list_ids(is_kept: Tensor, ids: Tensor) -> None:
    """Write the places where ``is_kept`` (rows, vocab) is true into ``ids`` (rows, K), for rows that have at most K."""
    counts = is_kept.sum(-1)
    rows, tokens = (is_kept & (counts <= ids.shape[1]).unsqueeze(-1)).nonzero(as_tuple=True)
    ids[rows, is_kept.cumsum(-1)[rows, tokens] - 1] = tokens.to(ids.dtype)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """Sample by inverting the cumulative distribution: the token v with Σ_{w<v} p_w ≤ u·Σ p < Σ_{w≤v} p_w.

    A token of probability 0 is never drawn. Tokens are summed in the order of their ids, because an order by
    probability changes when rounding swaps two nearly equal tokens.

    Args:
        probs: (rows, vocab) float64, not necessarily normalised.
        uniform: (rows,) float64 in [0, 1).

    Returns:
        (rows,) int64.
    """
    # First the block of tokens, then the token in it: the cumulative sum of a whole vocabulary is slow on a GPU.
    vocabulary = probs.shape[-1]
    size = min(_CDF_BLOCK, vocabulary)
    in_blocks = vocabulary // size * size
    masses = probs[:, :in_blocks].unflatten(-1, (-1, size)).sum(-1)
    if in_blocks < vocabulary:
        masses = torch.cat([masses, probs[:, in_blocks:].sum(-1, keepdim=True)], dim=-1)
    ends = _cumulative(masses)
    target = _below(uniform[:, None] * ends[:, -1:], ends[:, -1:])
    # Out of range only with nan, which the engine reports.
    block = torch.searchsorted(ends, target, right=True).clamp(max=masses.shape[-1] - 1)
    start = ends.gather(-1, (block - 1).clamp(min=0)) * (block > 0)
    tokens = block * size + torch.arange(size, device=probs.device)
    in_block = probs.gather(-1, tokens.clamp(max=vocabulary - 1)) * (tokens < vocabulary)
    cdf = _cumulative(in_block)
    index = torch.searchsorted(cdf, _below(target - start, cdf[:, -1:]), right=True)
    return (block * size + index).squeeze(-1).clamp(max=vocabulary - 1)


def _below(target: Tensor, total: Tensor) -> Tensor:
    """Bound the targets by the number before ``total``, so that rounding leads to no token of probability 0."""
    return torch.minimum(target, total.nextafter(torch.zeros_like(total)))


def _cumulative(probs: Tensor) -> Tensor:
    """Sum along each row, also where ``full_determinism`` is set: CUDA refuses ``cumsum`` of floats then."""
    is_strict = torch.are_deterministic_algorithms_enabled()
    warns_only = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(False)
    try:
        return probs.cumsum(-1)
    finally:
        torch.use_deterministic_algorithms(is_strict, warn_only=warns_only)


def enlarged(table: Tensor, rows: int, width: int | None = None, fill: float = 0) -> Tensor:
    """Return a table with at least these rows and columns, and the same content.

    A table that is too small is doubled, so that adding rows one by one costs no more than adding them at once.

    Args:
        table: (rows,), or (rows, columns) if ``width`` is given.
        rows: number of rows wanted.
        width: number of columns wanted.
        fill: content of new places.
    """
    needed = (rows,) if width is None else (rows, width)
    if all(new <= old for new, old in zip(needed, table.shape, strict=True)):
        return table
    size = [old if new <= old else max(new, 2 * old) for new, old in zip(needed, table.shape, strict=True)]
    larger = table.new_full(size, fill) if fill else table.new_zeros(size)
    larger[tuple(slice(old) for old in table.shape)] = table
    return larger


class TokenSampler:
    """Sampler for the rows of a batch; each call may be for some of the rows only.

    Args:
        params: sampling parameters of the first rows; :meth:`put` gives those of others.
        device: device of the logits.
        raw: return the log-probs of softmax(logits) instead of those of the sampling distribution.
        never: token ids that are never drawn, as if their logits were -∞.
    """

    def __init__(
        self, params: Sequence[SamplingParams], device: torch.device, raw: bool = False, never: Sequence[int] = ()
    ) -> None:
        self._raw, self._device = raw, device
        self._never = torch.tensor(never, dtype=torch.long, device=device)
        self._kinds: dict[int, tuple[bool, bool]] = {}
        """Kind of each row: whether it is greedy, and whether it truncates."""
        self._greedy = torch.zeros(0, dtype=torch.bool, device=device)
        self._temperature = torch.zeros(0, dtype=torch.float32, device=device)
        self._top_k = torch.zeros(0, dtype=torch.long, device=device)
        self._top_p, self._min_p = torch.zeros(2, 0, dtype=torch.float64, device=device)
        self._uniforms = torch.zeros(0, 0, dtype=torch.float64, device=device)
        self.put(range(len(params)), params)

    def put(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Set the sampling parameters of rows, new ones or those of ended responses."""
        if not params:
            return
        count, longest, device = max(rows) + 1, max(p.max_tokens for p in params), self._device
        self._greedy, self._temperature, self._top_k, self._top_p, self._min_p = (
            enlarged(table, count) for table in (self._greedy, self._temperature, self._top_k, self._top_p, self._min_p)
        )
        self._uniforms = enlarged(self._uniforms, count, longest)
        uniform = torch.zeros(len(params), longest, dtype=torch.float64)
        for row, p in zip(uniform, params, strict=True):
            if not p.is_greedy:
                row[: p.max_tokens] = uniforms(p.seed, p.max_tokens)
        index = torch.tensor(rows, dtype=torch.long, device=device)
        self._uniforms[index, :longest] = uniform.to(device)
        self._greedy[index] = torch.tensor([p.is_greedy for p in params], device=device)
        self._temperature[index] = torch.tensor(
            [p.temperature or 1.0 for p in params], dtype=torch.float32, device=device
        )
        # A greedy row keeps all tokens: its log-probs are those of softmax(logits).
        self._top_k[index] = torch.tensor([p.top_k if p.truncates else -1 for p in params], device=device)
        for table, values in (
            (self._top_p, [p.top_p if p.truncates else 1.0 for p in params]),
            (self._min_p, [p.min_p if p.truncates else 0.0 for p in params]),
        ):
            table[index] = torch.tensor(values, dtype=torch.float64, device=device)
        self._kinds.update(zip(rows, ((p.is_greedy, p.truncates) for p in params), strict=True))
        self._note_kinds()

    def drop(self, rows: Sequence[int]) -> None:
        """Forget rows that are not called for any more, which spares work that only they needed."""
        for row in rows:
            del self._kinds[row]
        self._note_kinds()

    def _note_kinds(self) -> None:
        kinds = set(self._kinds.values())
        self._all_greedy, self._some_greedy = (f(greedy for greedy, _ in kinds) for f in (all, any))
        self._truncates = any(truncates for _, truncates in kinds)

    def __call__(
        self, logits: Tensor, rows: Tensor, step: int | Tensor, kept_ids: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Draw the ``step``-th token of the given rows.

        Args:
            logits: (n, vocab).
            rows: (n,) indices of these rows among the sampler's.
            step: position in the response, one for all rows or (n,).
            kept_ids: (n, K) int32 of -1, filled in place: the ids of the tokens that min_p, top_k and top_p keep,
                ascending, where these are at most K.

        Returns:
            Tokens (n,) int64 and log-probs (n,) float32 as defined in :class:`RolloutOutput`.
        """
        size = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
        steps = torch.as_tensor(step, device=rows.device).expand_as(rows)
        if len(rows) <= size:
            return self._draw(logits, rows, steps, kept_ids)
        views = [None] * -(-len(rows) // size) if kept_ids is None else kept_ids.split(size)
        split = (logits.split(size), rows.split(size), steps.split(size), views)
        parts = [self._draw(*part) for part in zip(*split, strict=True)]
        tokens, log_probs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(log_probs)

    def _draw(self, logits: Tensor, rows: Tensor, steps: Tensor, kept_ids: Tensor | None) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / self._temperature[rows, None]
        if len(self._never):
            scaled.index_fill_(-1, self._never, -torch.inf)
        # log_softmax in fp32 is off by up to 1e-4 on CPUs, upwards on average, where there are 150,000 tokens.
        log_probs = scaled.sub_(scaled.logsumexp(-1, keepdim=True))
        log_kept_mass = log_probs.new_zeros(len(rows))
        if self._all_greedy:
            tokens = log_probs.argmax(-1)
        else:
            probs = log_probs.double().exp()
            if self._truncates:
                mass = probs.sum(-1)
                probs = probs * kept_tokens(probs, self._top_k[rows], self._top_p[rows], self._min_p[rows])
                log_kept_mass = (probs.sum(-1) / mass).log()  # exactly 0 where all tokens are kept
                if kept_ids is not None:
                    _list_ids(probs > 0, kept_ids)
            tokens = inverse_cdf(probs, self._uniforms[rows, steps])
            if self._some_greedy:
                tokens = torch.where(self._greedy[rows], log_probs.argmax(-1), tokens)
        if self._raw:
            wide = logits.float()
            log_probs, log_kept_mass = wide - wide.logsumexp(-1, keepdim=True), torch.zeros_like(log_kept_mass)
        return tokens, (log_probs.gather(-1, tokens[:, None]).squeeze(-1) - log_kept_mass).float()


# ---- the end of a response


class StopRules:
    """Detect and record where and why each response of a batch ends.

    Args:
        params: sampling parameters of the first rows; :meth:`put` gives those of others.
        eos_token_ids: end tokens of the model.
        tokenizer: decodes responses to find stop texts.
        device: of the tokens.
    """

    def __init__(
        self,
        params: Sequence[SamplingParams],
        eos_token_ids: tuple[int, ...],
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
    ) -> None:
        self._eos_token_ids, self._tokenizer, self._device = eos_token_ids, tokenizer, device
        self._ends = torch.zeros(0, 0, dtype=torch.long, device=device)  # (rows, most end tokens of a row)
        self._limits = torch.zeros(0, dtype=torch.long, device=device)
        self._lengths = torch.zeros_like(self._limits)  # 0: not ended
        self._stopped = torch.zeros_like(self._limits, dtype=torch.bool)
        self._texts: dict[int, tuple[str, ...]] = {}
        self.put(range(len(params)), params)

    def put(self, rows: Sequence[int], params: Sequence[SamplingParams]) -> None:
        """Set the rules of rows, new ones or those of ended responses."""
        if not params:
            return
        count, device = max(rows) + 1, self._device
        ends = [{*p.stop_token_ids, *(() if p.ignore_eos else self._eos_token_ids)} for p in params]
        self._ends = enlarged(self._ends, count, max(map(len, ends)), fill=_NO_TOKEN)
        widest = self._ends.shape[1]
        self._limits, self._lengths, self._stopped = (
            enlarged(table, count) for table in (self._limits, self._lengths, self._stopped)
        )
        index = torch.tensor(rows, dtype=torch.long, device=device)
        table = [[*sorted(row), *[_NO_TOKEN] * (widest - len(row))] for row in ends]
        self._ends[index] = torch.tensor(table, dtype=torch.long, device=device)
        self._limits[index] = torch.tensor([p.max_tokens for p in params], device=device)
        self._lengths[index], self._stopped[index] = 0, False
        for row, p in zip(rows, params, strict=True):
            self._texts.pop(row, None)
            if p.stop:
                self._texts[row] = p.stop

    def drop(self, rows: Sequence[int]) -> None:
        """Forget rows that have ended, which spares work that only they needed."""
        for row in rows:
            self._texts.pop(row, None)

    def unfinished(self, tokens: Tensor, rows: Tensor, step: int | Tensor) -> Tensor:
        """Check the newest token of the given rows; return the positions in ``rows`` that have not ended, ascending.

        Args:
            tokens: (bsz, max_tokens) tokens drawn so far, filled up to and including column ``step``.
            rows: (n,) rows that are still in the batch.
            step: position of the newest token, one for all rows or (n,).
        """
        was_unfinished = self._lengths[rows] == 0
        stops = (tokens[rows, step][:, None] == self._ends[rows]).any(-1)
        if self._texts:
            stops |= self._completes_text(tokens, rows, was_unfinished, step)
        ends_now = was_unfinished & (stops | (self._limits[rows] <= step + 1))
        self._lengths[rows] += ends_now * (step + 1)
        self._stopped[rows] |= ends_now & stops
        return (was_unfinished & ~ends_now).nonzero().squeeze(-1)

    def _completes_text(self, tokens: Tensor, rows: Tensor, was_unfinished: Tensor, step: int | Tensor) -> Tensor:
        completes = torch.zeros_like(was_unfinished)
        ends = (torch.zeros_like(rows) + step + 1).tolist()
        for index, (row, going, end) in enumerate(zip(rows.tolist(), was_unfinished.tolist(), ends, strict=True)):
            if going and (texts := self._texts.get(row)):
                tail = tokens[row, max(0, end - _tokens_to_decode(texts)) : end].tolist()
                completes[index] = completes_stop_text(tail, texts, self._tokenizer)
        return completes

    def results(
        self, drawn_count: int | Tensor = 0, rows: Tensor | None = None
    ) -> tuple[list[int], list[FinishReason]]:
        """Length and finish reason of each of the given rows, by default of all.

        An unfinished row has ``drawn_count`` tokens, one number for all rows or one for each, and reason "abort".
        """
        ends, stops = (self._lengths, self._stopped) if rows is None else (self._lengths[rows], self._stopped[rows])
        lengths = torch.where(ends == 0, drawn_count, ends)
        reasons: list[FinishReason] = [
            "abort" if length == 0 else "stop" if stopped else "length"
            for length, stopped in zip(ends.tolist(), stops.tolist(), strict=True)
        ]
        return lengths.tolist(), reasons


def completes_stop_text(tokens: list[int], texts: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> bool:
    """Return whether the last token completes one of the stop texts, provided that no earlier token did."""
    tail = tokenizer.decode(tokens[-_tokens_to_decode(texts) :])
    return any(text in tail for text in texts)


def _tokens_to_decode(texts: tuple[str, ...]) -> int:
    # A token has at least one byte of text, so a stop text of b bytes lies within the last b tokens.
    return max(len(text.encode()) for text in texts) + _CONTEXT_TOKENS
