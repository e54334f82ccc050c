"""Log-probs of given tokens: those of a forward pass, at any temperature, with the most likely tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from verl.errors import RolloutError
from verl.testing.rollout_conformance.engine_under_test import (
    PROMPTS,
    EngineUnderTest,
    greedy,
    oracle,
    oracle_greedy,
    tokens_of,
    weights_of,
)
from verl.workers.rollout.scoring import ScoreRequest, TokenScores

RESPONSES = [[50, 3, 77], [60], [12, 12, 12, 12, 12], [99, 2], [4, 8, 15, 16, 23, 42], [50, 3, 78]]


def check_scores_are_those_of_a_forward_pass(engine: EngineUnderTest) -> None:
    """Score tokens that were not sampled; prompts with a cached beginning; several temperatures in one call."""
    running = engine.ready()
    requests = [
        ScoreRequest(prompt + response, len(prompt), top_k, temperature)
        for prompt, response in zip(PROMPTS, RESPONSES, strict=True)
        for top_k, temperature in ((0, 1.0), (5, 1.0), (3, 0.5), (20, 2.0))
    ]
    if not running.scores_tokens:
        with pytest.raises(RolloutError, match=f"{type(running).__name__} computes no log-probs of given tokens"):
            running.score(requests)
        return
    for _ in range(2):  # the second time what the prompts share is cached
        for request, scores in zip(requests, running.score(requests), strict=True):
            assert_of_the_model(engine, request, scores)
    # Its temperature is that of the scores alone, and new weights count at once.
    assert tokens_of(running.generate([greedy(PROMPTS[0])])) == [oracle_greedy(PROMPTS[0], 12)]
    running.load_weights(weights_of(seed=1), version=1)
    for request, scores in zip(requests, running.score(requests), strict=True):
        assert_of_the_model(engine, request, scores, seed=1)
    assert running.score([]) == []


def check_ids_that_the_tokenizer_lacks_have_no_share_of_a_score(engine: EngineUnderTest) -> None:
    skip_if_it_scores_none(engine)
    running = engine.ready()
    request = ScoreRequest([10, 20, 30, 50, 3, 77], start=3, top_k=20, temperature=0.5)
    likely = set(running.score([request])[0].top_ids[:, 0].tolist()) - {50, 3, 77}
    assert likely
    running.unknown_ids = sorted({*running.unknown_ids, *likely})
    assert_of_the_model(engine, request, running.score([request])[0], without=running.unknown_ids)
    with pytest.raises(RolloutError, match=r"gave log-prob (-inf|nan) to token"):
        running.score([ScoreRequest([10, 20, min(likely)], start=2)])


def check_what_cannot_be_scored_is_refused(engine: EngineUnderTest) -> None:
    with pytest.raises(RolloutError, match="start=3 of 3 tokens"):
        ScoreRequest([1, 2, 3], start=3)
    skip_if_it_scores_none(engine)
    running = engine.build()
    running.wake()
    with pytest.raises(RolloutError, match="no weights"):
        running.score([ScoreRequest([10, 20], start=1)])
    running.load_weights(weights_of(), version=0)
    with pytest.raises(RolloutError, match="request 1 has 20 prompt tokens and asks for 1 more"):
        running.score([ScoreRequest([10, 20], start=1), ScoreRequest([10] * 20, start=1)])


def skip_if_it_scores_none(engine: EngineUnderTest) -> None:
    if not engine.engine_class().scores_tokens:
        pytest.skip("this engine scores no tokens, and says so")


@torch.no_grad()
def assert_of_the_model(
    engine: EngineUnderTest, request: ScoreRequest, scores: TokenScores, seed: int = 0, without: list[int] | None = None
) -> None:
    """The scores are those of the oracle with the weights of ``seed``, where ids of ``without`` have no share."""
    logits = oracle(seed=seed)(input_ids=torch.tensor([request.token_ids])).logits[0, request.start - 1 : -1]
    logits[:, without or []] = -torch.inf
    expected = (logits / request.temperature).log_softmax(-1)
    token_log_probs = expected.gather(-1, torch.tensor(request.scored_ids)[:, None]).squeeze(-1)
    tolerance = engine.log_prob_tolerance / min(1.0, request.temperature)  # rounding of logits grows with their scale
    np.testing.assert_allclose(scores.log_probs, token_log_probs, atol=tolerance, rtol=1e-5)
    assert scores.top_ids.shape == scores.top_log_probs.shape == (len(request.scored_ids), request.top_k)
    assert (scores.top_ids.dtype, scores.top_log_probs.dtype) == (torch.int32, torch.float32)
    at_ids = expected.gather(-1, scores.top_ids.long())  # equal ones may come in either order
    np.testing.assert_allclose(scores.top_log_probs, at_ids, atol=tolerance, rtol=1e-5)
    np.testing.assert_allclose(at_ids, expected.topk(request.top_k).values, atol=2 * tolerance, rtol=1e-5)
