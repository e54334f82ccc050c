"""What every rollout engine must do, written against the contract alone.

Each ``check_*`` function takes an :class:`EngineUnderTest`; ``test_conformance.py`` runs all of them for
every engine that it lists. The oracle is a Transformers model and one full forward pass per response,
without a cache, without padding and without a batch.

An engine that cannot keep a promise says so in a field of its ``EngineUnderTest``, with the reason; the
checks then hold it to the next weaker promise.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import json
import math
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from verl.config import HFModelConfig, RolloutConfig, SamplingConfig
from verl.errors import RolloutError, SchemaError
from verl.protocol import DataProto
from verl.testing.models import tiny_model, tiny_model_dir
from verl.utils import hf_tokenizer
from verl.workers.rollout.base import BaseRollout, RolloutOutput, RolloutRequest, SamplingParams, get_rollout_class
from verl.workers.rollout.serving import Answer, RequestQueue

VOCAB, EOS = 104, 1
KIB, MIB = 2**10, 2**20
HEAD_DIM = 32
"""Of the tiny models: vLLM's kernels for a CPU have no smaller heads."""
PROMPTS = [[10, 20, 30], [7], [40, 41, 42, 43, 44, 45, 46], [10, 20, 31], [90, 91, 92, 93], [10, 20, 30]]


def shape_of(family: str) -> dict[str, int]:
    """Heads of ``HEAD_DIM``; Qwen2 divides its width of 64 by their number."""
    return {"num_attention_heads": 2, "num_key_value_heads": 1} if family == "qwen2" else {"head_dim": HEAD_DIM}


def tensor_bytes(engine: BaseRollout) -> int:
    """Memory of all tensors that this process holds, whoever made them; each storage once."""
    gc.collect()
    held = {}
    for thing in gc.get_objects():
        if issubclass(type(thing), Tensor) and not issubclass(type(thing), FakeTensor) and thing.device.type != "meta":
            storage = thing.untyped_storage()
            held[storage.data_ptr()] = storage.nbytes()
    return sum(held.values())


@dataclasses.dataclass(frozen=True)
class EngineUnderTest:
    """An engine's name in the registry, and how exact it is.

    Attributes:
        name: ``rollout.name``.
        folder: where tiny models may be written.
        families: model families that the engine must serve.
        log_prob_tolerance: largest difference to the oracle, in fp32.
        device: where it runs.
        settings: rollout settings that the engine needs.
        held_bytes: memory that an engine holds; the default counts the tensors of this process.
        keeps_memory: why sleep does not give the memory back; empty: it does.
    """

    name: str
    folder: Path
    families: tuple[str, ...] = ("qwen3", "qwen2", "llama")
    log_prob_tolerance: float = 1e-5
    device: str = "cpu"
    settings: dict[str, Any] = dataclasses.field(default_factory=dict)
    held_bytes: Callable[[BaseRollout], int] = tensor_bytes
    keeps_memory: str = ""

    def engine_class(self) -> type[BaseRollout]:
        """What is tested."""
        return get_rollout_class(self.name)

    def build(self, family: str = "qwen3", *, eos: list[int] | None = None, **settings: Any) -> BaseRollout:
        """The engine for a tiny model, asleep and without weights; ``eos`` are the model's own end tokens."""
        path = Path(tiny_model_dir(self.folder / f"{family}-{eos}", family, **shape_of(family)))
        if eos is not None:
            (path / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
        defaults: dict[str, Any] = {"dtype": "float32", "prompt_length": 8, "response_length": 12}
        defaults |= {"tensor_model_parallel_size": 1, "free_cache_engine": False}
        config = RolloutConfig(name=self.name, **(defaults | self.settings | settings))
        return self.engine_class()(config, HFModelConfig(path=str(path)), hf_tokenizer(str(path)), self.device)

    def ready(self, family: str = "qwen3", **settings: Any) -> BaseRollout:
        """The engine, awake, with the weights of seed 0."""
        engine = self.build(family, **settings)
        engine.wake()
        engine.load_weights(weights_of(family), version=0)
        return engine

    def assert_same(self, outputs: list[RolloutOutput], others: list[RolloutOutput]) -> None:
        """The same responses to the same requests, served in different company."""
        assert tokens_of(outputs) == tokens_of(others)
        assert [output.finish_reason for output in outputs] == [other.finish_reason for other in others]
        self.assert_close([output.log_probs for output in outputs], [other.log_probs for other in others])

    def assert_close(self, found: list[list[float]], expected: list[list[float]]) -> None:
        """The same log-probs, up to the engine's tolerance."""
        for some, others in zip(found, expected, strict=True):
            assert len(some) == len(others)
            np.testing.assert_allclose(some, others, atol=self.log_prob_tolerance, rtol=1e-5)

    def assert_of_the_model(
        self, requests: list[RolloutRequest], outputs: list[RolloutOutput], seed: int = 0, family: str = "qwen3"
    ) -> None:
        """The log-probs are those of the oracle with the weights of ``seed``."""
        expected = [
            oracle_processed_log_probs(asked, given.token_ids, family, seed).tolist()
            for asked, given in zip(requests, outputs, strict=True)
        ]
        self.assert_close([output.log_probs for output in outputs], expected)


@functools.cache
def oracle(family: str = "qwen3", seed: int = 0) -> torch.nn.Module:
    return tiny_model(family, seed=seed, **shape_of(family))


def weights_of(family: str = "qwen3", seed: int = 0) -> Iterator[tuple[str, Tensor]]:
    yield from oracle(family, seed).state_dict().items()


@torch.no_grad()
def oracle_log_probs(prompt: list[int], response: list[int], temperature: float, family: str, seed: int = 0) -> Tensor:
    logits = oracle(family, seed)(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1]
    return (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(response)[:, None]).squeeze(-1)


@torch.no_grad()
def oracle_processed_log_probs(asked: RolloutRequest, response: list[int], family: str, seed: int = 0) -> Tensor:
    """log p of each token under the distribution that it is drawn from: the slow definition, token by token.

    A greedy response has those of softmax(logits).
    """
    prompt, sampling = asked.prompt_ids, asked.sampling
    if sampling.is_greedy:
        return oracle_log_probs(prompt, response, 1.0, family, seed)
    logits = oracle(family, seed)(input_ids=torch.tensor([prompt + response])).logits[0, len(prompt) - 1 : -1].double()
    rows = [
        slow_distribution(row, sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p) for row in logits
    ]
    return torch.tensor([row[token] for row, token in zip(rows, response, strict=True)]).log().float()


@torch.no_grad()
def oracle_greedy(prompt: list[int], count: int, family: str = "qwen3", seed: int = 0) -> list[int]:
    """``count`` most likely tokens, one full forward pass for each; end tokens are tokens like any other."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(oracle(family, seed)(input_ids=torch.tensor([ids])).logits[0, -1].argmax()))
    return ids[len(prompt) :]


def request(prompt: list[int], seed: int = 0, **sampling: Any) -> RolloutRequest:
    return RolloutRequest(list(prompt), SamplingParams(**({"max_tokens": 12, "seed": seed} | sampling)))


def greedy(prompt: list[int], **sampling: Any) -> RolloutRequest:
    return request(prompt, temperature=0.0, **({"ignore_eos": True} | sampling))


def tokens_of(outputs: list[RolloutOutput]) -> list[list[int]]:
    return [output.token_ids for output in outputs]


def prompt_batch(prompts: list[list[int]], width: int = 8, indices: list[int] | None = None, **meta: Any) -> DataProto:
    """Left-padded prompts as the driver sends them; the pad positions hold 99, to show that they are not read."""
    ids = torch.tensor([[99] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp(min=0)},
        non_tensors={
            "uid": np.array([f"prompt-{p}" for p in prompts], dtype=object),
            "sample_index": np.array(indices or [0] * len(prompts)),
        },
        meta_info={"global_steps": 1, "validate": False} | meta,
    )


# ---- tokens and their log-probs


WAYS: list[dict[str, Any]] = [
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
        for asked, given in zip(requests, outputs, strict=True):
            assert len(given.log_probs) == len(given.token_ids) >= 1
            expected = oracle_processed_log_probs(asked, given.token_ids, family)
            torch.testing.assert_close(
                torch.tensor(given.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5
            )


def check_raw_log_probs_equal_a_full_forward_pass(engine: EngineUnderTest) -> None:
    """``raw_logprobs``: of the model's own logits, whatever the temperature and the cut; the same tokens."""
    requests = [request(p, seed=7 * i, **way) for i, p in enumerate(PROMPTS) for way in WAYS]
    outputs = engine.ready(logprobs_mode="raw_logprobs").generate(requests)
    assert tokens_of(outputs) == tokens_of(engine.ready().generate(requests))
    for asked, given in zip(requests, outputs, strict=True):
        expected = oracle_log_probs(asked.prompt_ids, given.token_ids, 1.0, "qwen3")
        torch.testing.assert_close(torch.tensor(given.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5)


def check_untruncated_log_probs_are_what_the_trainer_computes(engine: EngineUnderTest) -> None:
    ways = [{}, {"temperature": 0.6}, {"temperature": 1.5}]
    for family in engine.families:
        requests = [request(p, seed=7 * i, **way) for i, p in enumerate(PROMPTS) for way in ways]
        outputs = engine.ready(family).generate(requests)
        for asked, given in zip(requests, outputs, strict=True):
            assert len(given.log_probs) == len(given.token_ids) >= 1
            expected = oracle_log_probs(asked.prompt_ids, given.token_ids, asked.sampling.temperature, family)
            torch.testing.assert_close(
                torch.tensor(given.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5
            )


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


def slow_distribution(
    logits: Tensor, temperature: float = 1.0, top_k: int = -1, top_p: float = 1.0, min_p: float = 0.0
) -> np.ndarray:
    """softmax(logits / temperature), cut by min_p, to top_k, then to the fewest tokens with the share top_p of it."""
    probs = (logits / temperature).softmax(-1).tolist()
    ranked = [v for v in sorted(range(len(probs)), key=lambda v: (-probs[v], v)) if probs[v] >= min_p * max(probs)]
    ranked = ranked[:top_k] if top_k > 0 else ranked
    mass, kept = sum(probs[v] for v in ranked), []
    for v in ranked:
        kept.append(v)
        if sum(probs[w] for w in kept) >= top_p * mass:
            break
    total = sum(probs[v] for v in kept)
    return np.array([probs[v] / total if v in kept else 0.0 for v in range(len(probs))])


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
    ways: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 10}, {"temperature": 0.7, "top_p": 0.9}]
    return [request(p, seed=i, **ways[i % 4]) for i, p in enumerate(PROMPTS * 2)]


def check_a_response_depends_on_its_own_request_alone(engine: EngineUnderTest) -> None:
    """In another order, in another batch, beside others, alone: the same response."""
    requests, running = mixed_requests(), engine.ready()
    whole = running.generate(requests)
    engine.assert_of_the_model(requests, whole)
    engine.assert_same(engine.ready(max_num_seqs=1).generate(requests), whole)
    engine.assert_same(engine.ready(max_num_seqs=5, max_num_batched_tokens=16).generate(requests), whole)
    order = [5, 0, 11, 3, 8, 1, 10, 2, 7]
    engine.assert_same(running.generate([requests[i] for i in order]), [whole[i] for i in order])
    beside = [request([i + 4] * (i % 8 + 1), seed=100 + i) for i in range(20)]
    engine.assert_same(running.generate(beside[:9] + requests + beside[9:])[9:-11], whole)
    engine.assert_same([running.generate([asked])[0] for asked in requests[:4]], whole[:4])


def check_the_same_seeds_twice(engine: EngineUnderTest) -> None:
    """Every engine repeats itself on the same batch, and so does a new engine; alone and all together."""
    requests, running = mixed_requests(), engine.ready()
    first = [running.generate([asked])[0] for asked in requests]
    again = [running.generate([asked])[0] for asked in requests]
    anew = engine.ready()
    new = [anew.generate([asked])[0] for asked in requests]
    for others in (again, new):
        assert tokens_of(others) == tokens_of(first)
        engine.assert_close([o.log_probs for o in others], [o.log_probs for o in first])
    engine.assert_same(running.generate(requests), anew.generate(requests))


def check_siblings_differ_and_a_seed_repeats(engine: EngineUnderTest) -> None:
    running = engine.ready()
    siblings = running.generate([request(PROMPTS[0], seed=i) for i in range(8)])
    assert len({tuple(tokens) for tokens in tokens_of(siblings)}) == 8
    engine.assert_same(running.generate([request(PROMPTS[0], seed=i) for i in range(8)]), siblings)


def check_no_request_is_no_output(engine: EngineUnderTest) -> None:
    assert engine.ready().generate([]) == []


# ---- requests that come one by one


class Serving:
    """``serve`` of an engine in a thread of its own; leaving the context closes the queue and waits for the end.

    Attributes:
        queue: the requests.
        answers: by number, what came back so far.
    """

    def __init__(self, engine: BaseRollout) -> None:
        self.answers: dict[int, Answer] = {}
        self.queue = RequestQueue(self._take)
        self._came = threading.Condition()
        self._failure: list[BaseException] = []
        self._thread = threading.Thread(target=self._serve, args=(engine,), daemon=True)

    def _serve(self, engine: BaseRollout) -> None:
        try:
            engine.serve(self.queue)
        except RolloutError as error:
            self._failure.append(error)
            with self._came:
                self._came.notify_all()

    def _take(self, number: int, answer: Answer) -> None:
        with self._came:
            assert number not in self.answers, f"request {number} was answered twice"
            self.answers[number] = answer
            self._came.notify_all()

    def __enter__(self) -> Serving:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.queue.close()
        self._thread.join(timeout=120)
        assert not self._thread.is_alive(), "serve did not return after close()"
        if self._failure:
            raise self._failure[0]

    def put(self, requests: list[RolloutRequest], first: int = 0) -> list[int]:
        """Put all requests, numbered from ``first`` on."""
        for number, asked in enumerate(requests, first):
            self.queue.put(number, asked)
        return list(range(first, first + len(requests)))

    def answered(self, numbers: list[int]) -> list[RolloutOutput]:
        """Wait for the responses to these requests."""
        with self._came:
            self._came.wait_for(lambda: self._failure or all(n in self.answers for n in numbers), timeout=120)
        if self._failure:
            raise self._failure[0]
        found = [self.answers[number] for number in numbers]
        for answer in found:
            assert isinstance(answer, RolloutOutput), answer
        return found  # type: ignore[return-value]


def check_arrival_changes_no_response(engine: EngineUnderTest) -> None:
    """All at once, in another order, while others run, one after the other: the responses of ``generate``."""
    requests, running = mixed_requests(), engine.ready()
    expected = running.generate(requests)
    beside = [request([i + 4] * (i % 8 + 1), seed=100 + i) for i in range(20)]
    with Serving(running) as serving:
        engine.assert_same(serving.answered(serving.put(requests)), expected)
        order = [5, 0, 11, 3, 8, 1, 10, 2, 7]
        numbers = serving.put([requests[i] for i in order], first=100)
        engine.assert_same(serving.answered(numbers), [expected[i] for i in order])
        asked = [asked for pair in zip(beside, requests, strict=False) for asked in pair]
        for number, one in enumerate(asked, 200):
            serving.queue.put(number, one)
            time.sleep(0.003)
        engine.assert_same(serving.answered(list(range(201, 200 + len(asked), 2))), expected)
        alone = [serving.answered(serving.put([one], first=300 + i))[0] for i, one in enumerate(requests[:4])]
        engine.assert_same(alone, expected[:4])
    engine.assert_same(running.generate(requests), expected)
    with pytest.raises(RolloutError, match="takes no more requests"):
        serving.queue.put(400, requests[0])


def check_what_cannot_be_served_costs_only_itself(engine: EngineUnderTest) -> None:
    running = engine.ready()
    good = [greedy(p) for p in PROMPTS]
    bad = [request([]), request([5, VOCAB]), request([5] * 8, max_tokens=13)]
    expected = running.generate(good)
    with Serving(running) as serving:
        numbers = serving.put(good[:3]) + serving.put(bad, first=50) + serving.put(good[3:], first=3)
        engine.assert_same(serving.answered([n for n in numbers if n < 50]), expected)
    for number, words in ((50, "empty prompt"), (51, "vocabulary of 104"), (52, "there is room for 20")):
        assert isinstance(serving.answers[number], RolloutError)
        assert words in str(serving.answers[number])


def check_a_cancelled_request_is_dropped_and_others_go_on(engine: EngineUnderTest) -> None:
    """It runs, or still waits for a place, of which there are eight. What was taken is answered after ``close``."""
    running = engine.ready(response_length=600, max_num_seqs=8)
    long = [request(PROMPTS[i % 6], seed=i, ignore_eos=True, max_tokens=600) for i in range(8)]
    short = [greedy(p, max_tokens=6) for p in PROMPTS[1:4]]
    expected = running.generate(short)
    with Serving(running) as serving:
        serving.put(long)
        time.sleep(0.05)
        serving.put(short, first=10)
        for number in (11, *range(8), 77):
            serving.queue.cancel(number)
        engine.assert_same(serving.answered([10, 12]), [expected[0], expected[2]])
        serving.put(short[:1], first=20)
        time.sleep(0.05)
    # A request that still waited when the queue was closed has no answer.
    assert set(serving.answers) - {20} == {10, 12}


def check_abort_answers_what_runs_and_serves_what_comes(engine: EngineUnderTest) -> None:
    running = engine.ready(response_length=600)
    long = [request(PROMPTS[i], seed=i, ignore_eos=True, max_tokens=600) for i in range(3)]
    whole, expected = running.generate(long), oracle_greedy(PROMPTS[1], 6)
    delay = 0.05
    for _ in range(20):
        with Serving(running) as serving:
            numbers = serving.put(long)
            time.sleep(delay)
            running.abort()
            cut = serving.answered(numbers)
            assert serving.answered(serving.put([greedy(PROMPTS[1], max_tokens=6)], first=9))[0].token_ids == expected
        if any(output.finish_reason == "abort" and output.token_ids for output in cut):
            break
        delay *= 1.5 if all(output.finish_reason == "abort" for output in cut) else 0.6
    else:
        pytest.fail("no abort came while a response had tokens")
    for part, all_ in zip(cut, whole, strict=True):
        count = len(part.token_ids)
        assert part.finish_reason == ("length" if count == 600 else "abort")
        assert part.token_ids == all_.token_ids[:count]
        engine.assert_close([part.log_probs], [all_.log_probs[:count]])


def check_a_conversation_goes_on_with_the_newest_weights(engine: EngineUnderTest) -> None:
    """Turns that extend each other; nothing of a turn before an update is used after it."""
    running = engine.ready(prompt_length=160, response_length=24)
    texts = [[*range(4, 44), *prompt] for prompt in PROMPTS[:3]]
    for version, seed in ((0, 0), (0, 0), (2, 1), (2, 1), (4, 0)):
        if version != running.weight_version:
            running.load_weights(weights_of(seed=seed), version)
        asked = [request(text, seed=10 * version + i, max_tokens=12) for i, text in enumerate(texts)]
        with Serving(running) as serving:
            outputs = serving.answered(serving.put(asked))
        assert {output.weight_version for output in outputs} == {running.weight_version}
        engine.assert_of_the_model(asked, outputs, seed)
        texts = [text + output.token_ids + [50 + version, 60] for text, output in zip(texts, outputs, strict=True)]


# ---- sizes


def check_long_and_short_prompts_in_one_batch(engine: EngineUnderTest) -> None:
    """Prompts of one token up to all that fits, more of them than run at once, longer than goes in at once."""
    longest = 160
    sizes: dict[str, Any] = {
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


# ---- cancellation


def check_abort_gives_back_what_there_is(engine: EngineUnderTest) -> None:
    """Ended responses are whole, others a first part of what they would have been; the next batch is as ever."""
    running = engine.ready(response_length=600, max_num_seqs=8)
    requests = [
        request(PROMPTS[i % 6], seed=i, ignore_eos=True, max_tokens=1 if i % 3 == 0 else 600) for i in range(24)
    ]
    whole = running.generate(requests)
    assert [len(output.token_ids) for output in whole] == [asked.sampling.max_tokens for asked in requests]
    delay, cut = 0.05, list(whole)
    for _ in range(40):
        cut = _generate_and_abort_after(running, requests, delay)
        some_tokens = any(output.finish_reason == "abort" and output.token_ids for output in cut)
        ended = any(output.finish_reason == "length" for output in cut)
        if some_tokens and ended:
            break
        delay *= 1.5 if any(output.finish_reason == "abort" for output in cut) else 0.6
    else:
        pytest.fail("no abort came while some responses had ended and others had tokens")
    for asked, part, all_ in zip(requests, cut, whole, strict=True):
        count = len(part.token_ids)
        assert len(part.log_probs) == count
        assert part.weight_version == 0
        assert part.finish_reason == ("length" if count == asked.sampling.max_tokens else "abort")
        assert part.token_ids == all_.token_ids[:count]
        engine.assert_close([part.log_probs], [all_.log_probs[:count]])
    assert sum(len(output.token_ids) for output in cut) < sum(len(output.token_ids) for output in whole)
    engine.assert_same(running.generate(requests[:4]), whole[:4])


def _generate_and_abort_after(
    running: BaseRollout, requests: list[RolloutRequest], delay: float
) -> list[RolloutOutput]:
    found: list[RolloutOutput] = []
    thread = threading.Thread(target=lambda: found.extend(running.generate(requests)))
    thread.start()
    time.sleep(delay)
    running.abort()
    thread.join(timeout=60)
    assert not thread.is_alive(), "generate did not return after abort()"
    assert len(found) == len(requests)
    return found


def check_abort_without_a_running_generate_does_nothing(engine: EngineUnderTest) -> None:
    asleep = engine.build()
    asleep.abort()
    running = engine.ready()
    running.abort()
    running.abort()
    outputs = running.generate([greedy(p) for p in PROMPTS])
    assert tokens_of(outputs) == [oracle_greedy(p, 12) for p in PROMPTS]
    running.abort()
    assert tokens_of(running.generate([greedy(PROMPTS[0])])) == [oracle_greedy(PROMPTS[0], 12)]


# ---- memory


def check_sleep_gives_the_memory_back(engine: EngineUnderTest) -> None:
    """Also the caller's own tensors, should the engine have kept them; and ten times over nothing piles up."""
    running = engine.build(free_cache_engine=True)
    asked, size = [greedy(p) for p in PROMPTS], sum(tensor.nbytes for _, tensor in weights_of())
    held = [engine.held_bytes(running)]
    for version in range(11):
        given = [(name, tensor.clone()) for name, tensor in weights_of()]
        references = [weakref.ref(tensor) for _, tensor in given]
        with running.awake(lambda given=given: iter(given), version):
            assert tokens_of(running.generate(asked)) == [oracle_greedy(p, 12) for p in PROMPTS]
            del given
            if version == 0:
                assert engine.held_bytes(running) >= held[0] + size or engine.keeps_memory
        alive = sum(reference() is not None for reference in references)
        assert alive == 0 or engine.keeps_memory, f"{alive} of {len(references)} given tensors are still held"
        if version in (0, 10):
            held.append(engine.held_bytes(running))
    assert held[1] <= held[0] + 256 * KIB or engine.keeps_memory, f"before, and after the first sleep: {held}"
    assert held[2] <= held[1] + 64 * KIB, f"before, after one sleep, after eleven: {held}"


def check_ten_thousand_requests_leave_nothing_behind(engine: EngineUnderTest) -> None:
    """Bounds on tensors, on Python objects and on the memory of this process and its children."""
    running = engine.ready(max_num_seqs=512, max_num_batched_tokens=4096)

    def serve(count: int, seed: int) -> None:
        for start in range(seed, seed + count, 500):
            prompts = [[4 + i % 100, 4 + i // 100 % 100, 4 + i % 7] for i in range(start, start + 500)]
            asked = [request(p, seed=start + i, max_tokens=2, ignore_eos=True) for i, p in enumerate(prompts)]
            outputs = running.generate(asked)
            assert all(len(output.token_ids) == 2 for output in outputs)

    serve(2000, seed=0)  # buffers of the allocator, thread pools, compiled kernels: they come once
    bytes_before, objects_before, resident_before = engine.held_bytes(running), len(gc.get_objects()), _resident()
    serve(10_000, seed=2000)
    assert engine.held_bytes(running) <= bytes_before + 64 * KIB
    # A thing kept for each request would be 10,000 objects; 10,000 results of a few hundred bytes, megabytes.
    assert len(gc.get_objects()) <= objects_before + 1000
    assert _resident() <= resident_before + 24 * MIB


def _resident() -> int:
    """Resident memory of this process and its children."""
    gc.collect()
    me = psutil.Process()
    return sum(process.memory_info().rss for process in [me, *me.children(recursive=True)])


# ---- the end of a response


def check_an_end_token_ends_the_response_and_is_kept(engine: EngineUnderTest) -> None:
    chosen = oracle_greedy(PROMPTS[0], 12)
    cut = chosen.index(chosen[4]) + 1
    running = engine.build(eos=[EOS, chosen[4]])  # a model with two end tokens, of which the second comes up
    running.wake()
    running.load_weights(weights_of(), version=0)
    stopped, ignored = running.generate([greedy(PROMPTS[0], ignore_eos=False), greedy(PROMPTS[0])])
    assert (stopped.token_ids, stopped.finish_reason) == (chosen[:cut], "stop")
    assert len(stopped.log_probs) == cut
    assert (ignored.token_ids, ignored.finish_reason) == (chosen, "length")


def check_stop_token_ids_stop_also_when_eos_is_ignored(engine: EngineUnderTest) -> None:
    chosen = oracle_greedy(PROMPTS[2], 12)
    cut = chosen.index(chosen[3]) + 1
    first, second, third = engine.ready().generate(
        [
            greedy(PROMPTS[2], stop_token_ids=(chosen[3],)),
            greedy(PROMPTS[2]),
            greedy(PROMPTS[2], stop_token_ids=(chosen[3], 3, 2, 0)),
        ]
    )
    assert (first.token_ids, first.finish_reason) == (chosen[:cut], "stop")
    assert (second.token_ids, second.finish_reason) == (chosen, "length")
    assert third == first


def check_a_stop_text_ends_at_the_token_that_completes_it(engine: EngineUnderTest) -> None:
    running = engine.ready()
    chosen = next(c for p in PROMPTS if len(set(c := oracle_greedy(p, 12))) > 6 and not set(c[:8]) & {0, 1, 2, 3})
    prompt = next(p for p in PROMPTS if oracle_greedy(p, 12) == chosen)
    text = [running.tokenizer.decode([token]) for token in chosen]
    stop = text[4] + text[5]
    cut = next(i for i in range(1, 12) if text[i - 1] + text[i] == stop) + 1
    ended, other = running.generate([greedy(prompt, stop=("no such text", stop)), greedy(prompt, stop=("no such",))])
    assert (ended.token_ids, ended.finish_reason) == (chosen[:cut], "stop")
    assert (other.token_ids, other.finish_reason) == (chosen, "length")


def check_each_request_has_its_own_length(engine: EngineUnderTest) -> None:
    """Rows end one by one; those that go on must go on from their own past."""
    lengths = [2, 12, 1, 9, 3, 6]
    requests = [greedy(p, max_tokens=n) for p, n in zip(PROMPTS, lengths, strict=True)]
    for asked, given, length in zip(requests, engine.ready().generate(requests), lengths, strict=True):
        assert given.token_ids == oracle_greedy(asked.prompt_ids, length)
        assert given.finish_reason == "length"
        expected = oracle_log_probs(asked.prompt_ids, given.token_ids, 1.0, "qwen3")
        torch.testing.assert_close(torch.tensor(given.log_probs), expected, atol=engine.log_prob_tolerance, rtol=1e-5)


# ---- weights


def check_new_weights_are_used_at_once_and_stamped(engine: EngineUnderTest) -> None:
    running = engine.ready()
    before = running.generate([greedy(PROMPTS[0])])[0]
    running.load_weights(weights_of(seed=1), version=5)
    after = running.generate([greedy(PROMPTS[0])])[0]
    assert (before.weight_version, after.weight_version) == (0, 5)
    assert before.token_ids == oracle_greedy(PROMPTS[0], 12)
    assert after.token_ids == oracle_greedy(PROMPTS[0], 12, seed=1) != before.token_ids


def check_an_update_shows_in_prompts_that_were_just_served(engine: EngineUnderTest) -> None:
    """Nothing computed from older weights is used: no prefix, no prompt, also between two halves of one batch."""
    running = engine.ready()
    sampled = [request(p, seed=i, ignore_eos=True) for i, p in enumerate(PROMPTS * 2)]
    requests = [*sampled, *[greedy(p) for p in PROMPTS]]
    half = len(requests) // 2
    for version, seed in ((1, 1), (2, 0), (3, 2)):
        first = running.generate(requests[:half])
        running.load_weights(weights_of(seed=seed), version)
        second = running.generate(requests[half:])
        again = running.generate(requests[:half])
        assert {o.weight_version for o in first} == {version - 1}
        assert {o.weight_version for o in second + again} == {version}
        engine.assert_of_the_model(requests[half:], second, seed)
        engine.assert_of_the_model(requests[:half], again, seed)
        assert tokens_of(second)[-len(PROMPTS) :] == [oracle_greedy(p, 12, seed=seed) for p in PROMPTS]
        assert tokens_of(again) != tokens_of(first)
        fresh = engine.build()
        fresh.wake()
        fresh.load_weights(weights_of(seed=seed), version)
        engine.assert_same(second + again, fresh.generate(requests[half:]) + fresh.generate(requests[:half]))


def check_tensors_changed_in_place_show_with_the_next_version(engine: EngineUnderTest) -> None:
    """A trainer steps in place on the tensors that it gave: the engine may hold copies or those very tensors."""
    mine = {name: tensor.clone() for name, tensor in weights_of(seed=0)}
    running = engine.build()
    running.wake()
    for version, seed in ((0, 0), (1, 1), (2, 2), (3, 0)):
        for name, tensor in weights_of(seed=seed):
            mine[name].copy_(tensor)
        running.load_weights(mine.items(), version)
        outputs = running.generate([greedy(p) for p in PROMPTS])
        assert tokens_of(outputs) == [oracle_greedy(p, 12, seed=seed) for p in PROMPTS]
        assert {output.weight_version for output in outputs} == {version}
    for (name, tensor), (_, expected) in zip(mine.items(), weights_of(seed=0), strict=True):
        assert torch.equal(tensor, expected), f"the engine changed {name}, which is the trainer's"


def check_weights_that_do_not_fit_are_named(engine: EngineUnderTest) -> None:
    running = engine.ready()
    weights = dict(weights_of())
    weights["model.norm.wait"] = weights.pop("model.norm.weight")
    weights["lm_head.weight"] = weights["lm_head.weight"][:100]
    seen = []
    with pytest.raises(RolloutError) as error:
        running.load_weights(((name, seen.append(name) or tensor) for name, tensor in weights.items()), version=1)
    for part in ("model.norm.wait", "model.norm.weight", "lm_head.weight", "[100, 64]", "[104, 64]"):
        assert part in str(error.value)
    assert len(seen) == len(weights)  # a collective iterator is drained, or the other ranks wait for ever
    with pytest.raises(RolloutError, match="no weights"):
        running.generate([greedy(PROMPTS[0])])


def check_awake_loads_once_per_version(engine: EngineUnderTest) -> None:
    running, loads = engine.build(free_cache_engine=False), []

    def weights(seed: int) -> Iterator[tuple[str, Tensor]]:
        loads.append(seed)
        return weights_of(seed=seed)

    for version, seed in ((3, 0), (3, 0), (4, 1), (4, 1)):
        with running.awake(lambda seed=seed: weights(seed), version) as awake:
            output = awake.generate([greedy(PROMPTS[1])])[0]
        assert output.weight_version == version
        assert output.token_ids == oracle_greedy(PROMPTS[1], 12, seed=seed)
    assert loads == [0, 1]


def check_asleep_without_weights_it_loads_again(engine: EngineUnderTest) -> None:
    running = engine.build(free_cache_engine=True)
    for _ in range(2):
        with running.awake(weights_of, version=3):
            assert running.generate([greedy(PROMPTS[1])])[0].token_ids == oracle_greedy(PROMPTS[1], 12)


def check_it_sleeps_after_an_error(engine: EngineUnderTest) -> None:
    running = engine.build(free_cache_engine=True)
    with pytest.raises(ZeroDivisionError), running.awake(weights_of, version=1):
        raise ZeroDivisionError
    with pytest.raises(RolloutError, match="awake"):
        running.generate([greedy(PROMPTS[0])])


# ---- what is refused


def check_what_cannot_be_served_is_refused(engine: EngineUnderTest) -> None:
    running = engine.ready()
    for bad, words in (
        (request([]), "request 1 has an empty prompt"),
        (request([5, VOCAB]), "outside of the vocabulary of 104"),
        (request([5] * 8, max_tokens=13), "8 prompt tokens and asks for 13 more, but there is room for 20"),
    ):
        with pytest.raises(RolloutError, match=words):
            running.generate([request(PROMPTS[0]), bad])


def check_without_weights_nothing_is_generated(engine: EngineUnderTest) -> None:
    running = engine.build()
    running.wake()
    with pytest.raises(RolloutError, match="no weights"):
        running.generate([request(PROMPTS[0])])


# ---- columns


def check_the_columns_by_hand(engine: EngineUnderTest) -> None:
    chosen = [oracle_greedy(prompt, 4) for prompt in ([10, 20, 30], [7])]
    end = chosen[1][1]
    running = engine.build(response_length=4, eos=[end])
    batch = prompt_batch([[10, 20, 30], [7]], width=5, do_sample=False)
    with running.awake(weights_of, version=9):
        columns = running.generate_sequences(batch)
    # The second response ends with its second token, unless that token comes earlier, in either response.
    lengths = [next((i + 1 for i, token in enumerate(c) if token == end), 4) for c in chosen]
    rows = [c[:n] + [0] * (4 - n) for c, n in zip(chosen, lengths, strict=True)]
    mask = [[1] * n + [0] * (4 - n) for n in lengths]
    expected = {
        "prompts": [[99, 99, 10, 20, 30], [99, 99, 99, 99, 7]],
        "responses": rows,
        "response_mask": mask,
        "input_ids": [[99, 99, 10, 20, 30, *rows[0]], [99, 99, 99, 99, 7, *rows[1]]],
        "attention_mask": [[0, 0, 1, 1, 1, *mask[0]], [0, 0, 0, 0, 1, *mask[1]]],
        "position_ids": [
            [0, 0, 0, 1, 2, *[2 + min(i, lengths[0]) for i in range(1, 5)]],
            [0, 0, 0, 0, 0, *[0 + min(i, lengths[1]) for i in range(1, 5)]],
        ],
    }
    assert lengths[1] <= 2
    assert set(columns.batch.keys()) == {*expected, "rollout_log_probs"}
    for name, values in expected.items():
        assert columns.batch[name].dtype == torch.int64
        assert columns.batch[name].tolist() == values, name
    log_probs = columns.batch["rollout_log_probs"]
    assert log_probs.dtype == torch.float32
    assert log_probs.shape == (2, 4)
    for row, (prompt, response) in enumerate(zip(([10, 20, 30], [7]), chosen, strict=True)):
        n = lengths[row]
        torch.testing.assert_close(
            log_probs[row, :n], oracle_log_probs(prompt, response[:n], 1.0, "qwen3"), atol=1e-5, rtol=1e-5
        )
        assert log_probs[row, n:].tolist() == [0.0] * (4 - n)
    assert set(columns.non_tensor_batch) == {"finish_reason", "weight_version"}
    assert columns.non_tensor_batch["finish_reason"].tolist() == ["stop" if end in c else "length" for c in chosen]
    assert columns.non_tensor_batch["weight_version"].tolist() == [9, 9]


def check_columns_do_not_depend_on_order_or_split(engine: EngineUnderTest) -> None:
    batch = prompt_batch(PROMPTS[:5] * 2, indices=[0] * 5 + [1] * 5)
    running = engine.ready()
    whole = running.generate_sequences(batch).batch["responses"]
    assert not torch.equal(whole[:5], whole[5:])  # siblings differ
    parts = [running.generate_sequences(part).batch["responses"] for part in batch.chunk(2)]
    assert torch.equal(torch.cat(parts), whole)
    order = [9, 3, 0, 7, 1, 2, 8, 4, 6, 5]
    assert torch.equal(running.generate_sequences(batch[order]).batch["responses"], whole[order])


def check_step_and_seed_change_the_samples(engine: EngineUnderTest) -> None:
    running, other = engine.ready(), engine.ready(seed=43)
    responses = [
        engine_.generate_sequences(prompt_batch(PROMPTS[:3], global_steps=step)).batch["responses"].tolist()
        for engine_, step in ((running, 1), (running, 1), (running, 2), (other, 1))
    ]
    assert responses[0] == responses[1]
    assert responses[0] != responses[2] != responses[3] != responses[0]


def check_validation_has_parameters_of_its_own(engine: EngineUnderTest) -> None:
    chosen = oracle_greedy(PROMPTS[0], 12)
    running = engine.ready(ignore_eos=True)

    def responses(engine_: BaseRollout, **meta: Any) -> list[list[int]]:
        return engine_.generate_sequences(prompt_batch([PROMPTS[0]] * 3, **meta)).batch["responses"].tolist()

    assert responses(running, validate=True) == [chosen] * 3  # greedy by default
    assert responses(running) != [chosen] * 3
    assert responses(running, do_sample=False) == [chosen] * 3
    sampled = engine.ready(ignore_eos=True, val_kwargs=SamplingConfig(do_sample=True, temperature=1.0))
    assert responses(sampled, validate=True) == responses(running)  # the same seeds, the same parameters
    top_1 = engine.ready(ignore_eos=True, val_kwargs=SamplingConfig(do_sample=True, temperature=1.0, top_k=1))
    assert responses(top_1, validate=True) == [chosen] * 3
    short = engine.ready(ignore_eos=True, val_kwargs=SamplingConfig(max_tokens=5, stop_token_ids=(chosen[2],)))
    cut = min(chosen.index(chosen[2]) + 1, 5)
    assert responses(short, validate=True) == [chosen[:cut] + [0] * (12 - cut)] * 3


def check_prompts_that_do_not_fit_are_refused_by_uid(engine: EngineUnderTest) -> None:
    running = engine.ready()
    empty = prompt_batch([[5, 6], [7]])
    empty.batch["attention_mask"][1] = 0
    with pytest.raises(RolloutError, match=r"prompt 'prompt-\[7\]' is empty"):
        running.generate_sequences(empty)
    with pytest.raises(RolloutError, match=r"prompt 'prompt-\[5.*has 9 tokens, more than prompt_length=8"):
        running.generate_sequences(prompt_batch([[7], [5] * 9], width=9))
    right = prompt_batch([[5, 6], [7]])
    right.batch["attention_mask"] = right.batch["attention_mask"].flip(-1)
    with pytest.raises(SchemaError, match="padded on the left"):
        running.generate_sequences(right)


CHECKS = [value for name, value in sorted(globals().items()) if name.startswith("check_")]
