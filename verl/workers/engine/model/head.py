"""Log-probs and entropies of chosen tokens from hidden states, without all logits (tokens x vocabulary) in memory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor
from transformers import PretrainedConfig

if TYPE_CHECKING:
    from verl.base.types import AutogradContext

CHUNK_ELEMENTS, GPU_CHUNK_ELEMENTS = 2**25, 2**27
"""Largest number of logits computed at once on a CPU (128 MiB in fp32) and on a GPU (512 MiB).

After each chunk its part of the weight's gradient is added to the sum, which has the size of the weight: on an H200, 33
additions of an fp32 sum of 0.6 GB took 5 % of a step with 8,192 tokens.
"""


def chunk_rows(weight: Tensor, chunk_elements: int | None = None) -> int:
    """Return how many tokens' logits are computed at once with this ``weight`` (V, H): at least 1.

    ``chunk_elements`` is the largest number of logits; None takes that of the weight's device.
    """
    max_elements = chunk_elements or (CHUNK_ELEMENTS if weight.device.type == "cpu" else GPU_CHUNK_ELEMENTS)
    return max(1, max_elements // weight.shape[0])


@dataclass(frozen=True)
class LogitRule:
    """The transformation that a model applies to logits z after the output projection: c·tanh(s·z / c).

    s is ``scale``, c is ``softcap``; without a soft cap it is s·z.
    """

    scale: float = 1.0
    softcap: float | None = None

    @classmethod
    def from_config(cls, config: PretrainedConfig) -> LogitRule:
        """Read the rule from a Transformers config (Gemma's soft cap, Cohere's and Granite's scale)."""
        text = config.get_text_config()
        scale = getattr(text, "logit_scale", None) or getattr(text, "lm_head_multiplier", None) or 1.0
        divisor = getattr(text, "logits_scaling", None) or 1.0
        return cls(scale / divisor, getattr(text, "final_logit_softcapping", None))

    def apply_(self, logits: Tensor) -> Tensor:
        """Apply the rule in place."""
        if self.scale != 1.0:
            logits.mul_(self.scale)
        if self.softcap is not None:
            logits.div_(self.softcap).tanh_().mul_(self.softcap)
        return logits

    def backward_(self, grad: Tensor, logits: Tensor) -> Tensor:
        """Backpropagate through the rule, in place; ``logits`` are those after the rule."""
        if self.softcap is not None:
            grad.mul_(1 - (logits / self.softcap).square_())
        return grad.mul_(self.scale) if self.scale != 1.0 else grad


PLAIN_LOGITS = LogitRule()
"""Logits are the projection itself."""


class TopTokens(NamedTuple):
    """Number of the most likely tokens that are returned, and the ids that they are taken from."""

    count: int
    below: int | None = None
    """The ids below this one are the vocabulary, over which every output is normalised; None for all rows of the output
    matrix."""


NO_TOP = TopTokens(0)


class TokenStatistics(NamedTuple):
    """Statistics of N tokens, (N,) fp32 each if nothing else is said; None if not requested."""

    log_probs: Tensor
    """log p(target)."""
    entropy: Tensor | None
    """H(p) in nats."""
    sum_pi_squared: Tensor | None
    """Σ_v p(v)² over the vocabulary; not differentiable."""
    topk_log_probs: Tensor | None = None
    """(N, K) log p of the ``candidates``."""
    agreement: Tensor | None = None
    """1 where no token is more likely than the first of the ``candidates``, else 0."""
    top_ids: Tensor | None = None
    """(N, top.count) the most likely tokens, int64, the most likely first."""
    top_log_probs: Tensor | None = None
    """(N, top.count) their log-probs; not differentiable."""


def token_log_probs(
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    temperature: float = 1.0,
    with_entropy: bool = False,
    with_sum_pi_squared: bool = False,
    rule: LogitRule = PLAIN_LOGITS,
    chunk_elements: int | None = None,
    candidates: Tensor | None = None,
    top: TopTokens = NO_TOP,
) -> TokenStatistics:
    """Compute log p(target), H(p) and Σ p² for p = softmax(rule(hidden Wᵀ + b) / temperature), in fp32.

    At most ``chunk_elements`` logits (see :func:`chunk_rows`) are computed at a time, and again in the backward pass,
    whose gradients are

        ∂ log p(y) / ∂z = 1_y - p          ∂H / ∂z = -p (log p + H)

    Shapes: ``hidden`` (N, H), ``weight`` W (V, H), ``bias`` b (V,), ``targets`` (N,). One row of V logits is computed
    at once even if ``chunk_elements`` is smaller.

    With ``candidates`` (N, K), token ids, also log p of each of them, differentiable. With ``top`` also the most
    likely tokens.
    """
    request = StatisticsRequest(with_entropy, with_sum_pi_squared, candidates is not None, top)
    settings = temperature, request, rule, chunk_rows(weight, chunk_elements)
    return request.statistics(_TokenLogProbs.apply(hidden, weight, bias, stacked(targets, candidates), settings))  # type: ignore[misc]


def over_kept(full: TokenStatistics, kept_ids: Tensor) -> TokenStatistics:
    """Normalise the log-probs of targets over the tokens that truncated sampling kept.

        log p(y) - log Σ_{v kept} p(v)

    Entropy and Σ p² stay those of the whole vocabulary.

    Args:
        full: with ``topk_log_probs`` of ``kept_ids``, of any id where that is -1.
        kept_ids: (N, K) ids, then -1; a token whose ids are all -1 keeps the whole vocabulary.
    """
    assert full.topk_log_probs is not None
    is_known = kept_ids[:, :1] >= 0
    # Where no id is known, all stay finite: the gradient of -∞ - (-∞) would be NaN.
    log_probs = full.topk_log_probs.masked_fill(is_known & (kept_ids < 0), -torch.inf)
    log_mass = torch.where(is_known.squeeze(-1), log_probs.logsumexp(-1), 0.0)
    return full._replace(log_probs=full.log_probs - log_mass, topk_log_probs=None, agreement=None)


class StatisticsRequest(NamedTuple):
    """Statistics that are computed beside the log-probs of targets."""

    entropy: bool
    sum_pi_squared: bool
    candidates: bool
    top: TopTokens

    def statistics(self, values: Sequence[Tensor]) -> TokenStatistics:
        """Name log-probs (N, 1 + K), entropy, Σ p², agreement, top ids and their log-probs; drop what is not wanted."""
        log_probs, entropy, squares, agreement, top_ids, top_log_probs = values
        return TokenStatistics(
            log_probs=log_probs[:, 0],
            entropy=entropy if self.entropy else None,
            sum_pi_squared=squares if self.sum_pi_squared else None,
            topk_log_probs=log_probs[:, 1:] if self.candidates else None,
            agreement=agreement if self.candidates else None,
            top_ids=top_ids if self.top.count else None,
            top_log_probs=top_log_probs if self.top.count else None,
        )


def stacked(targets: Tensor, candidates: Tensor | None) -> Tensor:
    """Put targets (N,) and candidates (N, K) side by side, int64."""
    column = targets.long().unsqueeze(-1)
    return column if candidates is None else torch.cat([column, candidates.long()], dim=-1)


class _TokenLogProbs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: AutogradContext[tuple[float, LogitRule, int, torch.dtype]],
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        settings: tuple[float, StatisticsRequest, LogitRule, int],
    ) -> tuple[Tensor, ...]:
        temperature, request, rule, rows = settings
        wide = torch.promote_types(hidden.dtype, torch.float32)
        log_probs = hidden.new_empty(targets.shape, dtype=wide)
        log_z, entropy, squares, agreement = (hidden.new_empty(len(hidden), dtype=wide) for _ in range(4))
        top_ids = targets.new_empty(len(hidden), request.top.count)
        top_log_probs = log_probs.new_empty(top_ids.shape)
        for start in range(0, len(hidden), rows):
            part = slice(start, start + rows)
            logits = logits_of(hidden[part], weight, bias, rule, wide).div_(temperature)
            log_z[part] = logits.logsumexp(-1)
            target_logits = logits.gather(-1, targets[part])
            log_probs[part] = target_logits - log_z[part].unsqueeze(-1)
            if request.candidates:
                agreement[part] = (target_logits[:, 1] == logits.amax(-1)).to(wide)
            if request.top.count:
                values, top_ids[part] = logits.topk(request.top.count)
                top_log_probs[part] = values - log_z[part].unsqueeze(-1)
            if request.sum_pi_squared:
                # Σ p² = Z(2z) / Z(z)² with Z(z) = Σ exp z, computed in log space so that it cannot overflow.
                squares[part] = (logits.mul(2).logsumexp(-1) - 2 * log_z[part]).exp()
            if request.entropy:
                logits.sub_(log_z[part].unsqueeze(-1))
                entropy[part] = -(logits.exp().mul_(logits)).sum(-1)
        ctx.save_for_backward(hidden, weight, bias, targets, log_z, entropy)
        ctx.settings = temperature, rule, rows, wide
        ctx.set_materialize_grads(False)
        if not request.entropy:
            entropy = entropy.new_empty(0)
            ctx.mark_non_differentiable(entropy)
        ctx.mark_non_differentiable(squares, agreement, top_ids, top_log_probs)
        return log_probs, entropy, squares, agreement, top_ids, top_log_probs

    @staticmethod
    def backward(
        ctx: AutogradContext[tuple[float, LogitRule, int, torch.dtype]], *grads: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        temperature, rule, rows, wide = ctx.settings
        return logit_gradients(ctx.saved_tensors, 0, temperature, rule, rows, wide, ctx.needs_input_grad[1], grads)


def logit_gradients(
    saved: Sequence[Tensor],
    first: int,
    temperature: float,
    rule: LogitRule,
    rows: int,
    wide: torch.dtype,
    needs_weight: bool,
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of hidden states, weight and bias, then None for ids and settings.

    Args:
        saved: hidden (N, H), weight (V, H), bias (V,) or None, ids (N, C) whose log-probs were returned, and (N,) each
            log Σ exp z and entropies. Of a vocabulary that ranks divide weight and bias are this rank's part.
        first: the id of the first row of the weight.
        temperature: divisor of the logits.
        rule: what the model does to its logits.
        rows: tokens whose logits are computed at once.
        wide: format of the logits.
        needs_weight: whether the weight has a gradient.
        grads: of the log-probs (N, C), and of the entropies (N,); others are not read.
    """
    hidden, weight, bias, targets, log_z, entropy = saved
    grad_log_probs, grad_entropy, *_ = grads
    grad_hidden = torch.zeros_like(hidden)
    # Sums over chunks are in fp32: in bf16 the gradient over 75 chunks has an error of 1 %.
    grad_weight = torch.zeros_like(weight, dtype=wide) if needs_weight else None
    grad_bias = torch.zeros_like(bias, dtype=wide) if bias is not None else None
    for start in range(0, len(hidden), rows):
        part = slice(start, start + rows)
        log_p = logits_of(hidden[part], weight, bias, rule, wide)
        logits = log_p.clone() if rule.softcap is not None else log_p  # read by the rule if it has a soft cap
        log_p.div_(temperature).sub_(log_z[part].unsqueeze(-1))
        grad, p = torch.zeros_like(log_p), log_p.exp()
        # ∂ log p(y) / ∂z = 1_y - p          ∂H / ∂z = -p (log p + H)
        if grad_entropy is not None:
            torch.mul(p, log_p + entropy[part].unsqueeze(-1), out=grad)
            grad.mul_(-grad_entropy[part].unsqueeze(-1))
        if grad_log_probs is not None:
            grad.addcmul_(p, grad_log_probs[part].sum(-1, keepdim=True), value=-1)
            column, is_here = columns_of(targets[part], first, len(weight))
            if len(weight):
                grad.scatter_add_(-1, column, torch.where(is_here, grad_log_probs[part], 0))
        grad = rule.backward_(grad.div_(temperature), logits).to(hidden.dtype)
        grad_hidden[part] = grad @ weight
        if grad_weight is not None:
            add_product_(grad_weight, grad.t(), hidden[part])
        if grad_bias is not None:
            grad_bias += grad.sum(0, dtype=wide)
    grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
    grad_bias = None if grad_bias is None or bias is None else grad_bias.to(bias.dtype)
    return grad_hidden, grad_weight, grad_bias, None, None


def columns_of(targets: Tensor, first: int, count: int) -> tuple[Tensor, Tensor]:
    """Column of each target among ``count`` tokens from ``first`` on, and whether it is there; (N, C) both."""
    columns = targets - first
    is_here = (columns >= 0) & (columns < count)
    return torch.where(is_here, columns, 0), is_here


def add_product_(total: Tensor, a: Tensor, b: Tensor) -> None:
    """Add a·b to ``total``, which may have a wider format than the factors."""
    if total.dtype == a.dtype:
        total.addmm_(a, b)
    else:
        total.add_(a @ b)


def logits_of(hidden: Tensor, weight: Tensor, bias: Tensor | None, rule: LogitRule, dtype: torch.dtype) -> Tensor:
    """Compute the logits of tokens, rule(hidden Wᵀ + b), in ``dtype``."""
    return rule.apply_(torch.nn.functional.linear(hidden, weight, bias).to(dtype))
