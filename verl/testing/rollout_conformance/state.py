"""Memory and weights."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator

import psutil
import pytest
import torch
from torch import Tensor

from verl.errors import RolloutError
from verl.testing.rollout_conformance.engine_under_test import (
    KIB,
    MIB,
    PROMPTS,
    EngineUnderTest,
    greedy,
    oracle_greedy,
    request,
    tokens_of,
    weights_of,
)

# ---- memory


def check_sleep_gives_the_memory_back(engine: EngineUnderTest) -> None:
    """Also the caller's own tensors, should the engine have kept them; and ten times over nothing piles up."""
    running = engine.build(free_cache_engine=True)
    requests, size = [greedy(p) for p in PROMPTS], sum(tensor.nbytes for _, tensor in weights_of())
    held = [engine.held_bytes(running)]
    for version in range(11):
        weights_before = [(name, tensor.clone()) for name, tensor in weights_of()]
        references = [weakref.ref(tensor) for _, tensor in weights_before]
        with running.awake(lambda weights_before=weights_before: iter(weights_before), version):
            assert tokens_of(running.generate(requests)) == [oracle_greedy(p, 12) for p in PROMPTS]
            del weights_before
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
            requests = [request(p, seed=start + i, max_tokens=2, ignore_eos=True) for i, p in enumerate(prompts)]
            outputs = running.generate(requests)
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
