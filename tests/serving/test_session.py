"""Sessions: requests of two processes and rounds, paused, aborted, and answered with the version of their weights."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import ray

from verl.errors import EngineLostError, ProcessLostError
from verl.serving.local import LocalSession
from verl.serving.ray import RaySession, RouterActor, longest_silence
from verl.serving.router import RolloutEndedError
from verl.single_controller.base import Worker
from verl.single_controller.base.decorator import Dispatch, register
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.single_controller.ray.watched_actor import WatchedActor
from verl.tools.threads import LoopThread
from verl.workers.rollout.request import RolloutOutput, RolloutRequest, SamplingParams
from verl.workers.rollout.request_queue import EngineRequests, RequestQueue

NEVER_ENDS = 99
"""A prompt whose response ends only if it is aborted."""


def serve(queue: RequestQueue, version: int) -> None:
    """Answer each request with its own first token, in its own time."""
    drawing: list[int] = []

    def abort() -> None:
        for number in drawing:
            queue.answer(number, RolloutOutput([8], [-2.0], "abort", version))

    queue.on_abort = abort
    while taken := queue.take(wait=True):
        for number, request in taken:
            if request.prompt_ids[0] == NEVER_ENDS:
                drawing.append(number)
            else:
                queue.answer(number, RolloutOutput([request.prompt_ids[0]], [-1.0], "stop", version))


class Echo(Worker):
    """A rank whose engine is :func:`serve`; each round has other weights."""

    version = -1

    @register(dispatch_mode=Dispatch.ONE_TO_ALL)
    def init_model(self) -> None:
        self._register_dispatch_collect_info("rollout", self.rank, is_collect=True)

    @register(dispatch_mode=Dispatch.ONE_TO_ALL, blocking=False)
    def serve(self, requests: EngineRequests) -> None:
        self.version += 1
        with requests.open_queue(self.rank, self.version) as queue:
            serve(queue, self.version)


class LocalEcho:
    """The same in this process, as a worker group."""

    version = -1

    def limit_silence(self, silent_s: Any) -> AbstractContextManager[None]:
        return nullcontext()

    def serve(self, requests: EngineRequests) -> None:
        self.version += 1
        with requests.open_queue(0, self.version) as queue:
            serve(queue, self.version)


def request(token: int) -> RolloutRequest:
    return RolloutRequest([token], SamplingParams(max_tokens=1, seed=0))


@contextmanager
def local() -> Iterator[tuple[LocalSession, LocalEcho]]:
    thread = LoopThread("router")
    yield LocalSession(8, thread.loop), LocalEcho()
    thread.stop()


@contextmanager
def on_ray() -> Iterator[tuple[RaySession, Any]]:
    session, pool = RaySession("the test", 8, 60.0), RayResourcePool([2], use_gpu=False)
    group = RayWorkerGroup(pool, RayWorkerGroup.describe(Echo), device_name="cpu")
    group.init_model()
    yield session, group
    session.close()
    group.shutdown()
    pool.release()


@pytest.mark.parametrize("kind", [local, on_ray])
def test_a_session_stays_over_rounds_of_its_engines(kind: Any, ray_cluster: None) -> None:
    with ThreadPoolExecutor(1) as threads, kind() as (session, group):
        assert session.weight_version == -1
        held: list[Any] = []

        def first() -> Future[Any]:
            def ask() -> list[RolloutOutput]:
                answers = [session.send("a", request(token)).future() for token in (5, 6)]
                drawn = [future.result(60) for future in answers]
                endless = session.send("a", request(NEVER_ENDS)).future()
                session.send("a", request(7)).future().result(60)  # so the engine has the one before, too
                session.abort()
                drawn.append(endless.result(60))
                session.pause()
                held.append(session.send("a", request(9)).future())
                return drawn

            return threads.submit(ask)

        drawn = session.serve_while(group, first).result()
        assert [(one.token_ids, one.finish_reason, one.weight_version) for one in drawn] == [
            ([5], "stop", 0),
            ([6], "stop", 0),
            ([8], "abort", 0),
        ]
        assert not held[0].done()

        def second() -> Future[Any]:
            session.resume()
            return held[0]

        drawn = session.serve_while(group, second).result()
        assert (drawn.token_ids, drawn.weight_version, session.weight_version) == ([9], 1, 1)
        with pytest.raises(RolloutEndedError):
            session.send("a", request(5)).future().result(60)


class Asks(RouterActor):
    """Another process with requests of its own."""

    async def ask(self, round_index: int, token: int) -> list[int]:
        await self.round_opened(round_index)
        return (await self.router.generate("own", request(token))).token_ids


def test_the_ranks_fetch_from_processes_that_come_later_and_forget_those_that_die(ray_cluster: None) -> None:
    with on_ray() as (session, group):
        first, later = (WatchedActor("another", Asks, "silences", 60.0, 8, "", session.new_index()) for _ in range(2))
        session.add(1, first)
        with session.awake(group):
            index = session.round_index
            assert ray.get(first.actor.ask.remote(index, 5)) == [5]
            session.pause()
            session.add(2, later)
            held = later.actor.ask.remote(index, 6)
            assert ray.wait([held], timeout=0.2)[0] == []  # it is paused as the others are
            state = session.state()
            assert (state.held, state.paused_s is None, state.weight_version, len(state.engines)) == (1, False, 0, 2)
            session.resume()
            assert ray.get(held) == [6]
            left = later.actor.ask.remote(index, NEVER_ENDS)
            later.end()
            session.remove(2)
            with pytest.raises(ray.exceptions.RayActorError):
                ray.get(left)
            assert ray.get(first.actor.ask.remote(index, 7)) == [7]
            session.check()
        # Ranks die: the requests that they had wait for the engines of another group.
        asked: list[Any] = []

        def lose_ranks() -> None:
            with session.awake(group, keeps_requests=True):
                asked.append(first.actor.ask.remote(session.round_index, NEVER_ENDS))
                asked.append(session.send("a", request(NEVER_ENDS)).future())
                while sum(load.running for load in session.state().engines) < 2:
                    session.check()
                for worker in group.workers:
                    ray.kill(worker)
                while True:
                    session.check()

        with pytest.raises(ProcessLostError):
            lose_ranks()
        assert session.state().held == 2
        others = RayWorkerGroup(group.resource_pool, RayWorkerGroup.describe(Echo), device_name="cpu")
        others.init_model()
        with session.awake(others, keeps_requests=True):
            session.resume()
            # So the engines have the ones before, too.
            assert ray.get(first.actor.ask.remote(session.round_index, 7)) == [7]
            assert session.send("a", request(7)).future().result(60).token_ids == [7]
            session.abort()
            assert [ray.get(asked[0]), asked[1].result(60).token_ids] == [[8], [8]]
        others.shutdown()
        first.end()
        session.remove(1)
        session.pause()  # so that the request waits
        call = session.send("a", request(5)).future()
        ray.kill(session.router.actor)
        with pytest.raises(EngineLostError):
            call.result(60)


def test_an_engine_is_as_silent_as_the_router_that_heard_it_last() -> None:
    # Engine 0: 2 s by the router that heard it last. Engine 1 has requests of the second alone, engine 2 none.
    assert longest_silence([[9.0, None, None], [2.0, 4.0, None], []]) == 4.0
    assert longest_silence([[9.0, None], [2.0, None]]) == 2.0
    assert longest_silence([[None]]) == longest_silence([]) == 0.0
