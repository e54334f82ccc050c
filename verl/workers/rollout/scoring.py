"""Log-probs of given tokens under the model of a rollout engine: requests to an engine, and its answers.

A score is that of a forward pass: log softmax(logits / temperature) of each token after the tokens before it. Ids that
the tokenizer lacks (padding of the embedding) have no share of the distribution.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.protocol.shared import SharedTensors
from verl.workers.rollout.request import RolloutRequest, SamplingParams


@dataclass(frozen=True)
class ScoreRequest:
    """Tokens whose log-probs are asked for.

    Raises:
        RolloutError: there is no token to score, or none before it, or a number is out of range.
    """

    token_ids: list[int]
    """Tokens of prompt and response, without padding."""
    start: int
    """Place of the first token to score; at least 1, because a model needs a token to go on from."""
    top_k: int = 0
    """Number of the most likely tokens that are returned at each place."""
    temperature: float = 1.0
    """Divisor of the logits, above 0."""
    images: SharedTensors | None = None
    """See :attr:`RolloutRequest.images`."""
    text_places: tuple[int, ...] = ()
    """Places of tokens that have the id of images and stand for none, because the policy drew them."""

    def __post_init__(self) -> None:
        if not 1 <= self.start < len(self.token_ids):
            raise RolloutError(
                f"start={self.start} of {len(self.token_ids)} tokens: there must be a token to score, and one before "
                "it. Score the tokens of a response of at least one token after a prompt of at least one."
            )
        if self.top_k < 0:
            raise RolloutError(f"top_k={self.top_k} of a score must be a number of tokens, or 0 for none.")
        if not self.temperature > 0:
            raise RolloutError(f"temperature={self.temperature:g} of a score divides the logits. Use one above 0.")

    @property
    def scored_ids(self) -> list[int]:
        """The tokens whose log-probs are asked for."""
        return self.token_ids[self.start :]

    @property
    def as_prompt(self) -> RolloutRequest:
        """A request with these tokens as its prompt, which draws the one token that an engine must draw."""
        return RolloutRequest(
            self.token_ids,
            SamplingParams(max_tokens=1, seed=0, temperature=0.0),
            self.images,
            self.text_places,
        )


@dataclass(frozen=True)
class TokenScores:
    """Log-probs of the tokens of a :class:`ScoreRequest` from its ``start`` on."""

    log_probs: Tensor
    """(tokens,) float32."""
    top_ids: Tensor
    """(tokens, top_k) int32: the most likely tokens, by falling probability."""
    top_log_probs: Tensor
    """(tokens, top_k) float32."""

    @classmethod
    def from_report(
        cls,
        request: ScoreRequest,
        log_probs: Sequence[float],
        top: Sequence[Sequence[tuple[int, float]]],
        source: str,
    ) -> TokenScores:
        """Check and convert what an engine or endpoint reports.

        Args:
            request: what was asked.
            log_probs: of each scored token.
            top: the most likely tokens of each place and their log-probs, by falling probability; empty lists if none
                are asked for.
            source: who reports it, for messages.

        Raises:
            RolloutError: the numbers of tokens differ, or a log-prob is not finite.
        """
        count = len(request.scored_ids)
        widths = {len(entries) for entries in top}
        if len(log_probs) != count or len(top) != count or widths != {request.top_k}:
            raise RolloutError(
                f"{source} gave {len(log_probs)} log-probs and {sorted(widths)} most likely tokens for {count} tokens, "
                f"and was asked for top_k={request.top_k}."
            )
        values = torch.tensor(log_probs, dtype=torch.float32)
        if not bool(values.isfinite().all()):
            token_index = int((~values.isfinite()).nonzero()[0])
            raise RolloutError(
                f"{source} gave log-prob {float(values[token_index])} to token {request.scored_ids[token_index]}: its "
                "logits are not finite, or its tokenizer lacks this token. Scoring needs a model of the policy's "
                "vocabulary."
            )
        shape = (count, request.top_k)
        ids = torch.tensor([[token for token, _ in entries] for entries in top], dtype=torch.int32)
        tops = torch.tensor([[value for _, value in entries] for entries in top], dtype=torch.float32)
        return cls(values, ids.reshape(shape), tops.reshape(shape))


# vLLM's servers report a log-prob of nan or minus infinity as -9999.
_NOT_FINITE = -9000.0


def by_temperature(requests: Mapping[int, ScoreRequest]) -> Iterator[tuple[float, dict[int, ScoreRequest]]]:
    """Yield each temperature of the requests, ascending, with its requests: an engine follows one at a time."""
    for temperature in sorted({request.temperature for request in requests.values()}):
        yield temperature, {index: request for index, request in requests.items() if request.temperature == temperature}


def finite_or_not(reported: float | None) -> float:
    """Return a log-prob as vLLM's and SGLang's servers report it, minus infinity where it is not finite."""
    return reported if reported is not None and reported > _NOT_FINITE else -math.inf


def scores_of_prompt(
    request: ScoreRequest,
    places: Sequence[Mapping[str, Mapping[str, Any]] | None],
    source: str,
    vocab_size: int | None = None,
) -> TokenScores:
    """Read the log-probs of a prompt in vLLM's format.

    Args:
        request: what was asked.
        places: of each place of the prompt its token and the most likely ones, by id: ``logprob`` and ``rank``.
        source: who reports them, for messages.
        vocab_size: ids below it may be among the most likely ones; None for all.

    Raises:
        RolloutError: they are incomplete or not finite, or an id is not below ``vocab_size``.
    """
    log_probs: list[float] = []
    top: list[list[tuple[int, float]]] = []
    for token, entries in zip(request.scored_ids, places[request.start :], strict=False):
        by_id = {int(token_id): entry for token_id, entry in (entries or {}).items()}
        # The scored token is added if it is not among the most likely ones; one of equal score may have its rank.
        likely = by_id if len(by_id) <= request.top_k else {i: e for i, e in by_id.items() if i != token}
        ranked = sorted(likely.items(), key=lambda item: item[1]["rank"])
        log_probs.append(finite_or_not(by_id[token]["logprob"] if token in by_id else None))
        top.append([(i, finite_or_not(e["logprob"])) for i, e in ranked])
        if vocab_size is not None and (beyond := [i for i, _ in ranked if i >= vocab_size]):
            raise RolloutError(
                f"{source} has token {beyond[0]} among the {request.top_k} most likely ones of a place, and the policy "
                f"knows the ids below {vocab_size}: padding of this model's embedding has probability. Take a "
                "divergence of sampled tokens, or another model."
            )
    return TokenScores.from_report(request, log_probs, top, source)  # which compares the numbers


@dataclass(frozen=True)
class ScoreRule:
    """Rule by which an engine makes a distribution of its logits, for scores alone."""

    temperature: float = 1.0
    unknown_ids: tuple[int, ...] = ()
    """Ids that have no share of the distribution."""
