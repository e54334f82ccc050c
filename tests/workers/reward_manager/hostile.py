"""Functions that hang, die, eat, lie and hide: what a pool must live with. Imports nothing heavy."""

import asyncio
import ctypes
import os
import re
import signal
import socket
import struct
import subprocess
import sys
import threading
import time


def length_of(solution_str):
    return len(solution_str) / 10


def slow_length(data_source, solution_str, ground_truth, extra_info):
    time.sleep(0.1)
    return len(solution_str) / 8


def lengths(data_sources, solution_strs, ground_truths, extra_infos):
    time.sleep(0.5)
    return [len(text) / 8 for text in solution_strs]


def behave(how, value=1.0, **more):
    """Do what ``how`` says; ``ok`` returns the value."""
    return ACTS[how](value, **more) if how in ACTS else value


def hang_in_c(value):
    re.match(r"(a+)+$", "a" * 60 + "b")  # exponential, and holds the interpreter lock all the time


def spin(value):
    while True:
        pass


def hog(value):
    kept = []
    while True:
        kept.append(bytearray(16 * 2**20))


def hog_shared(value):
    import mmap

    kept = []
    while True:  # shared maps are no part of RLIMIT_DATA
        page = mmap.mmap(-1, 64 * 2**20)
        for place in range(0, len(page), 4096):
            page[place] = 1
        kept.append(page)
        time.sleep(0.01)


def raises(value):
    raise KeyError("difficulty")


def leaves_a_child(value, file, detached=False):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=detached)
    with open(file, "w") as out:
        out.write(f"{os.getpid()} {child.pid}")
    return value


def child_and_hang(value, file, detached=False):
    leaves_a_child(value, file, detached)
    time.sleep(600)


def orphan_and_die(value, file):
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # twice, so that it has no parent any more
            with open(file, "w") as out:
                out.write(str(os.getpid()))
            time.sleep(600)
        os._exit(0)
    while not (os.path.exists(file) and os.path.getsize(file)):
        time.sleep(0.01)
    os._exit(7)


def forks_and_returns(value):
    os.fork()
    return value


def prints_garbage(value):
    os.write(1, b"\x00\xff{]" * 1000 + b"\n")
    os.write(2, b"")
    return value


def closes_everything(value):
    os.closerange(3, 1024)
    time.sleep(600)


def _connections():
    for number in range(3, 1024):
        try:
            yield socket.socket(fileno=os.dup(number))
        except OSError:
            continue


def writes_on_the_connection(value):
    for connection in _connections():
        connection.sendall(b"nonsense" * 100)
    time.sleep(600)


def forges_its_reply(value, reply):
    """Write a reply of one's own making, under the number of one's own job."""
    frame = sys._getframe()
    while "call_id" not in frame.f_locals:
        frame = frame.f_back
    body = reply.encode()
    for connection in _connections():
        connection.sendall(struct.pack("<QId", frame.f_locals["call_id"], len(body), 0.0) + body)
    time.sleep(600)


def bomb_in_a_thread(value):
    threading.Timer(0.3, os._exit, (9,)).start()
    return value


def stack(value):
    return stack(value) + 1


def unhashable(value):
    return object()


class Awkward(Exception):
    def __str__(self):
        raise RuntimeError("not even my name")


def awkward(value):
    raise Awkward


ACTS = {
    "sleep": lambda value: time.sleep(600),
    "hang_in_c": hang_in_c,
    "spin": spin,
    "sigterm_ignored": lambda value: (signal.signal(signal.SIGTERM, signal.SIG_IGN), time.sleep(600)),
    "slow": lambda value, seconds=0.3: (time.sleep(seconds), value)[1],
    "os_exit": lambda value: os._exit(3),
    "sys_exit": lambda value: sys.exit(4),
    "interrupt": lambda value: signal.raise_signal(signal.SIGINT),
    "segfault": lambda value: ctypes.string_at(0),
    "abort": lambda value: os.abort(),
    "kill_self": lambda value: os.kill(os.getpid(), signal.SIGKILL),
    "kill_parent": lambda value: (os.kill(os.getppid(), signal.SIGKILL), time.sleep(600)),
    "stop_parent": lambda value: (os.kill(os.getppid(), signal.SIGSTOP), time.sleep(600)),
    "kill_group": lambda value: os.killpg(0, signal.SIGKILL),
    "hog": hog,
    "hog_shared": hog_shared,
    "memory_error": lambda value: bytearray(2**45),
    "raise": raises,
    "awkward": awkward,
    "recursion": stack,
    "child": leaves_a_child,
    "child_and_hang": child_and_hang,
    "orphan_and_die": orphan_and_die,
    "fork": forks_and_returns,
    "print": prints_garbage,
    "close": closes_everything,
    "write": writes_on_the_connection,
    "forge": forges_its_reply,
    "late_bomb": bomb_in_a_thread,
    "object": unhashable,
    "nan": lambda value: float("nan"),
    "text": lambda value: "one",
    "huge_int": lambda value: 10**5000,
    "cycle": lambda value: (loop := [], loop.append(loop))[0],
    "pid": lambda value: os.getpid(),
}


async def behave_async(how, value=1.0, seconds=0.2):
    """The same where a call waits; the acts above block the event loop."""
    if how == "wait":
        await asyncio.sleep(seconds)
    elif how == "wait_for_ever":
        await asyncio.sleep(600)
    elif how == "deaf":
        while True:
            try:
                await asyncio.sleep(600)
            except asyncio.CancelledError:
                continue
    elif how == "subtask":
        await asyncio.gather(behave_async("sleep"), asyncio.sleep(0.1))
    elif how in ACTS:
        return ACTS[how](value)
    return value


# ---- reward functions ---------------------------------------------------------------------------


def acts(data_source, solution_str, ground_truth, extra_info):
    """The response says how to behave, and the truth what the score is."""
    return behave(data_source, ground_truth)


def per_text(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    return [
        {"score": len(text) / 10 + bonus, "acc": text == truth}
        for text, truth in zip(solution_strs, ground_truths, strict=True)
    ]


async def stamps(data_source, solution_str, ground_truth, extra_info):
    started = time.time()
    await asyncio.sleep(0.2)
    return {"score": 1.0, "started": started, "ended": time.time()}


def prints(number: int, lines: int) -> int:
    for line in range(lines):
        print(f"call {number} line {line} " + "x" * 80)
    return number
