"""Interrupted responses go on with the next weights, and their callers get what they would have got without that."""

from __future__ import annotations

import asyncio
import itertools
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import torch

from verl.serving.local import LocalSession
from verl.serving.ray import RaySession, RouterActor
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.watched_actor import WatchedActor
from verl.testing.models import tiny_model
from verl.testing.rollout_conformance import (
    PROMPTS,
    EngineUnderTest,
    greedy,
    oracle_greedy,
    request,
    shape_of,
    weights_of,
)
from verl.tools.threads import LoopThread
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.request import DrawnPart, RolloutOutput, RolloutRequest
from verl.workers.rollout.request_queue import EngineRequests
from verl.workers.routers import unknown

LONG = 300
WAYS: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"top_k": 10}, {"temperature": 0.7, "top_p": 0.9}]


def engine_of(folder: Path, name: str) -> BaseRollout:
    return EngineUnderTest(name, folder).build(prompt_length=LONG + 8, response_length=LONG, max_num_seqs=10)


def requests() -> list[RolloutRequest]:
    """Of every length and way to sample; some stream, and one ends with a text of two tokens."""
    chosen = oracle_greedy(PROMPTS[1], LONG)
    engine = EngineUnderTest("native", Path(tempfile.mkdtemp()))
    decode = engine.build().tokenizer.decode
    ends = (decode([chosen[60]]) + decode([chosen[61]]),)
    return [
        *(
            replace(
                request(PROMPTS[i % 6], seed=i, max_tokens=40 * i + 1, ignore_eos=i % 2 == 0, **WAYS[i % 4]),
                streams=i % 3 == 0,
            )
            for i in range(8)
        ),
        greedy(PROMPTS[1], max_tokens=LONG, stop=ends),
    ]


def conversation(ask: Callable[[RolloutRequest], RolloutOutput]) -> list[RolloutOutput]:
    """Three turns, each after all tokens of the turns before."""
    ids, turns = [10, 20, 30], []
    for turn in range(3):
        turns.append(ask(request(ids, seed=turn, max_tokens=90, ignore_eos=True)))
        ids = [*ids, *turns[-1].token_ids, 50 + turn]
    return turns


class LocalEngine:
    """The engine of this process, as a worker group; each round has a new version of the same weights."""

    def __init__(self, engine: BaseRollout) -> None:
        self.engine = engine
        self.versions = itertools.count()

    def limit_silence(self, silent_s: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def serve(self, requests: EngineRequests) -> None:
        version = next(self.versions)
        with self.engine.awake(weights_of, version), requests.open_queue(0, version) as queue:
            queue.on_abort = self.engine.abort
            self.engine.serve(queue)


class RayEngine(Worker):
    """A rank with an engine; each round has a new version of the same weights."""

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self.served = LocalEngine(engine_of(Path(tempfile.mkdtemp()), "native"))
        self._register_dispatch_collect_info("rollout", self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def serve(self, requests: EngineRequests) -> None:
        self.served.serve(requests)


class Asks(RouterActor):
    """Another process with requests of its own."""

    async def ask(self, round_index: int, asked: list[RolloutRequest]) -> list[RolloutOutput]:
        await self.round_opened(round_index)
        named = enumerate(asked)
        return await asyncio.gather(*(self.router.generate(f"own {i}", one) for i, one in named))


@contextmanager
def local(name: str, folder: Path) -> Iterator[tuple[LocalSession, LocalEngine]]:
    thread = LoopThread("router")
    yield LocalSession(10, thread.loop), LocalEngine(engine_of(folder, name))
    thread.stop()


@contextmanager
def on_ray(name: str, folder: Path) -> Iterator[tuple[RaySession, Any]]:
    session, pool = RaySession("the test", 10, 60.0), RayResourcePool([1], use_gpu=False)
    group = RayWorkerGroup(pool, RayWorkerGroup.describe(RayEngine), device_name="cpu")
    group.init_model()
    yield session, group
    session.close()
    group.shutdown()
    pool.release()


def in_rounds(session: Any, group: Any, start: Callable[[], list[Future[Any]]], has_drawn: Event) -> int:
    """Let engines serve and be interrupted as soon as they have drawn, until all futures are done; return how often."""
    futures: list[Future[Any]] = []
    with ThreadPoolExecutor(1) as threads:
        for rounds in itertools.count(1):

            def serve() -> Future[None]:
                session.resume()
                futures.extend([] if futures else start())

                def wait_and_interrupt() -> None:
                    has_drawn.wait(0.05)  # an engine that tells no parts has drawn something then
                    session.interrupt()
                    has_drawn.clear()

                return threads.submit(wait_and_interrupt)

            session.serve_while(group, serve).result()
            if all(future.done() for future in futures):
                return rounds
    raise AssertionError


def check(outputs: list[RolloutOutput], expected: list[RolloutOutput]) -> int:
    """They have the same tokens; return how many versions drew the response with the most."""
    for output, whole in zip(outputs, expected, strict=True):
        assert (output.token_ids, output.finish_reason) == (whole.token_ids, whole.finish_reason)
        assert output.log_probs == pytest.approx(whole.log_probs, abs=2e-5)
        versions = [version for version, _ in output.versions]
        assert versions == sorted(set(versions))
        assert (output.weight_version, sum(count for _, count in output.versions)) == (
            versions[0],
            len(whole.token_ids),
        )
    return max(len(output.versions) for output in outputs)


@pytest.mark.parametrize("name", ["native", "hf"])
def test_callers_get_what_they_would_have_got_without_interruptions(name: str, tmp_path: Path) -> None:
    asked = requests()
    with ThreadPoolExecutor(1) as threads, local(name, tmp_path) as (session, group):
        group.engine.load_weights(weights_of(), -5)
        expected = group.engine.generate(asked)
        turns = conversation(lambda one: group.engine.generate([one])[0])
        told: dict[int, list[DrawnPart]] = {i: [] for i in range(len(asked))}
        has_drawn = Event()

        def start() -> list[Future[Any]]:
            def tell(i: int, part: DrawnPart) -> None:
                told[i].append(part)
                has_drawn.set()

            turns = threads.submit(conversation, lambda one: session.send("talk", one).future().result())
            return [*(session.send(str(i), one, partial(tell, i)).future() for i, one in enumerate(asked)), turns]

        futures: list[Future[Any]] = []
        rounds = in_rounds(session, group, lambda: futures.extend(start()) or futures, has_drawn)
        assert check([future.result() for future in futures[:-1]], expected) >= 2
        assert check(futures[-1].result(), turns) >= 1
        assert rounds >= 2
        for parts, whole in zip(told.values(), expected, strict=True):
            drawn: list[int] = []
            for part in parts:
                assert part.start <= len(drawn)
                drawn[part.start : part.start + len(part.token_ids)] = part.token_ids
            assert drawn == whole.token_ids[: len(drawn)]


def test_the_requests_of_all_processes_go_on(tmp_path: Path, ray_cluster: None) -> None:
    asked, engine = requests(), engine_of(tmp_path, "native")
    engine.load_weights(weights_of(), 0)
    expected = engine.generate(asked)
    with on_ray("native", tmp_path) as (session, group):
        other = WatchedActor("another", Asks, "silences", 60.0, 10, "", session.new_index())
        session.add(1, other)
        futures: list[Future[Any]] = []
        has_drawn = Event()

        def start() -> list[Future[Any]]:
            own = [session.send(str(i), one, lambda _: has_drawn.set()).future() for i, one in enumerate(asked)]
            futures.extend([*own, other.actor.ask.remote(session.round_index, asked).future()])
            return futures

        rounds = in_rounds(session, group, start, has_drawn)
        drawn = [future.result() for future in futures]
        assert max(check(drawn[:-1], expected), check(drawn[-1], expected)) >= 2
        assert rounds >= 2
        session.interrupt()  # while the engines sleep
        other.end()


@pytest.mark.parametrize("name", ["native", "hf"])
def test_the_experts_of_an_interrupted_response_are_those_of_both_parts(name: str, tmp_path: Path) -> None:
    engine = EngineUnderTest(name, tmp_path).build("qwen3_moe", prompt_length=20)
    weights = [tiny_model("qwen3_moe", seed=seed, **shape_of("qwen3_moe")).state_dict() for seed in (0, 1)]
    engine.load_weights(weights[0].items(), 0)
    asked = [replace(request(p, seed=i, ignore_eos=True), returns_routing=True) for i, p in enumerate(PROMPTS)]
    whole, begun = engine.generate(asked), []
    for one, output in zip(asked, whole, strict=True):
        experts = output.routed_experts[: len(one.prompt_ids) + 5].clone()
        experts[-1] = unknown(experts.dtype)  # the last token drawn has not gone into the model
        begun.append(RolloutOutput(output.token_ids[:5], output.log_probs[:5], "abort", 0, experts, 0))
    left = [one.after(output.token_ids) for one, output in zip(asked, begun, strict=True)]
    for first, rest, expected in zip(begun, engine.generate(left), whole, strict=True):
        joined = first.followed_by(rest)
        assert (joined.token_ids, joined.versions) == (expected.token_ids, ((0, 12),))
        assert torch.equal(joined.routed_experts, expected.routed_experts)
    engine.load_weights(weights[1].items(), 1)
    for first, rest, one in zip(begun, engine.generate(left), asked, strict=True):
        joined, known = first.followed_by(rest), len(one.prompt_ids) + 4
        assert (joined.versions, joined.weight_version) == (((0, 5), (1, 7)), 0)
        assert torch.equal(joined.routed_experts[:known], first.routed_experts[:known])
        assert torch.equal(joined.routed_experts[known:], rest.routed_experts[known:])
