"""The router: conversations keep their engine, engines have their room, and lost engines cost nothing."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from verl.errors import EngineLostError, RolloutError
from verl.serving.router import MAX_EMPTY_ANSWERS, RolloutEndedError, Router
from verl.workers.rollout.request import DrawnPart, FinishReason, RolloutOutput, RolloutRequest, SamplingParams
from verl.workers.rollout.request_queue import Answer


class RecordingLink:
    """An engine that answers only when the test says so."""

    def __init__(self) -> None:
        self.requests: list[RolloutRequest] = []
        self.sent: list[tuple[int, int]] = []
        """Number and first token of each request."""
        self.cancelled: list[int] = []
        self.aborted = self.interrupted = self.closed = 0

    def put(self, request_id: int, request: RolloutRequest) -> None:
        self.requests.append(request)
        self.sent.append((request_id, request.prompt_ids[0]))

    def cancel(self, request_id: int) -> None:
        self.cancelled.append(request_id)

    def abort(self) -> None:
        self.aborted += 1

    def interrupt(self) -> None:
        self.interrupted += 1

    def close(self) -> None:
        self.closed += 1

    def number_of(self, token: int) -> int:
        return next(number for number, sent in reversed(self.sent) if sent == token)

    @property
    def tokens(self) -> list[int]:
        return [token for _, token in self.sent]


def output(token: int) -> RolloutOutput:
    return RolloutOutput([token], [-1.0], "stop", 0)


class Played:
    """A router, its engines, and the requests under way."""

    def __init__(self, engines: int, room: int) -> None:
        self.links = [RecordingLink() for _ in range(engines)]
        self.router = Router(room)
        self.router.open(self.links)

    async def ask(self, conversation: str, token: int) -> asyncio.Task[RolloutOutput]:
        request = RolloutRequest([token], SamplingParams(max_tokens=1, seed=0))
        task = asyncio.create_task(self.router.generate(conversation, request))
        await asyncio.sleep(0)
        return task

    def answer(self, engine: int, token: int, answer: Answer | DrawnPart | None = None) -> None:
        self.router.take_answer(self.links[engine].number_of(token), answer or output(token + 100))

    @property
    def entries(self) -> int:
        """What the router holds of requests."""
        engines = self.router._engines
        of_engines = sum(len(e.waiting) + len(e.running) for e in engines)
        return len(self.router._pending) + len(self.router._held) + len(self.router._unbound) + of_engines


def play(engines: int, room: int, script: Callable[[Played], Awaitable[None]]) -> None:
    async def whole() -> None:
        played = Played(engines, room)
        await script(played)
        assert played.entries == 0

    asyncio.run(whole())


def test_a_conversation_stays_and_a_new_one_goes_to_the_engine_with_the_fewest():
    async def script(p: Played) -> None:
        first = [await p.ask("a", 1), await p.ask("b", 2), await p.ask("b", 3), await p.ask("c", 4)]
        assert [link.tokens for link in p.links] == [[1, 4], [2, 3]]
        p.answer(0, 1)
        p.answer(0, 4)
        p.answer(1, 2)
        p.answer(1, 3)
        assert [(await task).token_ids for task in first] == [[101], [102], [103], [104]]
        second = [await p.ask("x", 5), await p.ask("a", 6), await p.ask("b", 7)]
        assert [link.tokens[2:] for link in p.links] == [[5, 6], [7]]  # a: at home, though the other has less to do
        for engine, token in ((0, 5), (0, 6), (1, 7)):
            p.answer(engine, token)
        await asyncio.gather(*second)

    play(2, 8, script)


def test_an_engine_that_is_done_takes_the_conversations_that_wait():
    async def script(p: Played) -> None:
        tasks = [await p.ask(f"{token // 2}", token) for token in range(12)]
        assert [link.tokens for link in p.links] == [[0, 1], [2, 3]]
        assert p.router.waiting == 8
        for token in (0, 1, 4, 5, 6, 7, 8, 9, 10, 11):  # the second engine is slow
            p.answer(0, token)
            await asyncio.sleep(0)
        assert [link.tokens for link in p.links] == [[0, 1, *range(4, 12)], [2, 3]]
        p.answer(1, 2)
        p.answer(1, 3)
        await asyncio.gather(*tasks)

    play(2, 2, script)


def test_a_conversation_that_waits_is_withdrawn_and_outlives_the_loss_of_an_engine():
    async def script(p: Played) -> None:
        tasks = [await p.ask(f"{token}", token) for token in range(5)]
        tasks[2].cancel()
        await asyncio.sleep(0)
        p.answer(0, 0, EngineLostError("killed"))
        p.answer(1, 1)
        await asyncio.sleep(0)
        assert [link.tokens for link in p.links] == [[0], [1, 0]], "the oldest first"
        for token in (0, 3, 4):
            p.answer(1, token)
            await asyncio.sleep(0)
        await asyncio.gather(*tasks, return_exceptions=True)

    play(2, 1, script)


def test_an_engine_has_its_room_and_cancelling_frees_a_place_at_once():
    async def script(p: Played) -> None:
        tasks = [await p.ask(str(token), token) for token in range(5)]
        link = p.links[0]
        assert link.tokens == [0, 1]
        tasks[2].cancel()  # waits: the engine never hears of it
        tasks[0].cancel()  # runs
        await asyncio.sleep(0)
        assert link.cancelled == [link.number_of(0)]
        assert link.tokens == [0, 1, 3]
        p.answer(0, 0)  # too late, nobody waits
        p.answer(0, 1)
        await tasks[1]
        assert link.tokens == [0, 1, 3, 4]
        p.answer(0, 3, RolloutError("cannot be served"))
        with pytest.raises(RolloutError, match="cannot be served"):
            await tasks[3]
        p.answer(0, 4)
        p.answer(0, 4)  # an engine that answers twice
        await tasks[4]

    play(1, 2, script)


def test_what_a_lost_engine_had_runs_on_the_others_and_none_is_left_if_all_are_lost():
    async def script(p: Played) -> None:
        tasks = [await p.ask(str(token), token) for token in range(6)]
        assert [link.tokens for link in p.links] == [[0, 2], [1, 3]]
        tasks[0].cancel()
        p.answer(0, 2, EngineLostError("gone"))  # before the cancelled one has left
        assert p.links[0].tokens == [0, 2]
        p.answer(1, 1)
        p.answer(1, 3)
        await asyncio.gather(tasks[1], tasks[3])
        assert p.links[1].tokens == [1, 3, 2, 4]  # 5 waits for room
        p.answer(1, 2, EngineLostError("gone, too"))
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends[4:]] == [EngineLostError] * 2
        assert isinstance(ends[2], EngineLostError)
        with pytest.raises(EngineLostError):
            await (await p.ask("new", 9))
        assert [link.closed for link in p.links] == [1, 1]

    play(2, 2, script)


def test_closing_fails_what_waits_and_what_comes_later():
    async def script(p: Played) -> None:
        tasks = [await p.ask("a", 1), await p.ask("a", 2)]
        p.router.close()
        p.router.close()
        ends = await asyncio.gather(*tasks, return_exceptions=True)
        assert [type(end) for end in ends] == [RolloutEndedError] * 2
        with pytest.raises(RolloutError, match="after run"):
            await (await p.ask("a", 3))
        p.answer(0, 1)  # nobody waits
        assert (p.links[0].tokens, p.links[0].closed) == ([1], 1)
        assert p.links[0].cancelled == [p.links[0].number_of(1)]  # the engine drops what nobody waits for

    play(1, 1, script)


def test_a_paused_router_sends_what_waits_to_the_next_engines():
    async def script(p: Played) -> None:
        router, [old] = p.router, p.links
        running, waiting = await p.ask("a", 1), await p.ask("b", 2)  # room for one
        router.pause()
        later, left = await p.ask("a", 3), await p.ask("c", 4)
        left.cancel()
        await asyncio.sleep(0)
        router.close()
        assert (old.tokens, old.cancelled, old.closed) == ([1], [old.number_of(1)], 1)
        p.answer(0, 1)  # of the old weights, and too late
        [new] = p.links = [RecordingLink()]
        asleep = await p.ask("d", 5)
        router.open([new])
        assert new.tokens == []
        router.resume()
        for token, task in enumerate((running, waiting, later), 1):
            p.answer(0, token)
            assert (await task).token_ids == [token + 100]
        p.answer(0, 5)
        await asleep
        assert new.tokens == [1, 2, 3, 5]
        router.close()
        router.pause()
        refused = await p.ask("e", 6)
        router.resume()  # there are no engines
        with pytest.raises(RolloutEndedError):
            await refused

    play(1, 1, script)


def test_aborting_reaches_the_engines_that_draw():
    async def script(p: Played) -> None:
        task = await p.ask("a", 1)
        p.router.abort()
        assert [link.aborted for link in p.links] == [1, 0]
        p.answer(0, 1)
        await task
        p.router.abort()
        assert [link.aborted for link in p.links] == [1, 0]

    play(2, 1, script)


def part(tokens: list[int], version: int, reason: FinishReason = "abort") -> RolloutOutput:
    return RolloutOutput(tokens, [-float(token) for token in tokens], reason, version, num_preempted=1)


async def ask_long(p: Played, token: int, told: list[DrawnPart] | None = None) -> asyncio.Task[RolloutOutput]:
    request = RolloutRequest([token], SamplingParams(max_tokens=5, seed=0), streams=told is not None)
    on_part = None if told is None else told.append
    task = asyncio.create_task(p.router.generate(str(token), request, on_part))
    await asyncio.sleep(0)
    return task


async def interrupting(p: Played) -> asyncio.Task[None]:
    task = asyncio.create_task(p.router.interrupt())
    await asyncio.sleep(0)
    return task


def test_an_interrupted_response_goes_on_with_other_weights_and_comes_whole():
    async def script(p: Played) -> None:
        router, [old], told = p.router, p.links, []
        running, ends, unbegun = await ask_long(p, 1, told), await ask_long(p, 2), await ask_long(p, 3)
        waits, left = await ask_long(p, 4), await ask_long(p, 5)  # room for three
        first, second = await interrupting(p), await interrupting(p)
        assert old.interrupted == 2
        p.answer(0, 1, DrawnPart(0, [7]))
        p.answer(0, 1, part([7, 8], 3))
        assert [(load.running, load.waiting) for load in router.state().engines] == [(2, 0)]
        p.answer(0, 2, part([9], 3, "stop"))  # its last token was the one during the interruption
        assert not first.done()
        p.answer(0, 3, part([], -1))
        await asyncio.gather(first, second)
        assert (router.state().held, router.state().paused_s is None) == (4, False)
        assert (await ends).versions == ((3, 1),)
        left.cancel()
        router.close()
        assert (old.tokens, old.cancelled) == ([1, 2, 3], [])
        [new] = p.links = [RecordingLink()]
        router.open([new])
        router.resume()
        assert new.tokens == [1, 3, 4]
        asked = new.requests[0]
        assert (asked.prompt_ids, asked.drawn_count, asked.sampling.max_tokens) == ([1, 7, 8], 2, 3)
        p.answer(0, 1, DrawnPart(0, [6]))
        again = await interrupting(p)  # now within the third of five tokens
        for token in (1, 3, 4):
            p.answer(0, token, part([6], 4))
        await again
        router.resume()  # without an update between
        assert new.requests[-3].prompt_ids == [1, 7, 8, 6]
        p.answer(0, 1, part([5, 4], 4))  # told to stop after the last token that it may have
        for token in (3, 4):
            p.answer(0, token, part([2], 5, "stop"))
        whole = await running
        assert (whole.token_ids, whole.log_probs) == ([7, 8, 6, 5, 4], [-7.0, -8.0, -6.0, -5.0, -4.0])
        assert (whole.finish_reason, whole.weight_version, whole.num_preempted) == ("length", 3, 3)
        assert whole.versions == ((3, 2), (4, 3))
        assert [(await task).versions for task in (unbegun, waits)] == [((4, 1), (5, 1))] * 2
        drawn: list[int] = []
        for one in told:
            assert one.start <= len(drawn)
            drawn[one.start : one.start + len(one.token_ids)] = one.token_ids
        assert drawn == [7, 8, 6]

    play(1, 3, script)


def test_an_interruption_ends_with_the_requests_their_engines_and_the_pause():
    async def script(p: Played) -> None:
        router = p.router
        await router.interrupt()  # nothing runs
        router.resume()
        gone, moved = await ask_long(p, 1), await ask_long(p, 2)
        waits = await interrupting(p)
        gone.cancel()
        await asyncio.sleep(0)
        assert p.links[0].cancelled == [p.links[0].number_of(1)]
        p.answer(1, 2, EngineLostError("gone"))  # the second engine: its request waits for the first
        await waits
        router.resume()
        assert p.links[0].tokens == [1, 2]
        waits = await interrupting(p)
        router.resume()  # the engine has not answered
        p.answer(0, 2, part([7], 0))  # now it does, and is asked for the rest at once
        await waits
        assert p.links[0].requests[-1].prompt_ids == [2, 7]
        waits = await interrupting(p)
        router.close()  # at once, so the next engine draws again what this one has drawn
        await waits
        p.links = [RecordingLink()]
        router.open(p.links)
        router.resume()
        p.answer(0, 2, part([8], 1, "stop"))
        assert (await moved).versions == ((0, 1), (1, 1))

    play(2, 8, script)


def test_what_an_engine_ends_by_itself_is_asked_again_and_what_it_aborts_is_not():
    async def script(p: Played) -> None:
        task = await ask_long(p, 1)
        p.answer(0, 1, part([7], 0))  # another router of this engine has interrupted it
        for _ in range(MAX_EMPTY_ANSWERS):  # an engine that cannot go on
            assert not task.done()
            p.answer(0, 1, part([], 0))
        assert ((await task).token_ids, (await task).finish_reason) == ([7], "abort")
        task = await ask_long(p, 2)
        p.router.abort()
        p.answer(0, 2, part([8], 0))
        assert ((await task).token_ids, (await task).finish_reason) == ([8], "abort")

    play(1, 1, script)
