"""Functions in worker processes: those that hang, exit, fork and fill the memory cost themselves only."""

from __future__ import annotations

from pathlib import Path

import psutil

from tests.agents.test_tool_calls import call, run, shorten
from verl.agents.tool_calls import CallFailure, ToolLimits, ToolRunner
from verl.tools.function_tool import load_function_tools

FUNCTIONS = '''
import os, signal, subprocess, time
from verl.tools.function_tool import function_tool

@function_tool(isolated=True, timeout_s=3, memory_mb=200)
def work(what: str) -> dict:
    """Do something.

    Args:
        what: what to do
    """
    if what == "hang":
        subprocess.Popen(["sleep", "987654"])
        while True:
            time.sleep(1)
    if what == "exit":
        os._exit(5)
    if what == "kill":
        os.kill(os.getppid(), signal.SIGKILL)
        os.kill(os.getpid(), signal.SIGKILL)
    if what == "fork" and os.fork() == 0:
        return {"child": True}
    if what == "memory":
        return {"size": len(bytearray(10**9))}
    if what == "raise":
        raise ValueError("not this")
    return {"pid": os.getpid() != PARENT, "what": what}
'''


def test_what_ends_or_blocks_a_process(tmp_path: Path):
    path = tmp_path / "isolated.py"
    path.write_text(f"{FUNCTIONS}\n\nPARENT = {psutil.Process().pid}\n")
    [tool] = load_function_tools(str(path))
    runner = ToolRunner([tool], shorten, ToolLimits(max_response_tokens=300))
    deeds = ("work", "hang", "exit", "kill", "fork", "memory", "raise", "work")
    found, _ = run(runner, *([call("work", f'{{"what": "{what}"}}')] for what in deeds))
    texts = dict(zip(deeds, (one.response.text or "" for one in found), strict=True))
    assert [one.failure for one in found] == [
        None, CallFailure.TIMEOUT, CallFailure.RAISED, CallFailure.RAISED, None, CallFailure.RAISED,
        CallFailure.RAISED, None,
    ]  # fmt: skip
    assert texts["work"] == '{"pid": true, "what": "work"}'
    assert texts["hang"] == "Error: the tool work took longer than 3 s."
    assert "exited with code 5" in texts["exit"]
    assert "killed by SIGKILL" in texts["kill"]
    assert texts["fork"] == '{"pid": true, "what": "fork"}'
    assert "memory" in texts["memory"].lower()
    assert texts["raise"] == "Error: the tool work failed: ToolProcessError: ValueError: not this"
    assert not [one for one in psutil.Process().children(recursive=True) if "987654" in words_of(one)]


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; of one that has ended, none."""
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
