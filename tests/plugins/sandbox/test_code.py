"""Programs against tests: in the sandbox of this machine and on a service, with the same verdicts."""

import json
import threading
import time

import pytest

from tests.plugins.sandbox.fusion_server import service
from tests.plugins.sandbox.requirements import needs_sandbox
from tests.support.cheating_programs import CHEATING_PROGRAMS
from verl.errors import ConfigError, RewardError
from verl.plugins.sandbox import Limits, SandboxError, prime_code, sandbox_fusion
from verl.plugins.sandbox.fusion import FusionSandbox, outcome_of, run_code_url
from verl.plugins.sandbox.prime_code import check_sandbox, score_code
from verl.scorers import SCORERS, check_settings, default_compute_score
from verl.scorers.code import CODE_SOURCES
from verl.utils.reward_score.prime_code.testing_util import run_test

DOUBLE = {"inputs": ["1\n", "2\n", "3\n", "4\n"], "outputs": ["2", "4", "6", "8"]}
CALL = {"fn_name": "add", "inputs": ["1\n2", "3\n4"], "outputs": ["3", "7"]}


def fenced(program):
    return f"I think.\n```python\n{program}\n```\nThat is it."


PROGRAMS = [
    # name, program, tests, score (continuous), status
    ("right", "print(int(input()) * 2)", DOUBLE, 1.0, "passed"),
    ("half right", "n = int(input())\nprint(n * 2 if n < 3 else 0)", DOUBLE, 0.5, "wrong_answer"),
    ("wrong", "print('no')", DOUBLE, 0.0, "wrong_answer"),
    ("says nothing", "", DOUBLE, 0.0, "wrong_answer"),
    ("raises at the end", "n = int(input())\nprint(n * 2)\nassert n < 2", DOUBLE, 0.25, "exit_error"),
    ("right answer, exit code 1", "print(int(input()) * 2)\nraise SystemExit(1)", DOUBLE, 0.0, "exit_error"),
    ("syntax error", "print(", DOUBLE, 0.0, "exit_error"),
    ("crashes", "import ctypes\nctypes.string_at(0)", DOUBLE, 0.0, "crashed"),
    ("too much memory", "x = bytearray(1 << 32)", DOUBLE, 0.0, "out_of_memory"),
    ("too much output", "print('x' * (1 << 21))", DOUBLE, 0.0, "output_limit"),
    ("function", "def add(a, b):\n    print('noise')\n    return a + b", CALL, 1.0, "passed"),
    ("method", "class Solution:\n    def add(self, a: int, b: int) -> int:\n        return a + b", CALL, 1.0, "passed"),
    ("typing is there", "def add(a: List[int], b: Optional[int]): return sum([a, b])", CALL, 1.0, "passed"),
    ("main part is not run", "def add(a, b): return a + b\nif __name__ == '__main__': 1 / 0", CALL, 1.0, "passed"),
    ("other name", "def plus(a, b): return a + b", CALL, 0.0, "exit_error"),
    ("returns text", "def add(a, b): return str(a + b)", CALL, 0.0, "wrong_answer"),
    ("returns no JSON", "def add(a, b): return object()", CALL, 0.0, "exit_error"),
    ("leaves in the function", "def add(a, b):\n    import os; os._exit(0)", CALL, 0.0, "wrong_answer"),
    ("prints instead", "def add(a, b): print(a + b)", CALL, 0.0, "wrong_answer"),
    ("prints at import, then leaves", "print(3)\nimport os; os._exit(0)", CALL, 0.0, "wrong_answer"),
]


@pytest.fixture(scope="module")
def server():
    with service() as running:
        yield running


@needs_sandbox
@pytest.mark.parametrize("road", ["local", "fusion"])
@pytest.mark.parametrize(("name", "program", "tests", "score", "status"), PROGRAMS, ids=[p[0] for p in PROGRAMS])
def test_scores(server, road, name, program, tests, score, status):
    url = server.url if road == "fusion" else None
    result = default_compute_score(
        "apps", fenced(program), json.dumps(tests), None, url, threading.BoundedSemaphore(2), 512, time_limit_s=5
    )
    total = len(tests["inputs"])
    assert result == {
        "score": score,
        "acc": score == 1.0,
        "tests_passed": score * total,
        "tests_total": total,
        "code_status": status,
    }


@needs_sandbox
def test_a_slow_program_is_a_wrong_answer_with_its_reason(server):
    busy, asleep = fenced("while True: pass"), fenced("import time\ntime.sleep(60)")
    one = {"inputs": ["1"], "outputs": ["1"]}
    assert score_code(busy, one, time_limit_s=1)["code_status"] in ("cpu_limit", "timeout")
    assert score_code(asleep, one, time_limit_s=0.3)["code_status"] == "timeout"
    assert score_code(asleep, one, time_limit_s=0.3, sandbox_fusion_url=server.url)["code_status"] == "timeout"


@needs_sandbox
def test_total_time_is_bounded_and_what_was_not_run_has_not_passed():
    start = time.monotonic()
    result = score_code(
        fenced("n = int(input())\nif n > 1:\n    import time\n    time.sleep(60)\nprint(2 * n)"),
        DOUBLE, time_limit_s=30, total_time_limit_s=4,
    )  # fmt: skip
    assert time.monotonic() - start < 30
    assert (result["tests_passed"], result["tests_total"], result["code_status"]) == (1, 4, "timeout")
    verdicts = prime_code.compute_score(fenced("import time\ntime.sleep(60)"), DOUBLE, continuous=True, timeout=0.05)[1]
    assert [v["status"] for v in verdicts][-1] in ("not_run", "timeout")


@needs_sandbox
def test_continuous_takes_the_first_ten_and_otherwise_all_must_pass():
    """The 11th test fails: of the first 10 all pass, of all 12 not all."""
    tests = {"inputs": [str(n) for n in range(12)], "outputs": [str(n) for n in range(10)] + ["x", "11"]}
    echo = fenced("print(input())")
    assert score_code(echo, tests) == {
        "score": 1.0, "acc": True, "tests_passed": 10, "tests_total": 10, "code_status": "passed"
    }  # fmt: skip
    result = score_code(echo, tests, continuous=False)
    assert (result["score"], result["tests_passed"], result["tests_total"]) == (0.0, 10, 12)
    assert score_code(echo, tests, max_tests=12)["score"] == 11 / 12
    assert score_code(echo, tests, continuous=False, max_tests=10)["score"] == 1.0


@needs_sandbox
def test_each_test_is_a_run_of_its_own():
    """A program that remembers in a file or counts its calls starts anew every time."""
    program = "import os\nn = len(os.listdir('/tmp'))\nopen(f'/tmp/{n}', 'w')\nprint(n)"
    assert score_code(fenced(program), {"inputs": ["", ""], "outputs": ["0", "0"]})["score"] == 1.0
    counts = "calls = []\ndef f(x):\n    calls.append(x)\n    return len(calls)"
    assert score_code(fenced(counts), {"fn_name": "f", "inputs": [[1], [2]], "outputs": [1, 1]})["score"] == 1.0


SEARCH = """
import gc, os, sys
def f(x):
    frame, texts = sys._getframe(), [open(sys.argv[0]).read(), repr(os.environ)]
    while frame:
        texts.append(repr(frame.f_locals) + repr(frame.f_globals))
        frame = frame.f_back
    texts.append(repr(gc.get_objects()))
    for top in ("/tmp", "/dev/shm", "/sandbox"):
        for folder, _, names in os.walk(top):
            texts += [open(os.path.join(folder, name)).read() for name in names]
    for number in range(20):
        try:
            texts.append(os.read(number, 1 << 20).decode())
        except OSError:
            pass
    backwards = "3f9-rekram"
    return backwards[::-1] if backwards in "".join(texts)[::-1] else None
"""


@needs_sandbox
@pytest.mark.parametrize(("argument", "status"), [("x", "wrong_answer"), ("marker-9f3", "passed")])
def test_the_expected_answer_cannot_be_found_inside(argument, status):
    """The program searches all that it can reach; it finds its argument, and not what is expected."""
    result = score_code(fenced(SEARCH), {"fn_name": "f", "inputs": [[argument]], "outputs": ["marker-9f3"]})
    assert result["code_status"] == status


@needs_sandbox
def test_assertions():
    tests = {
        "assert_case": ["assert f(2) == (2, 4)", "assert f(3)[1] == 9", "assert f(0)", "assert f(1) and f(2) == (2, 4)"]
    }
    assert score_code(fenced("def f(x): return x, x * x"), tests)["score"] == 1.0
    lazy = "import os\ndef f(x): os._exit(0)"
    assert score_code(fenced(lazy), tests)["score"] == 0.0
    always = "class Same:\n    def __eq__(self, other): return True\ndef f(x): return Same()"
    for test in ("assert f(2) == 4", "assert f(2) == 4 and f(3) == 9", "assert not f(2)"):
        assert score_code(fenced(always), {"assert_case": [test]})["score"] == 0.0


UNKNOWN = ("f(1) == 918273", "sorted(f(1)) == [918272, 918273]", "f(1)[0] is None and len(f(1)) == 918273")


@needs_sandbox
@pytest.mark.slow
@pytest.mark.parametrize("program", CHEATING_PROGRAMS.values(), ids=CHEATING_PROGRAMS)
def test_a_program_that_does_not_know_the_answer_does_not_get_it(program):
    tests = {"assert_case": [f"assert {test}" for test in UNKNOWN]}
    assert score_code(fenced(program), tests, time_limit_s=1, total_time_limit_s=300)["score"] == 0.0
    call = {"fn_name": "f", "inputs": [[1]], "outputs": ["918273"]}
    assert score_code(fenced(program), call, time_limit_s=1)["score"] == 0.0


@needs_sandbox
@pytest.mark.parametrize("response", ["", "no code", "```cpp\nint x;\n```"])
def test_no_program_is_a_score_of_zero(response):
    assert score_code(response, DOUBLE) == {
        "score": 0.0, "acc": False, "tests_passed": 0, "tests_total": 4, "code_status": "no_code"
    }  # fmt: skip


@needs_sandbox
def test_run_test_tells_each_test_apart():
    tests = {"inputs": ["1\n", "2\n", "3\n"], "outputs": ["2", "4", "6"]}
    program = "n = int(input())\nassert n < 3\nprint(2 if n == 1 else 0)"
    results, first = run_test(tests, test=program)
    assert (results, first["status"]) == ([True, False, -1], "wrong_answer")
    assert run_test(tests, test="print(2 * int(input()))")[0] == [True, True, True]
    right, _ = prime_code.apps_check_correctness(in_outs=CALL, generation="def add(a, b): return a + b", timeout=5)
    assert right == [True, True]
    with pytest.raises(ValueError, match="needs the program"):
        run_test(tests)


def test_public_signatures(server):
    """The calls that users know: positional arguments, and a pair of score and metadata."""
    right = fenced("print(int(input()) * 2)")
    score, metadata = prime_code.compute_score(right, json.dumps(DOUBLE), continuous=True)
    assert score == 1.0
    assert [m["status"] for m in metadata] == ["passed"] * 4
    semaphore = threading.Semaphore(4)
    score, metadata = sandbox_fusion.compute_score(server.url, semaphore, 256, right, json.dumps(DOUBLE), True)
    assert score == 1.0
    assert len(metadata) == 4
    half = fenced("print(2)")
    assert prime_code.compute_score(half, DOUBLE)[0] == 0.0
    assert sandbox_fusion.compute_score(server.url, None, 256, half, DOUBLE, True, timeout=5)[0] == 0.25


@needs_sandbox
@pytest.mark.parametrize(("bound", "most"), [(threading.BoundedSemaphore(2), 2), (None, 1)])
def test_requests_at_once_are_bounded(bound, most):
    program = fenced("import time\ntime.sleep(0.3)\nprint(input())")
    tests = {"inputs": list("abcdef"), "outputs": list("abcdef")}
    with service() as server:
        result = score_code(program, tests, sandbox_fusion_url=server.url, concurrent_semaphore=bound)
        assert result["score"] == 1.0
        assert len(server.requests) == 6
        assert server.most_at_once == most


@needs_sandbox
def test_the_request_is_that_of_the_service():
    with service() as server:
        score_code(
            fenced("print(1)"), DOUBLE, max_tests=1, time_limit_s=3, memory_limit_mb=300, sandbox_fusion_url=server.url
        )
        (request,) = server.requests
    assert request == {
        "code": "print(1)\n", "stdin": "1\n", "language": "python", "compile_timeout": 3, "run_timeout": 3,
        "memory_limit_MB": 300, "files": {}, "fetch_files": [],
    }  # fmt: skip


@needs_sandbox
def test_a_busy_service_is_asked_again():
    with service() as server:
        server.first = [503, 502, 500, 429]
        outcome = FusionSandbox(server.url, backoff_s=0.01).run("print(1)")
        assert outcome.stdout == "1\n"
        assert len(server.requests) == 5


def test_a_service_that_stays_busy_is_an_error():
    with service() as server:
        server.first = [503] * 9
        with pytest.raises(SandboxError, match="answered 503 after 2 repetitions"):
            FusionSandbox(server.url, retries=2, backoff_s=0.01).run("print(1)")
        assert len(server.requests) == 3


@pytest.mark.parametrize("status", [400, 404])
def test_other_errors_are_not_repeated(status):
    with service() as server:
        server.first = [status] * 9
        with pytest.raises(SandboxError, match=f"answered {status}"):
            FusionSandbox(server.url, backoff_s=0.01).run("print(1)")
        assert len(server.requests) == 1


def test_a_service_that_is_not_there_is_an_error_and_never_a_score():
    with service() as server:
        url = server.url
    with pytest.raises(SandboxError, match=r"cannot be used.*sandbox_fusion\.url"):
        FusionSandbox(url, retries=1, backoff_s=0.01).run("print(1)")


@pytest.mark.parametrize(
    ("answer", "complaint"),
    [
        ({"status": "SandboxError", "message": "disk full"}, "disk full"),
        ({"status": "Success", "run_result": None}, "not understood"),
        ({"hello": 1}, "not understood"),
        ({"status": "Success", "run_result": {"return_code": "0"}}, "not understood: return_code='0'"),
        ({"status": "Success", "run_result": {"return_code": 10**30}}, "not understood: return_code=1000"),
        ([1], "not an object"),
        ("<html>", "cannot be used"),
        ({"status": "Failed", "run_result": {"status": "Error", "return_code": None, "stderr": "no pod"}}, "no pod"),
    ],
)
def test_answers_that_are_failures_of_the_service(answer, complaint):
    with service() as server:
        server.answer = answer
        with pytest.raises(SandboxError, match=complaint):
            score_code(fenced("print(1)"), DOUBLE, sandbox_fusion_url=server.url)


def test_output_beyond_the_longest_answer_of_a_service_is_a_wrong_program(monkeypatch):
    monkeypatch.setattr("verl.base.http_limits.MAX_BYTES", 1000)
    with service() as server:
        server.answer = "x" * 2000
        result = score_code(fenced("print('\ud800' * 2000)"), DOUBLE, sandbox_fusion_url=server.url)
    assert (result["score"], result["code_status"]) == (0.0, "output_limit")


@pytest.mark.parametrize(
    ("result", "status"),
    [
        ({"status": "Finished", "return_code": 0, "stdout": "1"}, "ok"),
        ({"status": "Finished", "return_code": 1, "stderr": "ValueError: x"}, "exit_error"),
        ({"status": "Finished", "return_code": 1, "stderr": "MemoryError"}, "out_of_memory"),
        ({"status": "Error", "return_code": 1, "stderr": "SyntaxError"}, "exit_error"),
        ({"status": "Finished", "return_code": -11}, "crashed"),
        ({"status": "Finished", "return_code": 139}, "crashed"),
        ({"status": "TimeLimitExceeded", "return_code": None}, "timeout"),
        ({"status": "Finished", "return_code": 0, "stdout": "x" * 101}, "output_limit"),
    ],
)
def test_what_the_service_says_in_our_words(result, status):
    answer = {"status": "Success" if status == "ok" else "Failed", "run_result": result}
    assert outcome_of(answer, Limits(max_output_bytes=100)).status == status


def test_a_compilation_that_fails_is_the_programs_failure():
    answer = {
        "status": "Failed", "run_result": None,
        "compile_result": {"status": "Finished", "return_code": 1, "stderr": "error: expected ;"},
    }  # fmt: skip
    outcome = outcome_of(answer, Limits())
    assert (outcome.status, outcome.exit_code) == ("exit_error", 1)


def test_addresses():
    assert run_code_url("http://host:8080/") == "http://host:8080/run_code"
    assert run_code_url("https://host/faas/run_code") == "https://host/faas/run_code"
    for wrong in ("host:8080", "ftp://host", "http://"):
        with pytest.raises(SandboxError, match="no address"):
            run_code_url(wrong)


def test_data_that_cannot_be_used_is_an_error():
    with pytest.raises(RewardError, match="no JSON"):
        score_code(fenced("print(1)"), "{")


def test_every_code_source_has_the_scorer():
    from verl.scorers import get_scorer

    for source in (*CODE_SOURCES, "prime_code"):
        assert get_scorer(source) is score_code
        assert set(SCORERS.entries[source].settings) == set(SCORERS.get(source).settings)


@pytest.mark.parametrize(
    "settings", [{"time_limit_s": 0}, {"total_time_limit_s": -1}, {"max_tests": 0}, {"memory_limit_mb": 8}]
)
def test_settings_that_make_no_sense(settings):
    with pytest.raises(ConfigError, match=next(iter(settings))):
        check_settings(settings, "apps")


def test_a_wrong_address_is_refused_before_the_run():
    with pytest.raises(ConfigError, match=r"sandbox_fusion\.url='nowhere'"):
        check_sandbox({"sandbox_fusion_url": "nowhere"})
    check_sandbox({"sandbox_fusion_url": "http://localhost:8080"})


def test_without_a_sandbox_and_without_a_service_code_is_refused(tmp_path):
    """In a fresh process that cannot find bubblewrap: refused before the run, and never run bare."""
    import os
    import subprocess
    import sys
    from pathlib import Path

    program = (
        "from verl.plugins.sandbox import bubblewrap\nbubblewrap.TOOLS = '/nowhere'\n"
        "from verl.plugins.sandbox.prime_code import check_sandbox, score_code\n"
        "check_sandbox({'sandbox_fusion_url': 'http://localhost:1'})\n"
        'for attempt in (lambda: check_sandbox({}), lambda: score_code(\'```python\\nopen("ran", "w")\\n```\','
        " {'inputs': ['1'], 'outputs': ['1']})):\n"
        "    try: print('DONE', attempt())\n    except Exception as error: print(type(error).__name__, error)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PATH": str(tmp_path), "PYTHONPATH": str(Path(__file__).parents[3])},
    )  # fmt: skip
    assert "DONE" not in done.stdout, done.stdout
    assert "ConfigError" in done.stdout, done.stderr
    assert "SandboxUnavailableError" in done.stdout
    assert done.stdout.count("apt-get install bubblewrap") == 2
    assert not (tmp_path / "ran").exists()
