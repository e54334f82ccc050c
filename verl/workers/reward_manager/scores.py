"""Check the results of reward functions, and place the scores on tokens of the responses."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch

from verl.errors import RewardError
from verl.supervision.killable_pool import CallResult, Status

FORMS = (
    "A reward function has one of three forms: per sample, "
    "(data_source, solution_str, ground_truth, extra_info, **kwargs) -> float or dict with 'score' (may be async); "
    "per batch of texts, (data_sources, solution_strs, ground_truths, extra_infos, **kwargs) -> list of these; "
    "or per batch, (data: DataProto, **kwargs) -> Tensor of (batch size,) or (batch size, response length)."
)
UNUSABLE = (RewardError, ValueError, TypeError, OverflowError, RuntimeError)
"""Exceptions of checking a result, which may be any JSON value since untrusted code returned it."""
MAX_SCORE = math.sqrt(torch.finfo(torch.float32).max)
"""Largest size of a score, 1.8e19: its square, which variances need, must be finite in float32."""


@dataclass(frozen=True)
class Score:
    """Result of one sample: a finite score, or 0 with ``status`` and ``error``."""

    value: float
    extra: dict[str, object] = field(default_factory=dict)
    error: str | None = None
    status: Status = "ok"
    turn_scores: tuple[float, ...] | None = None
    """A score for each turn of the policy, if the function returned them; ``value`` is their sum."""

    @classmethod
    def failed(cls, status: Status, error: str) -> Score:
        """Result of a sample that could not be scored."""
        return cls(0.0, error=error, status=status)


@dataclass(frozen=True)
class Scores:
    """Results of a batch: one per sample, and the token scores (bsz, response_length) once they are placed."""

    samples: list[Score]
    tokens: torch.Tensor | None = None


def score_of(result: CallResult) -> Score:
    """Convert the result of a call of a per-sample function."""
    return checked_score(result.value) if result.status == "ok" else Score.failed(result.status, result.message)


def checked_score(result: object) -> Score:
    """Convert a result by :func:`to_score`; an invalid one gives a failed sample."""
    try:
        return to_score(result)
    except UNUSABLE as error:
        return Score.failed("error", f"{type(error).__name__}: {error}")


def to_score(result: object) -> Score:
    """Check and convert the result of a per-sample function.

    Args:
        result: a number of at most :data:`MAX_SCORE` in size; or a dict whose ``score`` is one, or that has
            ``turn_scores``, a number for each turn of the policy, whose sum is the score.

    Raises:
        RewardError: the result is anything else.
    """
    if not isinstance(result, Mapping):
        return Score(usable(result))
    if "reward_status" in result:
        raise RewardError("the reward function returned 'reward_status', which the reward manager sets. Rename it.")
    extra = {name: value for name, value in result.items() if name not in ("score", "turn_scores")}
    turns = result.get("turn_scores")
    if turns is None:
        if "score" not in result:
            raise RewardError(
                f"the reward function returned a dict without 'score'; it has: {', '.join(map(str, result))}."
            )
        return Score(usable(result["score"]), extra)
    if not isinstance(turns, list):
        raise RewardError(f"the reward function returned turn_scores={turns!r:.100}, not a list of numbers.")
    values = tuple(usable(turn) for turn in turns)
    score = usable(result.get("score", math.fsum(values)))
    if not math.isclose(score, math.fsum(values), rel_tol=1e-6, abs_tol=1e-6):  # up to rounding
        raise RewardError(
            f"the reward function returned score={score:g}, and turn_scores whose sum is {math.fsum(values):g}. Leave "
            "'score' out, or give it another name if it is only to be logged."
        )
    return Score(score, extra, turn_scores=values)


def token_scores(scores: torch.Tensor, response_mask: torch.Tensor, present: torch.Tensor | None = None) -> Scores:
    """Build scores from token scores; a sample with a score that is not usable fails and gets 0.

    Args:
        scores: (bsz, response_length).
        response_mask: 1 on tokens that the policy drew.
        present: 1 on all tokens of the response, by default the same. Scores of tokens that the policy did not draw are
            moved by :func:`on_drawn_tokens`, others are left out.
    """
    response_scores = torch.where((response_mask if present is None else present).bool(), scores, 0.0)
    tokens = torch.where(response_mask.bool(), on_drawn_tokens(response_scores, response_mask), 0.0)
    checked = [checked_score(value) for value in row_scores(tokens)]
    ok = torch.tensor([score.error is None for score in checked], device=tokens.device)
    return Scores(checked, torch.where(ok.unsqueeze(-1), tokens, 0.0).float())


def on_drawn_tokens(scores: torch.Tensor, response_mask: torch.Tensor) -> torch.Tensor:
    """Move each score to a token that the policy drew: the last before it, or the first if there is none before.

    Code that knows no ``response_mask`` places a score on the last token of a response, which may be one of a tool, of
    a user or of the chat template. Nothing is learned from such a token, so the score would be lost.

    Args:
        scores: (bsz, response_length).
        response_mask: (bsz, response_length) 1 on tokens that the policy drew.

    Returns:
        scores of the same sums; a row without a drawn token stays as it is.

    >>> on_drawn_tokens(torch.tensor([[1.0, 0.0, 2.0], [3.0, 0.0, 0.0]]), torch.tensor([[1, 0, 0], [0, 1, 0]]))
    tensor([[3., 0., 0.],
            [0., 3., 0.]])
    """
    is_drawn = response_mask.to(scores.device).bool()
    places = torch.arange(is_drawn.shape[1], device=scores.device)
    before = torch.where(is_drawn, places, -1).cummax(-1).values
    first = is_drawn.long().argmax(-1, keepdim=True) if is_drawn.shape[1] else before
    moved = torch.zeros_like(scores).scatter_add(1, torch.where(before >= 0, before, first), scores)
    return torch.where(is_drawn.any(-1, keepdim=True), moved, scores)


def row_scores(tokens: torch.Tensor) -> list[float]:
    """Sum the token scores of each row; a row with a value that is not :func:`usable` gives the first such value."""
    values = tokens.to(torch.promote_types(tokens.dtype, torch.float32))
    bad = ~(values.abs() <= MAX_SCORE)  # also NaN
    first = values.gather(-1, bad.long().argmax(-1, keepdim=True)).squeeze(-1)
    return torch.where(bad.any(-1), first.double(), values.sum(-1, dtype=torch.float64)).tolist()


def on_turns(score: Score, turns: int) -> Score:
    """Return the score, or a failed one if it has ``turn_scores`` for another number of turns."""
    if score.turn_scores is None or len(score.turn_scores) == turns:
        return score
    return Score.failed(
        "error",
        f"the reward function returned {len(score.turn_scores)} turn_scores, but the policy had {turns} turns "
        "(runs of ones in response_mask).",
    )


def on_last_token(response_mask: torch.Tensor, scores: Sequence[float]) -> torch.Tensor:
    """Place each score on the last token that the policy chose; the score of an empty response is lost.

    Args:
        response_mask: (bsz, response_length) 1 on tokens that the policy chose.
        scores: one per sample.

    Returns:
        (bsz, response_length) float32.

    >>> on_last_token(torch.tensor([[1, 1, 0], [0, 0, 0]]), [0.5, 1.0])
    tensor([[0.0000, 0.5000, 0.0000],
            [0.0000, 0.0000, 0.0000]])
    """
    places = torch.arange(1, response_mask.size(1) + 1)
    last = (response_mask.cpu().bool() * places).amax(-1, keepdim=True)  # (bsz, 1), counted from 1; 0 for none
    return (places == last) * torch.tensor(scores, dtype=torch.float32).unsqueeze(-1)


def place_scores(scores: Scores, response_mask: torch.Tensor) -> Scores:
    """Place the scores on tokens, unless they are placed already.

    A score goes on the policy's last token, ``turn_scores`` on the last token of each of its turns, which are the
    runs of ones in ``response_mask``. If the number of scores and turns differ, the sample fails.
    """
    if scores.tokens is not None:
        return scores
    mask = response_mask.cpu().bool()
    samples = list(scores.samples)
    tokens = on_last_token(mask, [score.value for score in samples])
    ends = mask & ~torch.nn.functional.pad(mask[:, 1:], (0, 1))
    for row, score in enumerate(samples):
        if score.turn_scores is None:
            continue
        samples[row] = on_turns(score, int(ends[row].sum()))
        tokens[row] = 0.0
        if samples[row].status == "ok":
            tokens[row, ends[row]] = torch.tensor(score.turn_scores, dtype=torch.float32)
    return Scores(samples, tokens)


def extra_info(scores: Sequence[Score]) -> dict[str, list[object]]:
    """Collect score, status and further values as one list per name; None if a sample lacks the value."""
    names = dict.fromkeys(name for score in scores for name in score.extra)
    columns: dict[str, list[object]] = {name: [score.extra.get(name) for score in scores] for name in names}
    columns["score"] = [score.value for score in scores]
    columns["reward_status"] = [score.status for score in scores]
    return columns


def usable(value: object) -> float:
    """Return a score as float.

    Raises:
        RewardError: it is no number, not finite, or larger than :data:`MAX_SCORE`.
    """
    if not isinstance(value, (int, float)):
        raise RewardError(f"the reward function returned {type(value).__name__} {value!r:.100}, not a number. {FORMS}")
    if isinstance(value, float) and not math.isfinite(value):
        raise RewardError(f"the reward function returned {value}, not a finite number.")
    if abs(value) > MAX_SCORE:
        # Python writes no integer of more than 4300 digits.
        shown = f"an integer of {value.bit_length()} bits" if isinstance(value, int) else value
        raise RewardError(
            f"the reward function returned {shown}, too large for a score: its square must be finite in float32, as "
            f"advantages need variances, so it may be at most {MAX_SCORE:.1e}."
        )
    return float(value)
