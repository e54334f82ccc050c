"""Requests that reach the native engine one by one: what is computed, what is kept, what is used again."""

from __future__ import annotations

import random
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import transformers
from torch import Tensor

from tests.workers.rollout.test_native_rollout import WINDOWED, Counter, full_forward, loaded
from verl.testing.models import tiny_model
from verl.testing.rollout_conformance import (
    EngineUnderTest,
    Serving,
    greedy,
    oracle_greedy,
    request,
    tokens_of,
    weights_of,
)
from verl.workers.rollout import base
from verl.workers.rollout.base import RolloutOutput, RolloutRequest
from verl.workers.rollout.native import generation
from verl.workers.rollout.native.memory import CacheShape
from verl.workers.rollout.native.prefixes import PAGE, PrefixCache
from verl.workers.rollout.native_rollout import NativeRollout
from verl.workers.rollout.request import DrawnPart
from verl.workers.rollout.request_queue import RequestQueue
from verl.workers.rollout.sampling import uniforms
from verl.workers.rollout.state import EngineState

ROUNDING = 1e-5


def served(engine: NativeRollout, requests: list[RolloutRequest], pauses: random.Random) -> list[RolloutOutput]:
    """The responses, in the order of the requests, which come in another one and at uneven times."""
    order = list(range(len(requests)))
    pauses.shuffle(order)
    with Serving(engine) as serving:
        for number in order:
            serving.queue.put(number, requests[number])
            time.sleep(pauses.choice([0, 0, 0.002]))
        return serving.answered(sorted(order))


# ---- what the engine tells of itself


def test_states_by_hand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "_REPORT_EVERY_S", 0)  # before every token
    engine = loaded(tiny_model("qwen3").eval(), tmp_path, prompt_length=64, response_length=8, max_num_seqs=2)
    told: list[EngineState] = []
    engine.on_state = told.append
    first, second = list(range(4, 44)), [*range(4, 40), 77]  # 40 tokens, and 37 of which 36 are the same
    serving = Serving(engine)
    for number in range(3):  # there is room for two
        serving.queue.put(number, greedy(first, max_tokens=4))
    with serving:
        serving.answered([0, 1, 2])
        while told[-1].requests_running:
            time.sleep(0.001)
        serving.queue.put(3, greedy(second, max_tokens=4))
        serving.answered([3])

    def column(name: str) -> list[float]:
        return [getattr(one, name) for one in told]

    # Four tokens of two responses, four of the third, four of the fourth; after the third and the fourth nothing runs.
    assert column("requests_running") == [2] * 4 + [1] * 4 + [0] + [1] * 4 + [0]
    assert column("requests_waiting") == [1] * 4 + [0] * 10
    assert column("memory_use") == [1] * 4 + [0.5] * 4 + [0] + [0.5] * 4 + [0]
    assert column("response_tokens") == [0, 2, 4, 6, *(8, 9, 10, 11), 12, *(12, 13, 14, 15), 16]
    # The prompt of two responses counts once; each token that went into the model is stored.
    assert column("memory_tokens") == [40, 42, 44, 46, *(40, 41, 42, 43), 0, *(37, 38, 39, 40), 0]
    assert column("prefix_cache_tokens") == [2 * PAGE] * 14  # of 43 and of 40 tokens, 36 of them the same
    # Found are whole pages of all but the last token: 2 of 39, and 2 of 36.
    assert column("prompt_tokens") == [40] * 4 + [80] * 5 + [117] * 5
    assert column("prefix_hit_tokens") == [0] * 4 + [2 * PAGE] * 5 + [4 * PAGE] * 5
    assert set(column("weight_version")) == {0}


# ---- the same with and without what was kept

MODELS = {
    "shared prompts": lambda: tiny_model("qwen3"),
    "a window, prompts shared": WINDOWED["mistral"],
    "a window and a cap of scores, prompts copied": WINDOWED["gemma2"],
    "norms before and after": WINDOWED["gemma3"],
}


@pytest.mark.parametrize("kind", MODELS)
def test_trees_of_conversations_are_as_without_a_cache(kind: str, tmp_path: Path) -> None:
    """Random texts that share beginnings, extended by what was drawn; a cache too small for all of them, too."""
    torch.manual_seed(0)
    model = MODELS[kind]().eval()
    sizes = {"prompt_length": 160, "response_length": 40, "max_num_seqs": 3}
    engine = loaded(model, tmp_path, **sizes)
    without = loaded(model, tmp_path, **sizes, enable_prefix_caching=False)
    chance = random.Random(sum(map(ord, kind)))

    def some(low: int, high: int) -> list[int]:
        return [4 + chance.randrange(100) for _ in range(chance.randint(low, high))]

    system = some(33, 40)
    texts = [(system if chance.random() < 0.7 else []) + some(1, 20) for _ in range(5)]
    computed = []
    for turn in range(4):
        if turn == 3:
            assert engine._cache is not None
            engine._cache = PrefixCache(engine._model.shape, pages=9)
        asked = [request(text, seed=100 * turn + i, max_tokens=12) for i, text in enumerate(texts)]
        passes, outputs = Counter(engine._model).passes, served(engine, asked, chance)
        computed.append((sum(passes), sum(map(len, texts)) + sum(len(o.token_ids) - 1 for o in outputs)))
        for one, output, other in zip(asked, outputs, without.generate(asked), strict=True):
            assert_same_draws(model, one, output, other)
        forks = [(text + output.token_ids, output) for text, output in zip(texts, outputs, strict=True)]
        chosen = [chance.choice(forks) for _ in forks]
        texts = [(text if chance.random() < 0.8 else text[: -chance.randint(1, 20)]) + some(1, 9) for text, _ in chosen]
    # Of the first turn the system prompt is used again, of later ones most of the text.
    assert computed[0][0] < computed[0][1]
    assert all(2 * new < all_ for new, all_ in computed[1:3]), computed
    assert without._cache is None


def assert_same_draws(
    model: transformers.PreTrainedModel, asked: RolloutRequest, found: RolloutOutput, other: RolloutOutput
) -> None:
    """Log-probs of a full forward pass, and the same tokens; a draw within rounding of two tokens' edge ends it."""
    expected = full_forward(model, asked.prompt_ids, found.token_ids)
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=ROUNDING, rtol=ROUNDING)
    pairs = enumerate(zip(found.token_ids, other.token_ids, strict=False))
    first = next((i for i, (token, its) in pairs if token != its), None)
    if first is None:
        assert found.token_ids == other.token_ids
        torch.testing.assert_close(found.log_probs, other.log_probs, atol=ROUNDING, rtol=ROUNDING)
        return
    ids = torch.tensor([asked.prompt_ids + found.token_ids[:first]])
    edges = model(input_ids=ids).logits[0, -1].double().softmax(-1).cumsum(-1)
    drawn = uniforms(asked.sampling.seed, first + 1)[first]
    assert (edges - drawn).abs().min() < ROUNDING, f"token {first} differs, and no edge is near"


# ---- what is computed


def test_what_requests_begin_with_is_computed_once(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(prompt_length=100)
    assert isinstance(engine, NativeRollout)
    system = [4 + 7 * i % 100 for i in range(2 * PAGE)]
    asked = [greedy([*system, 10 + i, 20], max_tokens=2) for i in range(3)] + [greedy([7, 8], max_tokens=2)]
    counter = Counter(engine._model)
    serving = Serving(engine)
    serving.put(asked)
    with serving:
        outputs = serving.answered([0, 1, 2, 3])
    assert tokens_of(outputs) == [oracle_greedy(one.prompt_ids, 2) for one in asked]
    # 32 + 2 tokens of the first and 2 of the last; then 2 each of the others; one token more of all four.
    assert counter.passes == [36, 4, 4]
    # Two turns on: 34 + 2 tokens, of which the last was drawn but not computed; whole pages are 32 of them.
    later = [*asked[0].prompt_ids, *outputs[0].token_ids, *range(40, 60)]
    with Serving(engine) as serving:
        second = serving.answered(serving.put([greedy(later, max_tokens=1)]))[0]
        siblings = serving.answered(serving.put([greedy(later, max_tokens=1, seed=1)], first=1))[0]
    assert second.token_ids == siblings.token_ids == oracle_greedy(later, 1)
    assert counter.passes[3:] == [56 - 32, 56 - 48]


def test_a_cancelled_row_is_free_at_the_next_token(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(max_num_seqs=2)
    assert isinstance(engine, NativeRollout)
    counter = Counter(engine._model)
    serving = Serving(engine)
    serving.put([greedy([10, 20, 30]), greedy([7])])

    def at_a_pass(*_: object) -> None:
        if len(counter.passes) == 4:  # two prompts, and three tokens of each
            serving.queue.put(2, greedy([40, 41], max_tokens=3))
            serving.queue.put(3, greedy([50], max_tokens=3))
            serving.queue.cancel(3)
            serving.queue.cancel(0)

    engine._model.module.get_input_embeddings().register_forward_hook(at_a_pass)
    with serving:
        outputs = serving.answered([1, 2])
    assert tokens_of(outputs) == [oracle_greedy([7], 12), oracle_greedy([40, 41], 3)]
    assert counter.passes[:8] == [4, 2, 2, 2, 2, 2, 2, 1]  # the fifth is the new prompt of two tokens
    assert set(serving.answers) == {1, 2}


def test_while_nothing_waits_weights_may_change_and_the_engine_sleep(tmp_path: Path) -> None:
    engine = EngineUnderTest("native", tmp_path).ready(prompt_length=100, free_cache_engine=True)
    assert isinstance(engine, NativeRollout)
    text = list(range(10, 60))
    with Serving(engine) as serving:
        assert serving.answered(serving.put([greedy(text)]))[0].token_ids == oracle_greedy(text, 12)
        engine.load_weights(weights_of(seed=1), version=1)
        found = serving.answered(serving.put([greedy(text)], first=1))[0]
        assert (found.token_ids, found.weight_version) == (oracle_greedy(text, 12, seed=1), 1)
        engine.sleep()
        serving.put([greedy(text)], first=2)
        while 2 not in serving.answers:
            time.sleep(0.01)
        assert "holds no weights" in str(serving.answers[2])
        engine.load_weights(weights_of(), version=2)
        assert serving.answered(serving.put([greedy(text)], first=3))[0].token_ids == oracle_greedy(text, 12)


def test_two_thousand_requests_leave_nothing_behind(tmp_path: Path) -> None:
    """With a cache that is full after the first few hundred."""
    engine = EngineUnderTest("native", tmp_path).ready(prompt_length=40, max_num_seqs=64)
    assert isinstance(engine, NativeRollout)
    with Serving(engine) as serving:
        serving.answered(serving.put([greedy([5], max_tokens=2)]))
        engine._cache = PrefixCache(engine._model.shape, pages=256)
    resident = 0
    with Serving(engine) as serving:
        for first in range(100, 2100, 100):
            prompts = [[4 + i % 100, *(4 + (i * j) % 97 for j in range(33))] for i in range(first, first + 100)]
            serving.answered(serving.put([greedy(p, max_tokens=2) for p in prompts], first))
            serving.answers.clear()
            if first == 500:
                resident = psutil.Process().memory_info().rss
    assert len(engine._cache) == 256
    assert psutil.Process().memory_info().rss <= resident + 8 * 2**20


# ---- the cache alone


def states(tokens: list[int]) -> Tensor:
    """(2, 1, 1, tokens, 1): each token's id as its key, its negative as its value."""
    row = torch.tensor(tokens, dtype=torch.float32).view(1, 1, -1, 1)
    return torch.stack([row, -row])


def test_the_least_recently_used_page_is_dropped_first_and_leaves_before_what_they_hang_on() -> None:
    cache = PrefixCache(CacheShape(1, 1, 1, torch.float32, torch.device("cpu")), pages=4)

    def add(tokens: list[int]) -> None:
        cache.add(tokens, lambda start, end: states(tokens[start:end]))

    def known(tokens: list[int]) -> int:
        prefix = cache.find([*tokens, 0])
        if prefix:
            assert cache.states(prefix).equal(states(tokens[: len(prefix)]))
        return len(prefix) // PAGE

    a, b, c, d, e = ([10 * i + j for j in range(PAGE)] for i in range(1, 6))
    add(a + b + [99])
    add(a + c)
    assert (known(a + b), known(a + c), known(b), len(cache)) == (2, 2, 0, 3)
    assert len(cache.find(a + b)) == PAGE  # one token at least is left to compute
    add(d)
    assert known(a + c) == 2  # now b was used longest ago
    add(e)
    assert (known(a + b), known(a + c), known(d), known(e)) == (1, 2, 1, 1)
    add(b + c + d + e + a)  # five pages where there is room for four
    assert (known(b + c + d + e + a), known(a), len(cache)) == (4, 0, 4)
    cache.clear()
    assert (known(b), len(cache)) == (0, 0)
    add(a)
    assert known(a) == 1


def test_tokens_of_requests_that_stream_are_told_while_they_are_drawn(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of the response but its last token, in order; the response itself is as without."""
    monkeypatch.setattr(generation, "STREAM_EVERY_S", 0.0)
    engine = loaded(tiny_model("qwen3").eval(), tmp_path, prompt_length=16, response_length=40)
    asked = [request([5 + n, 6, 7], seed=n, max_tokens=12, ignore_eos=True) for n in range(3)]
    expected = engine.generate(asked)
    told: dict[int, list[int]] = {0: [], 1: [], 2: []}
    answers: dict[int, RolloutOutput] = {}

    def take(number: int, came: Any) -> None:
        if isinstance(came, DrawnPart):
            assert number not in answers
            assert came.start == len(told[number])
            told[number] += came.token_ids
        else:
            answers[number] = came

    queue = RequestQueue(take)
    for number, one in enumerate(asked):
        queue.put(number, replace(one, streams=number != 1))
    thread = threading.Thread(target=engine.serve, args=(queue,))
    thread.start()
    while len(answers) < 3:
        time.sleep(0.01)
    queue.close()
    thread.join()
    assert [answers[number] for number in range(3)] == expected
    assert [told[number] for number in range(3)] == [expected[0].token_ids[:11], [], expected[2].token_ids[:11]]
