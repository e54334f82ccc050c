"""The turns of the policy in a trajectory, and which tokens of a sequence it drew."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.datasets.chat import common_prefix_length
from verl.protocol.shared import SharedTensors
from verl.workers.rollout.request import NO_WEIGHTS, NOT_KEPT, SamplingParams, widened
from verl.workers.routers import unknown


@dataclass(frozen=True)
class DrawnTurn:
    """A response as it was asked for and drawn."""

    prompt_ids: list[int]
    token_ids: list[int]
    log_probs: list[float]
    weight_version: int
    seconds: float = 0.0
    """Time from the call to the answer."""
    began: float = 0.0
    """Time of its request, in seconds since 1970."""
    images: SharedTensors | None = None
    """``pixel_values`` and ``image_grid_thw`` of the images that it was asked with; None: none."""
    num_preempted: int | None = None
    """Preemptions by the engine for want of memory; None where the engine does not tell."""
    routed_experts: Tensor | None = None
    """(tokens of prompt and response, layers, experts per token), if the engine records them; see
    :mod:`verl.workers.routers`."""
    sampling: SamplingParams | None = None
    """Sampling parameters; None stands for those of calls that name none."""
    weight_versions: list[int] | None = None
    """Version of the weights that drew each token; None: ``weight_version``."""

    kept_ids: Tensor | None = None
    """(drawn tokens, K) ids that truncated sampling kept, if they are recorded; see
    :class:`~verl.workers.rollout.request.RolloutOutput`."""

    @property
    def version_of_each(self) -> list[int]:
        """Version of the weights that drew each token."""
        return [self.weight_version] * len(self.token_ids) if self.weight_versions is None else self.weight_versions


def preemptions(turns: Sequence[DrawnTurn]) -> int:
    """Return how often engines interrupted the turns of a trajectory; -1 where one does not tell, or without turns.

    >>> turns = [DrawnTurn([1], [2], [-0.5], 0, num_preempted=number) for number in (2, 1, None)]
    >>> preemptions(turns[:2]), preemptions(turns), preemptions([])
    (3, -1, -1)
    """
    counts = [turn.num_preempted for turn in turns if turn.num_preempted is not None]
    return sum(counts) if counts and len(counts) == len(turns) else -1


def drawn_log_probs(tokens: Sequence[int], turns: Sequence[DrawnTurn]) -> list[float | None]:
    """Return the log-prob of each token that the policy drew after exactly the tokens before it; None for others."""
    log_probs: list[float | None] = [None] * len(tokens)
    for turn, span in _drawn_parts(tokens, turns):
        log_probs[span] = turn.log_probs[: span.stop - span.start]
    return log_probs


def drawn_weight_versions(tokens: Sequence[int], turns: Sequence[DrawnTurn]) -> list[int]:
    """Return the version of the weights that drew each token after exactly the tokens before it; -1 for others."""
    versions = [NO_WEIGHTS] * len(tokens)
    for turn, span in _drawn_parts(tokens, turns):
        versions[span] = turn.version_of_each[: span.stop - span.start]
    return versions


def drawn_kept_ids(tokens: Sequence[int], turns: Sequence[DrawnTurn]) -> Tensor | None:
    """Return the ids that sampling kept for each token that the policy drew after exactly the tokens before it.

    Returns:
        (tokens, K) int32; -1 for other tokens. None if no turn recorded any.
    """
    widths = [turn.kept_ids.shape[1] for turn in turns if turn.kept_ids is not None]
    if not widths:
        return None
    kept_ids = torch.full((len(tokens), max(widths)), NOT_KEPT, dtype=torch.int32)
    for turn, span in _drawn_parts(tokens, turns):
        if turn.kept_ids is not None:
            kept_ids[span] = widened(turn.kept_ids[: span.stop - span.start], max(widths))
    return kept_ids


def oldest_version(turns: Sequence[DrawnTurn]) -> int:
    """Return the oldest version of the weights that drew a turn; -1 without turns."""
    return min((turn.weight_version for turn in turns), default=NO_WEIGHTS)


def _drawn_parts(tokens: Sequence[int], turns: Sequence[DrawnTurn]) -> Iterator[tuple[DrawnTurn, slice]]:
    """Yield the turns of which a sequence has tokens, after exactly the tokens that were before them, and where."""
    written = list(tokens)
    for turn in turns:
        start, end = len(turn.prompt_ids), len(turn.prompt_ids) + len(turn.token_ids)
        tokens_of_turn = written[start:end]
        if (
            tokens_of_turn
            and tokens_of_turn == turn.token_ids[: len(tokens_of_turn)]
            and written[:start] == turn.prompt_ids
        ):
            yield turn, slice(start, start + len(tokens_of_turn))


def sampled_like(turns: Sequence[DrawnTurn], sampling: SamplingParams) -> list[DrawnTurn]:
    """Return the turns whose tokens were drawn from the probabilities of ``sampling``."""
    return [turn for turn in turns if (turn.sampling or sampling).distribution_params == sampling.distribution_params]


def drawn_routing(tokens: Sequence[int], turns: Sequence[DrawnTurn]) -> Tensor | None:
    """Return the experts of each token of a sequence as the turns recorded them; None if none did.

    The experts of a token follow from the tokens up to it, so a turn tells those of its common beginning with the
    sequence. Where several turns computed a token the first one counts, with whose states the policy drew.

    Returns:
        (tokens, layers, experts per token); unknown where no turn computed the token, such as the last one drawn.
    """
    recorded = [turn for turn in turns if turn.routed_experts is not None]
    if not recorded:
        return None
    first = recorded[0].routed_experts
    assert first is not None
    routing = torch.full((len(tokens), *first.shape[1:]), unknown(first.dtype), dtype=first.dtype)
    for turn in recorded:
        count = common_prefix_length([*turn.prompt_ids, *turn.token_ids], tokens)
        is_recorded = routing[:count] != unknown(first.dtype)
        assert turn.routed_experts is not None
        routing[:count] = torch.where(is_recorded, routing[:count], turn.routed_experts[:count])
    return routing
