"""An interpreter that keeps its variables: what stays, what ends it, and that nothing is left of it."""

from __future__ import annotations

import contextlib
import os
import threading
import time

import psutil
import pytest

from tests.plugins.sandbox.requirements import needs_sandbox
from verl.plugins.sandbox import Limits, SandboxError
from verl.plugins.sandbox.interpreter import LONGEST_CELL, Interpreter, keeps_variables

pytestmark = needs_sandbox


def left_over() -> list[str]:
    """Descendants of this process that are of a sandbox."""
    found = []
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):  # it ended after it was listed
            found.append(child.name())
    return [name for name in found if name in ("bwrap", "prlimit", "setpriv")]


def test_variables_imports_and_files_stay():
    with Interpreter(Limits(wall_s=20, cpu_s=20, memory_mb=256)) as interpreter:
        for code, printed in (
            ("x = 6", ""),
            ("x * 7", "42\n"),
            ("import math\ndef area(r):\n    return math.pi * r ** 2", ""),
            ("print(round(area(2), 2)); 'ü'", "12.57\n'ü'\n"),
            ("import sys\nprint(1); print(2, file=sys.stderr); print(3)", "1\n2\n3\n"),
            ("open('/tmp/f', 'w').write('kept')", "4\n"),
            ("open('/tmp/f').read()", "'kept'\n"),
            ("import dataclasses\n@dataclasses.dataclass\nclass P:\n    n: int\nP(3)", "P(n=3)\n"),
            ("import os\nif os.fork() == 0:\n    print('child')\nelse:\n    os.wait()", "child\n"),
            ("raise SystemExit", ""),
            ("x", "6\n"),
        ):
            result = interpreter.run(code)
            assert (result.status, result.stdout) == ("ok", printed), code
        failed = interpreter.run("y = 1\nx / 0")
        assert (failed.status, keeps_variables(failed)) == ("exit_error", True)
        assert failed.stdout == (
            'Traceback (most recent call last):\n  File "<cell 12>", line 2, in <module>\n    x / 0\n    ~~^~~\n'
            "ZeroDivisionError: division by zero\n"
        )
        assert interpreter.run("print(y").stdout.endswith("SyntaxError: '(' was never closed\n")
        assert interpreter.run("input()").stdout.endswith("EOFError: EOF when reading a line\n")
        assert interpreter.run("y").stdout == "1\n"
        assert "1048577 bytes; 1048576 are allowed" in interpreter.run("#" * (LONGEST_CELL + 1)).stdout
        assert interpreter.run("#" * LONGEST_CELL + "\ny").status == "exit_error"  # a line more is too much
        assert interpreter.run("#" * (LONGEST_CELL - 2) + "\ny").stdout == "1\n"


def test_code_that_ends_the_interpreter():
    with Interpreter(Limits(wall_s=3, cpu_s=20, memory_mb=256, max_output_bytes=1000)) as interpreter:
        for code, status, reason in (
            ("while True: pass", "timeout", "timeout"),
            ("import os; print('so'); os._exit(3)", "exit_error", "exit_error (3)"),
            ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", "crashed", "crashed (SIGKILL)"),
            (
                "import os, time\nfor _ in range(3): os.fork()\nx = bytearray(9 * 10**7)\ntime.sleep(99)",
                "out_of_memory",
                "",
            ),
        ):
            assert interpreter.run("kept = 1").ok
            result = interpreter.run(code)
            assert (result.status, keeps_variables(result)) == (status, False), code
            assert reason in result.reason
            assert result.stdout == ("so\n" if "so" in code else "")
            assert interpreter.run("kept").stdout.endswith("NameError: name 'kept' is not defined\n")
        # Too much output does not end it; beginning and end are kept.
        result = interpreter.run("print('a' * 10**6 + 'z' * 10**6)")
        assert (result.status, result.stdout) == (
            "ok",
            "a" * 500 + "\n[... 1999001 bytes left out ...]\n" + "z" * 499 + "\n",
        )


def test_code_that_lies_to_the_parent():
    """It may write to the pipe of the answers; that confuses its own calls only."""
    with Interpreter(Limits(wall_s=5, cpu_s=20, memory_mb=256)) as interpreter:
        interpreter.run("import os\nfor n in range(3, 60):\n    try: os.write(n, b'+++++')\n    except OSError: pass")
        time.sleep(0.1)
        assert interpreter.run("1 / 0").status == "exit_error"
        assert interpreter.run("1 + 1").stdout == "2\n"
        # A process left behind that writes on and on neither ends nor fills anything.
        code = "import os\nif os.fork() == 0:\n    while True: os.write(1, b'x' * 1000)\n"
        assert interpreter.run(code).ok
        assert interpreter.run("1 + 1").ok


def test_it_ends_with_all_its_processes():
    def files() -> int:
        return len(os.listdir("/proc/self/fd"))

    first = Interpreter(Limits(wall_s=30, cpu_s=20, memory_mb=256))
    first.run("1")
    first.close()
    before = files()
    assert left_over() == []
    for _ in range(3):
        with Interpreter() as interpreter:
            interpreter.run("import os\nos.fork()\nwhile False: pass")
            assert left_over() != []
    # Closed from another thread in the middle of a call.
    interpreter, results = Interpreter(Limits(wall_s=30, cpu_s=20, memory_mb=256)), []
    interpreter.run("1")
    caller = threading.Thread(target=lambda: results.append(interpreter.run("import time; time.sleep(25)")))
    caller.start()
    time.sleep(0.2)
    interpreter.close()
    caller.join(10)
    assert [result.ok for result in results] == [False]
    assert (left_over(), files()) == ([], before)
    with pytest.raises(SandboxError, match="the interpreter is closed"):
        interpreter.run("1")


def test_the_thread_that_made_it_may_end():
    interpreter = Interpreter()
    maker = threading.Thread(target=interpreter.run, args=("x = 1",))
    maker.start()
    maker.join()
    time.sleep(0.1)
    with interpreter:
        assert interpreter.run("x").stdout == "1\n"
