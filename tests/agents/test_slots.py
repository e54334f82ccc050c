"""Calls of a tool at once: waiting, cancelling, and processes that die with a slot in their hands."""

from __future__ import annotations

import asyncio

import pytest
import ray

from verl.agents.ray import AgentRouter, RaySlots
from verl.agents.slots import ProcessSlots, SlotTable
from verl.single_controller.ray.watched_actor import light_actor


def test_a_cancelled_wait_gives_its_slot_on():
    slots = ProcessSlots(1)

    async def hold(entered: asyncio.Event, leave: asyncio.Event) -> None:
        async with slots():
            entered.set()
            await leave.wait()

    async def check() -> None:
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(3)]
        tasks = [asyncio.create_task(hold(*pair)) for pair in events]
        await events[0][0].wait()
        tasks[1].cancel()  # while it waits
        events[0][1].set()
        await asyncio.wait_for(events[2][0].wait(), 5)
        assert not events[1][0].is_set()
        tasks[2].cancel()  # while it holds the slot
        async with asyncio.timeout(5), slots():
            pass
        assert slots._free == 1
        # Cancelled after the slot was given to it, and before it could take it.
        events = [(asyncio.Event(), asyncio.Event()) for _ in range(2)]
        tasks = [asyncio.create_task(hold(*pair)) for pair in events]
        await events[0][0].wait()
        events[0][1].set()
        await tasks[0]
        tasks[1].cancel()
        with pytest.raises(asyncio.CancelledError):
            await tasks[1]
        assert not events[1][0].is_set()
        assert slots._free == 1

    asyncio.run(check())


def test_a_table_gives_slots_in_order_of_arrival_and_takes_back_those_of_lost_processes():
    async def check() -> None:
        table = SlotTable()
        got: list[str] = []

        async def take(call: str, process: str, tool: str = "t") -> None:
            await table.take(tool, 2, call, process)
            got.append(call)

        tasks = []
        for call, process in [("a", "p"), ("b", "q"), ("c", "p"), ("d", "q"), ("e", "r"), ("f", "r")]:
            tasks.append(asyncio.create_task(take(call, process)))
            await asyncio.sleep(0)
        await take("other", "p", "another tool")
        assert got == ["a", "b", "other"]
        table.give("t", "a")
        await asyncio.sleep(0)
        assert got == ["a", "b", "other", "c"]
        table.give("t", "e")  # a wait that was called off is over, without a slot
        await asyncio.sleep(0)
        assert got.pop() == "e"
        table.lose("q")  # holds one, and waits for one
        await asyncio.sleep(0)
        assert sorted(got) == ["a", "b", "c", "d", "f", "other"]
        assert table._held == {"t": {"c": "p", "f": "r"}, "another tool": {"other": "p"}}
        assert not table._waiting["t"]
        await take("late", "q")  # asked for before the process was lost: nobody waits for it
        table.give("t", "g")  # arrives before what it gives back
        await take("g", "p")
        assert table._held["t"] == {"c": "p", "f": "r"}
        assert not table._given_up
        await asyncio.gather(*tasks)

    asyncio.run(check())


def test_processes_of_a_run_share_slots_and_lost_ones_give_theirs_back(ray_cluster: None):
    router = light_actor(AgentRouter).remote(8, "")
    first, second, third = (RaySlots(router, process, "t", 1) for process in ("a", "b", "a"))

    async def check() -> None:
        held = first()
        await held.__aenter__()
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), second():
                pass
        following = second()
        waiting = asyncio.create_task(following.__aenter__())
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(asyncio.shield(waiting), 0.3)
        await router.lose_process.remote("a")
        await asyncio.wait_for(waiting, 60)
        async with asyncio.timeout(60), third():  # what a lost process asks is not counted
            pass
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.3), RaySlots(router, "c", "t", 1)():
                pass

    asyncio.run(check())
    ray.kill(router)
