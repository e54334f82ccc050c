"""Calls of a tool at once: waiting, cancelling, and processes that die with a slot in their hands."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import AsyncExitStack
from pathlib import Path

from verl.agents.slots import MachineSlots, ProcessSlots


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

    asyncio.run(check())


HOLDER = """
import asyncio, sys, time
from pathlib import Path
from verl.agents.slots import MachineSlots

async def hold():
    async with MachineSlots(2, Path(sys.argv[1]), "a tool/1")():
        print("held", flush=True)
        await asyncio.sleep(100)

asyncio.run(hold())
"""


def test_slots_of_several_processes(tmp_path: Path):
    folder, said = tmp_path / "slots", tmp_path / "said"
    slots, other = MachineSlots(2, folder, "a tool/1"), MachineSlots(1, folder, "another")

    async def can_take(number: int, within_s: float) -> bool:
        try:
            async with asyncio.timeout(within_s), AsyncExitStack() as held:
                await held.enter_async_context(other())
                for _ in range(number):
                    await held.enter_async_context(slots())
                return True
        except TimeoutError:
            return False

    with said.open("wb") as output:
        command = [sys.executable, "-c", HOLDER, str(folder)]
        holders = [subprocess.Popen(command, stdout=output) for _ in range(3)]
    try:
        deadline = time.monotonic() + 60
        while said.read_text() != "held\n" * 2 and time.monotonic() < deadline:
            time.sleep(0.02)
        assert not asyncio.run(can_take(1, 0.3))  # two processes hold both, and the third waits with us
        assert said.read_text() == "held\n" * 2
    finally:
        for holder in holders:
            holder.kill()
            holder.wait()
    assert asyncio.run(can_take(2, 10))
