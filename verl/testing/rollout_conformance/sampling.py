"""Tokens and their log-probs: of the distribution asked for, independent of company, of any size, ended where asked."""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import torch

from verl.config.rollout import VLLM_TIES
from verl.testing.rollout_conformance.engine_under_test import (
    EOS,
    PROMPTS,
    VOCAB,
    EngineUnderTest,
    greedy,
    oracle,
    oracle_greedy,
    oracle_kept_tokens,
    oracle_log_probs,
    oracle_processed_log_probs,
    request,
    slow_distribution,
    tokens_of,
    weights_of,
)
from verl.workers.rollout.base import RolloutRequest

# ---- tokens and their log-probs


WAYS: list[dict[str, object]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.5, "top_k": 5},
    {"top_p": 0.7},
    {"top_k": 9, "top_p": 0.5},
    {"min_p": 0.2},
    {"temperature": 1.3, "min_p": 0.05, "top_k": 6, "top_p": 0.8},
]


def check_log_probs_are_of_the_distribution_that_is_drawn_from(engine: EngineUnderTest) -> None:
    """``processed_logprobs``, the default: tempered, cut, and renormalised over what is kept."""
    for family in engine.families:
        requests = [request(p, seed=7 * i, **way) for i, p in enumerate(PROMPTS) for way in WAYS]
        outputs = engine.ready(family).generate(requests)
        for sent, output in zip(requests, outputs, strict=True):
            assert len(output.log_probs) == len(output.token_ids) >= 1
            expected = oracle_processed_log_probs(sent, output.token_ids, family)
            torch.testing.assert_close(
                torch.tensor(output.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5
            )


def check_raw_log_probs_equal_a_full_forward_pass(engine: EngineUnderTest) -> None:
    """``raw_logprobs``: of the model's own logits, whatever the temperature and the cut; the same tokens."""
    requests = [request(p, seed=7 * i, **way) for i, p in enumerate(PROMPTS) for way in WAYS]
    outputs = engine.ready(logprobs_mode="raw_logprobs").generate(requests)
    assert tokens_of(outputs) == tokens_of(engine.ready().generate(requests))
    for sent, output in zip(requests, outputs, strict=True):
        expected = oracle_log_probs(sent.prompt_ids, output.token_ids, 1.0, "qwen3")
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5)


def check_untruncated_log_probs_are_what_the_trainer_computes(engine: EngineUnderTest) -> None:
    ways = [{}, {"temperature": 0.6}, {"temperature": 1.5}]
    for family in engine.families:
        requests = [request(p, seed=7 * i, **way) for i, p in enumerate(PROMPTS) for way in ways]
        outputs = engine.ready(family).generate(requests)
        for sent, output in zip(requests, outputs, strict=True):
            assert len(output.log_probs) == len(output.token_ids) >= 1
            expected = oracle_log_probs(sent.prompt_ids, output.token_ids, sent.sampling.temperature, family)
            torch.testing.assert_close(
                torch.tensor(output.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5
            )


def check_kept_tokens_are_those_of_the_distribution_that_is_drawn_from(engine: EngineUnderTest) -> None:
    """Kept tokens come with requests that ask for them; tokens and log-probs are those of requests that do not."""
    cuts: list[dict[str, object]] = [
        {"top_k": 4},
        {"top_k": 4, "temperature": 1.5, "top_p": 0.7},
        {"top_k": 3, "temperature": 0.4, "min_p": 0.5},
        {"top_k": 4, "temperature": 0.4, "min_p": 0.2, "top_p": 0.8},
    ]
    requests = [request(p, seed=7 * i, **cut) for i, p in enumerate(PROMPTS) for cut in cuts]
    with_kept_ids = [dataclasses.replace(sent, returns_kept_ids=True) for sent in requests]
    width = 4 + (VLLM_TIES if engine.name == "vllm" else 0)
    running, sizes = engine.ready(keep_sampling_mask=True, top_k=4), set[int]()
    outputs = running.generate([*with_kept_ids, requests[0]])
    assert outputs.pop().kept_ids is None
    engine.assert_of_the_model(requests, outputs)
    for sent, output in zip(with_kept_ids, outputs, strict=True):
        assert output.kept_ids is not None
        assert (output.kept_ids.shape, output.kept_ids.dtype) == ((len(output.token_ids), width), torch.int32)
        expected = oracle_kept_tokens(sent, output.token_ids)
        assert output.kept_ids.tolist() == [[*token_ids, *[-1] * (width - len(token_ids))] for token_ids in expected]
        sizes |= set(map(len, expected))
    assert sizes == {1, 2, 3, 4}


def check_greedy_takes_the_most_likely_token(engine: EngineUnderTest) -> None:
    for family in engine.families:
        outputs = engine.ready(family).generate([greedy(p) for p in PROMPTS])
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            assert output.token_ids == oracle_greedy(prompt, 12, family)
            expected = oracle_log_probs(prompt, output.token_ids, 1.0, family)
            torch.testing.assert_close(
                torch.tensor(output.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5
            )


def check_draws_follow_the_distribution(engine: EngineUnderTest) -> None:
    """Chi-square at the 0.1 % level of 2000 first tokens against the slow definition of top_k and top_p."""
    ways = [
        {"temperature": 0.25},
        {"temperature": 0.5, "top_k": 4},
        {"temperature": 0.5, "top_p": 0.6},
        {"temperature": 0.5, "top_k": 6, "top_p": 0.5},
        {"temperature": 0.5, "min_p": 0.3},
        {"temperature": 0.5, "min_p": 0.1, "top_k": 5, "top_p": 0.9},
    ]
    prompt, draws = PROMPTS[4], 2000
    running = engine.ready(max_num_seqs=1000)
    with torch.no_grad():
        logits = oracle()(input_ids=torch.tensor([prompt])).logits[0, -1].double()
    for way in ways:
        outputs = running.generate([request(prompt, seed=i, max_tokens=1, **way) for i in range(draws)])
        counts = np.bincount([output.token_ids[0] for output in outputs], minlength=VOCAB)
        expected = slow_distribution(logits, **way) * draws
        assert counts[expected == 0].sum() == 0
        assert_same_distribution(counts, expected)


def assert_same_distribution(counts: np.ndarray, expected: np.ndarray) -> None:
    """Pearson's chi-square; rare tokens (fewer than 5 expected) count as one. Wilson-Hilferty gives the quantile."""
    common = expected >= 5
    observed_cells = [*counts[common], counts[~common].sum()]
    expected_cells = [*expected[common], expected[~common].sum()]
    cells = [(o, e) for o, e in zip(observed_cells, expected_cells, strict=True) if e >= 1]
    degrees = len(cells) - 1
    assert degrees >= 1
    statistic = sum((o - e) ** 2 / e for o, e in cells)
    quantile = degrees * (1 - 2 / (9 * degrees) + 3.09 * math.sqrt(2 / (9 * degrees))) ** 3
    assert statistic < quantile, f"chi-square {statistic:.1f} with {degrees} degrees; 0.1 % lie above {quantile:.1f}"


# ---- independence


def mixed_requests() -> list[RolloutRequest]:
    """Twelve requests, each with parameters and a seed of its own."""
    ways: list[dict[str, object]] = [{}, {"temperature": 0.0}, {"top_k": 10}, {"temperature": 0.7, "top_p": 0.9}]
    return [request(p, seed=i, **ways[i % 4]) for i, p in enumerate(PROMPTS * 2)]


def check_a_response_depends_on_its_own_request_alone(engine: EngineUnderTest) -> None:
    """In another order, in another batch, beside others, alone: the same response."""
    requests, running = mixed_requests(), engine.ready()
    together = running.generate(requests)
    engine.assert_of_the_model(requests, together)
    engine.assert_same(engine.ready(max_num_seqs=1).generate(requests), together)
    engine.assert_same(engine.ready(max_num_seqs=5, max_num_batched_tokens=16).generate(requests), together)
    order = [5, 0, 11, 3, 8, 1, 10, 2, 7]
    engine.assert_same(running.generate([requests[i] for i in order]), [together[i] for i in order])
    beside = [request([i + 4] * (i % 8 + 1), seed=100 + i) for i in range(20)]
    engine.assert_same(running.generate(beside[:9] + requests + beside[9:])[9:-11], together)
    engine.assert_same([running.generate([sent])[0] for sent in requests[:4]], together[:4])


def check_the_same_seeds_twice(engine: EngineUnderTest) -> None:
    """Every engine repeats itself on the same batch, and so does a new engine; alone and all together."""
    requests, running = mixed_requests(), engine.ready()
    first = [running.generate([sent])[0] for sent in requests]
    again = [running.generate([sent])[0] for sent in requests]
    anew = engine.ready()
    new = [anew.generate([sent])[0] for sent in requests]
    for repeated in (again, new):
        assert tokens_of(repeated) == tokens_of(first)
        engine.assert_close([o.log_probs for o in repeated], [o.log_probs for o in first])
    engine.assert_same(running.generate(requests), anew.generate(requests))


def check_siblings_differ_and_a_seed_repeats(engine: EngineUnderTest) -> None:
    running = engine.ready()
    siblings = running.generate([request(PROMPTS[0], seed=i) for i in range(8)])
    assert len({tuple(tokens) for tokens in tokens_of(siblings)}) == 8
    engine.assert_same(running.generate([request(PROMPTS[0], seed=i) for i in range(8)]), siblings)


def check_no_request_is_no_output(engine: EngineUnderTest) -> None:
    assert engine.ready().generate([]) == []


# ---- sizes


def check_long_and_short_prompts_in_one_batch(engine: EngineUnderTest) -> None:
    """Prompts of one token up to all that fits, more of them than run at once, longer than goes in at once."""
    longest = 160
    sizes: dict[str, object] = {
        "prompt_length": longest - 12,
        "max_model_len": longest,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 48,
    }
    running = engine.ready(**sizes)
    lengths = [1, longest - 1, 2, 70, 1, longest - 12, 47, 48, 49, 1, 96]
    prompts = [[4 + (7 * i + 3 * j) % 100 for j in range(n)] for i, n in enumerate(lengths)]
    room = [min(12, longest - n) for n in lengths]
    assert min(room) == 1
    requests = [greedy(p, max_tokens=n) for p, n in zip(prompts, room, strict=True)]
    outputs = running.generate(requests)
    assert tokens_of(outputs) == [oracle_greedy(p, n) for p, n in zip(prompts, room, strict=True)]
    assert {output.finish_reason for output in outputs} == {"length"}
    engine.assert_of_the_model(requests, outputs)
    sampled = [request(p, seed=i, max_tokens=n) for i, (p, n) in enumerate(zip(prompts, room, strict=True))]
    engine.assert_of_the_model(sampled, running.generate(sampled))


def check_one_token_is_a_response(engine: EngineUnderTest) -> None:
    outputs = engine.ready().generate([greedy(p, max_tokens=1) for p in PROMPTS])
    assert tokens_of(outputs) == [oracle_greedy(p, 1) for p in PROMPTS]
    assert [output.finish_reason for output in outputs] == ["length"] * len(PROMPTS)


# ---- the end of a response


def check_an_end_token_ends_the_response_and_is_kept(engine: EngineUnderTest) -> None:
    greedy_ids = oracle_greedy(PROMPTS[0], 12)
    cut = greedy_ids.index(greedy_ids[4]) + 1
    running = engine.build(eos=[EOS, greedy_ids[4]])  # a model with two end tokens, of which the second comes up
    running.wake()
    running.load_weights(weights_of(), version=0)
    stopped, ignored = running.generate([greedy(PROMPTS[0], ignore_eos=False), greedy(PROMPTS[0])])
    assert (stopped.token_ids, stopped.finish_reason) == (greedy_ids[:cut], "stop")
    assert len(stopped.log_probs) == cut
    assert (ignored.token_ids, ignored.finish_reason) == (greedy_ids, "length")


def check_stop_token_ids_stop_also_when_eos_is_ignored(engine: EngineUnderTest) -> None:
    greedy_ids = oracle_greedy(PROMPTS[2], 12)
    cut = greedy_ids.index(greedy_ids[3]) + 1
    first, second, third = engine.ready().generate(
        [
            greedy(PROMPTS[2], stop_token_ids=(greedy_ids[3],)),
            greedy(PROMPTS[2]),
            greedy(PROMPTS[2], stop_token_ids=(greedy_ids[3], 3, 2, 0)),
        ]
    )
    assert (first.token_ids, first.finish_reason) == (greedy_ids[:cut], "stop")
    assert (second.token_ids, second.finish_reason) == (greedy_ids, "length")
    assert third == first


def check_a_stop_text_ends_at_the_token_that_completes_it(engine: EngineUnderTest) -> None:
    running = engine.ready()
    greedy_ids = next(c for p in PROMPTS if len(set(c := oracle_greedy(p, 12))) > 6 and not set(c[:8]) & {0, 1, 2, 3})
    prompt = next(p for p in PROMPTS if oracle_greedy(p, 12) == greedy_ids)
    text = [running.tokenizer.decode([token]) for token in greedy_ids]
    stop = text[4] + text[5]
    cut = next(i for i in range(1, 12) if text[i - 1] + text[i] == stop) + 1
    ended, other = running.generate([greedy(prompt, stop=("no such text", stop)), greedy(prompt, stop=("no such",))])
    assert (ended.token_ids, ended.finish_reason) == (greedy_ids[:cut], "stop")
    assert (other.token_ids, other.finish_reason) == (greedy_ids, "length")


def check_each_request_has_its_own_length(engine: EngineUnderTest) -> None:
    """Rows end one by one; those that go on must go on from their own past."""
    lengths = [2, 12, 1, 9, 3, 6]
    requests = [greedy(p, max_tokens=n) for p, n in zip(PROMPTS, lengths, strict=True)]
    for sent, output, length in zip(requests, engine.ready().generate(requests), lengths, strict=True):
        assert output.token_ids == oracle_greedy(sent.prompt_ids, length)
        assert output.finish_reason == "length"
        expected = oracle_log_probs(sent.prompt_ids, output.token_ids, 1.0, "qwen3")
        torch.testing.assert_close(torch.tensor(output.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5)
