"""Parsers survive whatever a model, a file or a service may write: no crash, no hang, and nothing is evaluated.

A bounded run by default, the same texts every time (``make test SEARCH=1`` takes others). A long one, with other texts
each time::

    pytest tests/security/test_fuzz.py -m slow
"""

from __future__ import annotations

import random

import pytest
from hypothesis import HealthCheck, given, settings

from tests.security import fuzzing
from tests.security.fuzzing import TARGETS, Watch, check, hostile, mutated
from verl.supervision.killable_pool import Budget, KillablePool

LARGE = [HealthCheck.too_slow, HealthCheck.data_too_large]
QUICK = settings(max_examples=20, database=None, suppress_health_check=LARGE)
LONG = settings(max_examples=3000, derandomize=False, database=None, suppress_health_check=LARGE)
WATCH = Watch()
SYSTEM = random.SystemRandom()  # tests seed the other one
for known in TARGETS:
    check(known, "0")  # what is imported when it is first needed


def examine(name: str, text: str) -> None:
    with WATCH.on():
        check(name, text)
    assert not WATCH.seen
    assert not WATCH.code


def test_the_watch_sees_what_is_evaluated():
    with WATCH.on():
        eval("1 + 1")
    assert len(WATCH.code) == 1


@pytest.mark.parametrize("name", TARGETS)
@given(text=hostile)
@QUICK
def test_any_text_is_parsed_or_refused(name: str, text: str):
    examine(name, text)


@pytest.mark.slow
@pytest.mark.parametrize("name", TARGETS)
@given(text=hostile)
@LONG
def test_any_text_is_parsed_or_refused_at_length(name: str, text: str):
    examine(name, text)


FOUND = [
    ("command line", "a" * 300),  # asked the file system for a folder of this name
    ("rows", "9" * 5000),  # Python converts no number of so many digits
    ("rows of json", f"[{'9' * 5000}]"),
    ("tests of a task", "[" * 100_000),
    ("arguments", "[" * 100_000),
    ("an assertion", "-" * 30_000),  # MemoryError, says the parser
    ("readings of two", f"1_{'9' * 5000}1_9"),
]


@pytest.mark.parametrize("name, text", FOUND, ids=[name for name, _ in FOUND])
def test_what_was_found(name: str, text: str):
    examine(name, text)


# ---- time ----------------------------------------------------------------------------------------


def long_texts(count: int, seed: int) -> list[dict[str, object]]:
    """Texts of 30,000 characters that repeat a few pieces: what makes regular expressions and parsers slow."""
    draw = random.Random(seed)
    return [
        {
            "prefix": "".join(draw.choices(fuzzing.REPEATED, k=draw.randint(0, 2))),
            "piece": "".join(draw.choices(fuzzing.REPEATED, k=draw.randint(1, 3))),
            "suffix": "".join(draw.choices(fuzzing.REPEATED, k=draw.randint(0, 2))),
            "length": 30_000,
        }
        for _ in range(count)
    ]


def hang_for_no_text(count: int, seed: int) -> None:
    """All parsers together take a second for such a text; one that is quadratic in its length takes minutes."""
    texts = long_texts(count, seed)
    pool = KillablePool(fuzzing.check_repeated, budget=Budget(timeout_s=40.0))
    for text, outcome in zip(texts, pool.map(texts), strict=True):
        assert outcome.status == "ok", (text, outcome)
    pool.close()


def test_no_parser_hangs():
    hang_for_no_text(count=2, seed=1)


@pytest.mark.slow
def test_no_parser_hangs_at_length():
    hang_for_no_text(count=600, seed=SYSTEM.randrange(2**32))


# ---- algebra -------------------------------------------------------------------------------------


def algebra(tries: settings) -> None:
    """Answers of the grammar, compared by value: each has a score or runs out of its time, and nothing is evaluated."""
    texts: list[str] = []

    @given(text=mutated())
    @tries
    def collect(text: str) -> None:
        texts.append(text)

    collect()
    calls = [{"answer": text, "truth": ("3", "x", "(1,2)", "\\frac{1}{2}")[n % 4]} for n, text in enumerate(texts)]
    pool = KillablePool(fuzzing.compared_by_value, budget=Budget(timeout_s=15.0, memory_mb=2048))
    outcomes = pool.map(calls)
    pool.close()
    for call, outcome in zip(calls, outcomes, strict=True):
        assert outcome.status in ("ok", "timeout", "out_of_memory"), (call, outcome)
        assert not outcome.value, (call, outcome)
    assert sum(outcome.status != "ok" for outcome in outcomes) <= max(2, len(outcomes) / 20)


def test_answers_that_are_compared_by_value():
    algebra(settings(QUICK, max_examples=15))


@pytest.mark.slow
def test_answers_that_are_compared_by_value_at_length():
    algebra(settings(LONG, max_examples=5000))


# ---- files with wrong bytes ----------------------------------------------------------------------


def damaged_files(kind: str, count: int, first: int) -> None:
    pool = KillablePool(fuzzing.read_damaged, budget=Budget(timeout_s=20.0, memory_mb=1024))
    calls = [{"kind": kind, "seed": first + number} for number in range(count)]
    outcomes = pool.map(calls)
    pool.close()
    for call, outcome in zip(calls, outcomes, strict=True):
        assert outcome.status == "ok", (call, outcome)
    assert {outcome.value for outcome in outcomes} - {"read"}  # most are damaged where it matters


@pytest.mark.parametrize("kind", ["shard", "parquet"])
def test_a_damaged_file_is_read_or_refused(kind: str):
    damaged_files(kind, count=12, first=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", fuzzing.FILES)
def test_a_damaged_file_is_read_or_refused_at_length(kind: str):
    damaged_files(kind, count=5000, first=SYSTEM.randrange(2**32))
