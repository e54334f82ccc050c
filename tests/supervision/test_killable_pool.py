"""The killable pool against functions that hang, die, eat, lie and hide; all with real processes."""

import functools
import logging
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from tests.support.waiting import eventually, is_alive
from tests.workers.reward_manager import hostile
from tests.workers.reward_manager.hostile import behave, behave_async
from verl.base.import_utils import load_object
from verl.errors import ConfigError, WorkerError
from verl.supervision.killable_pool import Budget, KillablePool, RateLimit, output

BUDGET = Budget(timeout_s=2.0, memory_mb=96)


@pytest.fixture(scope="module")
def pool():
    pool = KillablePool(behave, budget=BUDGET)
    yield pool
    pool.close()


def gone(pid):
    return eventually(lambda: not is_alive(pid), f"the end of process {pid}")


def calls(*hows):
    return [{"how": how, "value": float(place)} for place, how in enumerate(hows)]


def outcomes_of(pool, hows, late):
    """In the order of ``hows``; only calls that are to be late have so little time that a busy machine uses it up."""
    waiting = [pool.submit([call], timeout_s=1.0 if call["how"] in late else 60.0) for call in calls(*hows)]
    return [part.result()[0] for part in waiting]


# ---- what a call may do --------------------------------------------------------------------------


@pytest.mark.parametrize(
    "how, status, says",
    [
        ("os_exit", "crashed", "exited with code 3"),
        ("sys_exit", "crashed", "SystemExit: 4"),
        ("interrupt", "crashed", "KeyboardInterrupt"),
        ("segfault", "crashed", "killed by SIGSEGV"),
        ("abort", "crashed", "killed by SIGABRT"),
        ("kill_self", "killed", "killed by SIGKILL"),
        ("kill_parent", "killed", "killed by SIGKILL"),
        ("kill_group", "killed", "killed by SIGKILL"),
        ("hog", "out_of_memory", "MemoryError"),
        ("hog_shared", "out_of_memory", "more than 96 MB"),
        ("memory_error", "out_of_memory", "MemoryError"),
        ("raise", "error", "KeyError: 'difficulty'"),
        ("awkward", "error", "Awkward"),
        ("recursion", "error", "RecursionError"),
        ("object", "error", "the function returned object"),
        ("huge_int", "error", "OverflowError"),
        ("cycle", "error", "RecursionError"),
    ],
)
def test_a_bad_call_is_named_and_its_neighbours_are_right(pool, how, status, says):
    before, bad, after = pool.map(calls("ok", how, "ok"), timeout_s=60.0)
    assert (before.status, before.value, after.status, after.value) == ("ok", 0.0, "ok", 2.0)
    assert (bad.status, bad.value) == (status, None)
    assert says in bad.message


def test_hung_calls_share_their_time(pool):
    hows = ("sleep", "spin", "hang_in_c", "sigterm_ignored", "stop_parent")
    started = time.perf_counter()
    before, hung = pool.submit(calls("ok"), timeout_s=60.0), pool.submit(calls(*hows), timeout_s=3.0)
    after = pool.submit(calls(*["ok"] * 20), timeout_s=60.0)
    assert [(o.status, o.value) for o in before.result()] == [("ok", 0.0)]
    assert [o.status for o in hung.result()] == ["timeout"] * 5
    assert [(o.status, o.value) for o in after.result()] == [("ok", float(n)) for n in range(20)]
    assert time.perf_counter() - started < 5 * 3.0  # one after the other they take that long


def test_a_lost_connection_is_a_crash():
    pool = KillablePool(behave, budget=Budget(timeout_s=20.0))
    for how in ("close", "write"):
        assert [o.status for o in pool.map(calls(how, "ok"))] == ["crashed", "ok"]
    pool.close()


@pytest.mark.parametrize(
    "reply",
    [
        "5",
        '{"status": ["ok"]}',
        '{"status": "error", "message": 7}',
        '{"status": "ok", "more": 1}',
        "[" * 100_000,
    ],
)
def test_what_is_no_reply_is_a_crash(pool, reply):
    # The caller neither waits for ever nor breaks: the process is ended, and the others go on.
    arguments = [{"how": "ok"}, {"how": "forge", "reply": reply}, {"how": "ok", "value": 2.0}]
    outcomes = pool.submit(arguments).result(timeout=30)
    assert [o.status for o in outcomes] == ["ok", "crashed", "ok"]
    assert "what no reply is" in outcomes[1].message


def test_an_error_of_every_job_that_there_is_not():
    pool = KillablePool(behave, fatal=(ConfigError,))
    reply = '{"status": "error", "message": "made up", "fatal": 99}'
    (outcome,) = pool.submit([{"how": "forge", "reply": reply}]).result(timeout=30)
    assert (outcome.status, outcome.message) == ("error", "made up")
    pool.close()


def test_a_forked_process_has_no_pool(pool):
    assert pool.map(calls("ok"))[0].status == "ok"
    child = os.fork()
    if child == 0:  # the pool's thread is not here: nothing would ever come of a call
        try:
            pool.submit(calls("ok"))
        except WorkerError:
            os._exit(0)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert pool.map(calls("ok"))[0].status == "ok"


def test_the_time_of_one_batch(pool):
    (outcome,) = pool.map([{"how": "slow", "seconds": 5.0}], timeout_s=0.3)
    assert (outcome.status, outcome.message) == ("timeout", "took longer than 0.3 s")
    (outcome,) = pool.map([{"how": "slow", "seconds": 2.5, "value": 7.0}], timeout_s=20.0)
    assert (outcome.status, outcome.value) == ("ok", 7.0)


def test_what_is_printed_and_forked_does_not_reach_the_results(pool):
    assert [o.value for o in pool.map(calls("print", "fork", "ok"))] == [0.0, 1.0, 2.0]


def test_results_are_in_the_order_of_the_calls():
    pool = KillablePool(behave, num_workers=3)
    arguments = [{"how": "slow", "seconds": 0.1 * (n % 3), "value": float(n)} for n in range(12)]
    assert [o.value for o in pool.map(arguments)] == [float(n) for n in range(12)]
    pool.close()


def test_a_call_does_not_pay_for_what_another_has_left_behind():
    # The first call leaves a thread that ends the process while the second one is at work.
    pool = KillablePool(behave, budget=Budget(timeout_s=30.0))
    first, second = pool.map([{"how": "late_bomb", "value": 1.0}, {"how": "slow", "seconds": 1.0, "value": 2.0}])
    assert (first.value, second.status, second.value) == (1.0, "ok", 2.0)
    pool.close()


def test_a_call_that_ends_every_process_is_tried_twice(pool, tmp_path):
    def counts(file):
        with open(file, "a") as out:
            out.write("x")
        os._exit(1)

    count = KillablePool(lambda file: counts(file) if file else None)
    assert [o.status for o in count.map([{"file": ""}, {"file": str(tmp_path / "n")}])] == ["ok", "crashed"]
    assert (tmp_path / "n").read_text() == "xx"  # in a process that had served another, then in a fresh one
    count.close()


# ---- what a call leaves behind -------------------------------------------------------------------


@pytest.mark.parametrize("detached", [False, True])
def test_children_of_a_killed_call_die_with_it(pool, tmp_path, detached):
    file = tmp_path / "pids"
    (outcome,) = pool.map([{"how": "child_and_hang", "file": str(file), "detached": detached}])
    assert outcome.status == "timeout"
    assert all(gone(int(pid)) for pid in file.read_text().split())


def test_orphans_die_too(pool, tmp_path):
    file = tmp_path / "pid"
    (outcome,) = pool.map([{"how": "orphan_and_die", "file": str(file)}])
    assert (outcome.status, outcome.message) == ("crashed", "the process exited with code 7")
    assert gone(int(file.read_text()))


def test_closing_ends_everything(tmp_path):
    pool = KillablePool(behave)
    file = tmp_path / "pids"
    pool.map([{"how": "child", "file": str(file), "detached": True}])
    pids = [int(pid) for pid in file.read_text().split()]
    assert all(is_alive(pid) for pid in pids)
    waiting = pool.submit(calls("sleep"))
    pool.close()
    assert all(gone(pid) for pid in pids)
    assert [o.status for o in waiting.result(timeout=60)] == ["crashed"]
    with pytest.raises(WorkerError, match="closed"):
        pool.map(calls("ok"))


def test_a_pool_that_nobody_holds_ends():
    pool = KillablePool(behave)
    (outcome,) = pool.map(calls("pid"))
    del pool
    assert gone(outcome.value)


@pytest.mark.parametrize("end", [signal.SIGKILL, signal.SIGINT, None])
def test_workers_end_with_their_parent(tmp_path, end):
    code = (
        "import sys, time\n"
        "from verl.supervision.killable_pool import KillablePool\n"
        "from tests.workers.reward_manager.hostile import behave\n"
        "pool = KillablePool(behave)\n"
        "pool.map([{'how': 'child', 'file': sys.argv[1], 'detached': True}])\n"
        "pool.submit([{'how': 'spin'}])\n"
        "open(sys.argv[1] + '.done', 'w').close()\n"
        "time.sleep(600 if sys.argv[2] == 'wait' else 0.2)\n"
    )
    file = tmp_path / "pids"
    root = Path(__file__).parents[2]
    command = [sys.executable, "-c", code, str(file), "wait" if end else "go"]
    parent = subprocess.Popen(command, cwd=root, stderr=subprocess.DEVNULL)
    eventually(lambda: Path(f"{file}.done").exists() or parent.poll() is not None, "the parent's word")
    pids = [int(pid) for pid in file.read_text().split()]
    if end is not None:
        time.sleep(0.2)
        parent.send_signal(end)
    parent.wait(timeout=60)
    assert all(gone(pid) for pid in pids)


# ---- async functions -----------------------------------------------------------------------------


@pytest.fixture(scope="module")
def async_pool():
    pool = KillablePool(behave_async, budget=BUDGET, max_concurrent=16)
    yield pool
    pool.close()


def test_async_calls_run_side_by_side(async_pool):
    async_pool.warm_up()
    started = time.perf_counter()
    outcomes = async_pool.map([{"how": "wait", "seconds": 0.5, "value": float(n)} for n in range(16)])
    assert [o.value for o in outcomes] == [float(n) for n in range(16)]
    assert time.perf_counter() - started < 8  # they take that long one after the other


@pytest.mark.parametrize(
    "hows, status",
    [
        (["wait_for_ever", "deaf", "subtask"], "timeout"),
        (["spin"], "timeout"),
        (["os_exit"], "crashed"),
        (["sys_exit"], "crashed"),
        (["segfault"], "crashed"),
        (["hog"], "out_of_memory"),
        (["raise"], "error"),
    ],
    ids=lambda value: " and ".join(value) if isinstance(value, list) else value,
)
def test_bad_async_calls_are_found_among_their_neighbours(async_pool, hows, status):
    late = hows if status == "timeout" else []
    outcomes = outcomes_of(async_pool, [*["wait"] * 5, *hows, *["wait"] * 6], late)
    assert [o.status for o in outcomes] == ["ok"] * 5 + [status] * len(hows) + ["ok"] * 6
    after = range(5 + len(hows), 11 + len(hows))
    assert [o.value for o in outcomes if o.status == "ok"] == [0.0, 1.0, 2.0, 3.0, 4.0, *map(float, after)]


# ---- functions and arguments ---------------------------------------------------------------------


def test_functions_by_value():
    secret = 40

    def closure(number):
        return secret + number

    for function in (closure, lambda number: secret + number, functools.partial(closure)):
        pool = KillablePool(function)
        assert pool.map([{"number": 2}])[0].value == 42
        pool.close()


def test_a_file_that_changes_during_the_run_is_not_used_in_silence(tmp_path):
    file = tmp_path / "scores.py"
    file.write_text("import os\ndef score(how):\n    if how == 'die':\n        os._exit(1)\n    return 1.0\n")
    function = load_object(str(file), "score", "custom_reward_function")
    pool = KillablePool(function, fatal=(ConfigError,))
    assert pool.map([{"how": "ok"}])[0].value == 1.0
    file.write_text(file.read_text().replace("1.0", "2.0"))
    # The process that has the old code dies, and one that takes its place would have the new one.
    with pytest.raises(WorkerError, match="was changed during the run"):
        pool.map([{"how": how} for how in ("die", "ok") * 3])
    pool.close()


def test_a_function_that_cannot_travel():
    lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"cannot be sent to another process.*at the top level of a file"):
        KillablePool(lambda: lock.acquire())


def test_arguments_that_cannot_travel(pool):
    bad, good = pool.map([{"how": "ok", "value": threading.Lock()}, {"how": "ok", "value": 2.0}])
    assert (bad.status, good.value) == ("error", 2.0)
    assert "cannot be sent to a worker" in bad.message


class Broken:
    def __call__(self):
        return 1

    def __setstate__(self, state):
        raise RuntimeError("no such weights")

    def __getstate__(self):
        return {"x": 1}


def test_a_function_that_cannot_be_loaded():
    class Local(Broken):
        pass

    pool = KillablePool(Local())
    for _ in range(2):
        with pytest.raises(WorkerError, match="no such weights"):
            pool.map([{}])
    pool.close()


def test_a_function_whose_loading_ends_the_process():
    class Local(Broken):
        def __setstate__(self, state):
            os._exit(5)

    pool = KillablePool(Local())
    with pytest.raises(WorkerError, match=r"ends before it is ready: the process exited with code 5"):
        pool.map([{}])
    pool.close()


def test_an_error_of_every_job_is_raised_once():
    def fails(value):
        if value:
            raise ConfigError("wrong for all")
        return 0.0

    pool = KillablePool(fails, fatal=(ConfigError,))
    with pytest.raises(ConfigError, match="wrong for all"):
        pool.map([{"value": 0}, {"value": 1}, {"value": 0}])
    assert pool.map([{"value": 0}])[0].value == 0.0
    pool.close()


def test_threads_share_a_pool(pool):
    results = {}

    def work(name):
        results[name] = [o.value for o in pool.map([{"how": "ok", "value": [name, n]} for n in range(20)])]

    threads = [threading.Thread(target=work, args=(name,)) for name in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {name: [[name, n] for n in range(20)] for name in range(4)}


def test_no_calls(pool):
    assert pool.map([]) == []


def test_a_plain_scorer_loads_no_torch():
    code = "import sys, verl.scorers; print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


# ---- limits --------------------------------------------------------------------------------------


def test_a_rate_fills_second_by_second():
    # 120 a minute is 2 a second: two at once, then one every half second.
    limit, starts, now = RateLimit(120), [], 0.0
    for _ in range(6):
        now += limit.delay(1, now)
        limit.take(1, now)
        starts.append(now)
    assert starts == pytest.approx([0.0, 0.0, 0.5, 1.0, 1.5, 2.0])


def test_a_call_that_costs_more_than_a_second_brings_leaves_a_debt():
    # 600 tokens a minute are 10 a second; a call of 30 leaves 20 owed: 3 s until the bucket of 10 is full again.
    limit = RateLimit(600, counts_tokens=True)
    assert limit.delay(30, 0.0) == 0.0
    limit.take(30, 0.0)
    assert limit.delay(30, 0.0) == pytest.approx(3.0)
    assert limit.delay(5, 1.0) == pytest.approx(1.5)  # -20 + 10 = -10 then; 15 are missing


class Noted(RateLimit):
    """Knows when calls were started; the processes that they run in may be late."""

    def __init__(self, per_minute):
        super().__init__(per_minute)
        self.starts = []

    def take(self, tokens, now):
        super().take(tokens, now)
        self.starts.append(now)


def test_limits_hold_over_processes_that_are_replaced(tmp_path):
    # 600 a minute are 10 a second: of n starts in a row, the last comes (n - 10) / 10 s after the first or later.
    def scores(n):
        (tmp_path / f"{n}-{time.monotonic_ns()}").touch()
        if n % 3 == 0:
            os._exit(1)
        return float(n)

    limit = Noted(600)
    pool = KillablePool(scores, num_workers=2, limits=[limit])
    outcomes = pool.map([{"n": n} for n in range(20)])
    assert [o.status for o in outcomes] == ["crashed" if n % 3 == 0 else "ok" for n in range(20)]
    starts = limit.starts
    assert len(starts) == len(list(tmp_path.iterdir())) >= 20  # second tries are among them
    for first in range(len(starts)):
        for last in range(first, len(starts)):
            assert starts[last] - starts[first] >= (last - first + 1 - 10) / 10 - 1e-6
    pool.close()


def test_limits_hold_for_second_tries():
    # 60 a minute are one a second. The second call ends a process that has served another, so it is tried again:
    # three starts, a second apart each.
    limit = Noted(60)
    pool = KillablePool(lambda ends: os._exit(1) if ends else None, limits=[limit])
    assert [o.status for o in pool.map([{"ends": False}, {"ends": True}])] == ["ok", "crashed"]
    first, second, third = limit.starts
    assert second - first > 0.999
    assert third - second > 0.999
    pool.close()


def test_at_most_so_many_at_once():
    running = [0]

    async def counts():
        import asyncio

        running[0] += 1
        seen = running[0]
        await asyncio.sleep(0.05)
        running[0] -= 1
        return seen

    pool = KillablePool(counts, max_concurrent=3)
    assert max(o.value for o in pool.map([{}] * 12)) == 3
    pool.close()


def test_every_act_of_the_list_is_tried():
    managers = Path(__file__).parents[1] / "workers/reward_manager/test_managers.py"
    tried = Path(__file__).read_text() + managers.read_text()
    assert [name for name in hostile.ACTS if f'"{name}"' not in tried] == []


def test_what_a_function_prints_is_bounded(capsys, caplog, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with caplog.at_level(logging.WARNING):
        pool = KillablePool(hostile.prints, num_workers=2)
        assert [result.value for result in pool.map([{"number": 0, "lines": 3}])] == [0]
        few = eventually(lambda: list(tmp_path.glob("verl_printed_*.txt")), "the file")[0]
        eventually(lambda: few.read_text().count("\n") == 3, "three lines")
        assert not caplog.text
        results = pool.map([{"number": number, "lines": 50_000} for number in range(1, 4)])  # about 5 MB each
        pool.close()
    assert [result.value for result in results] == [1, 2, 3]
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.startswith("call 0 line 0 xxx")
    assert 1500 < len(shown.err) <= output.EXCERPT_BYTES
    (said,) = caplog.messages
    assert said == f"the scoring processes print more than 2000 bytes: the rest is in {few}, up to 8 MB."
    assert few.stat().st_size == output.FILE_BYTES + len(output._CUT)
    assert few.read_bytes().endswith(output._CUT)
