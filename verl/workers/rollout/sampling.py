"""Draw next tokens for a batch of rows, each with its own parameters and its own random numbers.

Everything that decides a token comes from the row itself: its logits, its parameters, and the t-th
number of its own generator. So a response does not change with the order, the size or the split of the
batch, nor with the number of ranks.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:  # PyTorch alone is needed at run time: SGLang's processes load this file too
    from verl.workers.rollout.base import SamplingParams

_CHUNK_ELEMENTS = 1 << 24
"""Rows × vocabulary that are worked on at once in float64: 128 MiB for each temporary."""


def sample_seed(global_seed: int, step: int, uid: object, sample_index: int) -> int:
    """Seed in [0, 2^63) of one response, the same in every process and on every machine.

    Args:
        global_seed: of the run.
        step: training step, so that a prompt that comes again gets other responses.
        uid: id of the prompt.
        sample_index: position among the siblings of the prompt.
    """
    text = f"{global_seed}|{step}|{uid}|{sample_index}".encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def uniforms(seed: int, count: int) -> Tensor:
    """The first ``count`` random numbers in [0, 1) of a response, float64 on the CPU; a longer draw starts alike."""
    return torch.rand(count, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def kept_tokens(probs: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor) -> Tensor:
    """Which tokens may be drawn.

    Tokens are ranked by probability, the lower id first among equals. Those with at least ``min_p`` of the first
    one's probability stay; of those the first ``top_k``; of those the shortest beginning of the ranking whose mass
    reaches ``top_p`` of theirs. The first token always stays.

    Args:
        probs: (rows, vocab).
        top_k: (rows,); 0 or less keeps all.
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
    mass_before = torch.cat([torch.zeros_like(ranked[:, :1]), ranked.cumsum(-1)[:, :-1]], dim=-1)
    within_p = (mass_before < top_p[:, None] * ranked.sum(-1, keepdim=True)) | (top_p[:, None] >= 1)
    return torch.zeros_like(within_k).scatter(-1, order, within_k & within_p)


def inverse_cdf(probs: Tensor, uniform: Tensor) -> Tensor:
    """The token v with Σ_{w<v} p_w ≤ u·Σ p < Σ_{w≤v} p_w, in the order of token ids.

    A token of probability 0 is never drawn. The order of ids, unlike that of probabilities, does not
    change when rounding swaps two nearly equal tokens.

    Args:
        probs: (rows, vocab) float64, not necessarily normalised.
        uniform: (rows,) float64 in [0, 1).

    Returns:
        (rows,) int64.
    """
    cdf = probs.cumsum(-1)
    total = cdf[:, -1:]
    target = torch.minimum(uniform[:, None] * total, total.nextafter(torch.zeros_like(total)))
    drawn = torch.searchsorted(cdf, target, right=True).squeeze(-1)
    return drawn.clamp(max=probs.shape[-1] - 1)  # NaN alone gets here out of range; the engine reports it


class TokenSampler:
    """Next tokens of a batch whose rows may leave.

    Args:
        params: of each row.
        device: of the logits.
        raw: return the log-probs of softmax(logits) instead of those of the distribution that is drawn from.
        never: ids that are not drawn, as if their logits were -∞.
    """

    def __init__(
        self, params: list[SamplingParams], device: torch.device, raw: bool = False, never: Sequence[int] = ()
    ) -> None:
        self._raw = raw
        self._never = torch.tensor(never, dtype=torch.long, device=device)
        self._all_greedy, self._some_greedy = (f(p.is_greedy for p in params) for f in (all, any))
        self._truncates = any(p.truncates for p in params)
        self._greedy = torch.tensor([p.is_greedy for p in params], device=device)
        self._temperature = torch.tensor([p.temperature or 1.0 for p in params], dtype=torch.float32, device=device)
        # A greedy row keeps all tokens: its log-probs are those of softmax(logits).
        self._top_k = torch.tensor([p.top_k if p.truncates else -1 for p in params], device=device)
        self._top_p, self._min_p = (
            torch.tensor(values, dtype=torch.float64, device=device)
            for values in zip(*((p.top_p, p.min_p) if p.truncates else (1.0, 0.0) for p in params), strict=True)
        )
        self._uniforms = torch.zeros(len(params), max(p.max_tokens for p in params), dtype=torch.float64)
        for row, p in zip(self._uniforms, params, strict=True):
            if not p.is_greedy:
                row[: p.max_tokens] = uniforms(p.seed, p.max_tokens)
        self._uniforms = self._uniforms.to(device)

    def __call__(self, logits: Tensor, rows: Tensor, step: int | Tensor) -> tuple[Tensor, Tensor]:
        """Draw the ``step``-th token of the given rows.

        Args:
            logits: (len(rows), vocab).
            rows: (n,) which of the sampler's rows these are.
            step: position in the response; of all rows, or (n,) of each.

        Returns:
            tokens (n,) int64 and their log-probs (n,) float32: see :class:`RolloutOutput`.
        """
        size = max(1, _CHUNK_ELEMENTS // logits.shape[-1])
        steps = step if isinstance(step, Tensor) else torch.full_like(rows, step)
        if len(rows) <= size:
            return self._draw(logits, rows, steps)
        parts = [self._draw(*p) for p in zip(logits.split(size), rows.split(size), steps.split(size), strict=True)]
        tokens, log_probs = zip(*parts, strict=True)
        return torch.cat(tokens), torch.cat(log_probs)

    def _draw(self, logits: Tensor, rows: Tensor, steps: Tensor) -> tuple[Tensor, Tensor]:
        scaled = logits.float() / self._temperature[rows, None]
        if len(self._never):
            scaled.index_fill_(-1, self._never, -torch.inf)
        log_probs = scaled.log_softmax(-1)
        log_kept_mass = log_probs.new_zeros(len(rows))
        if self._all_greedy:
            tokens = log_probs.argmax(-1)
        else:
            probs = log_probs.double().exp()
            if self._truncates:
                mass = probs.sum(-1)
                probs = probs * kept_tokens(probs, self._top_k[rows], self._top_p[rows], self._min_p[rows])
                log_kept_mass = (probs.sum(-1) / mass).log()  # exactly 0 where all tokens are kept
            tokens = inverse_cdf(probs, self._uniforms[rows, steps])
            if self._some_greedy:
                tokens = torch.where(self._greedy[rows], log_probs.argmax(-1), tokens)
        if self._raw:
            log_probs, log_kept_mass = logits.float().log_softmax(-1), torch.zeros_like(log_kept_mass)
        return tokens, (log_probs.gather(-1, tokens[:, None]).squeeze(-1) - log_kept_mass).float()
