"""Whatever a model may write: scorers answer, or say RewardError, and take time in proportion to its length."""

import contextlib
import random
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl.errors import RewardError
from verl.plugins.sandbox.prime_code import extract_code
from verl.scorers import (
    countdown,
    geo3k,
    gsm8k,
    math_batch,
    math_dapo,
    math_reward,
    math_verify,
    prime_math,
    search_r1_like_qa_em,
)
from verl.scorers.llm_judge import CONTROL_TOKEN, Judge
from verl.scorers.math_equality import canonical, readings
from verl.scorers.parts import format_reward, last_tag, repetition_penalty
from verl.supervision.killable_pool import Budget, KillablePool

COUNTDOWN_TRUTH = {"target": 24, "numbers": [1, 2, 3, 4]}
JUDGES = [Judge(base_url="http://localhost:1/v1", model="m", read=read) for read in ("regex", "json")]

PURE = {
    "gsm8k": lambda text: gsm8k.compute_score(text, "3"),
    "gsm8k flexible": lambda text: gsm8k.compute_score(text, "3", method="flexible"),
    "gsm8k truth": lambda text: gsm8k.compute_score("#### 3", text),
    "math_dapo": lambda text: math_dapo.compute_score(text, "3"),
    "math_dapo box": lambda text: math_dapo.compute_score(text, "3", strict_box_verify=True),
    "math_dapo truth": lambda text: math_dapo.compute_score("Answer: 3", text),
    "math_dapo normalize": math_dapo.normalize_final_answer,
    "search": lambda text: search_r1_like_qa_em.compute_score(text, {"target": ["a", "b"]}),
    "search part": lambda text: search_r1_like_qa_em.compute_score_subem(text, {"target": ["a", "b"]}),
    "search truth": lambda text: search_r1_like_qa_em.compute_score("<answer>a</answer>", {"target": [text]}),
    "countdown": lambda text: countdown.compute_score(text, COUNTDOWN_TRUTH),
    "countdown answer": lambda text: countdown.compute_score(f"<answer>{text}</answer>", COUNTDOWN_TRUTH),
    "countdown truth": lambda text: countdown.compute_score("<answer>1</answer>", {"target": text, "numbers": text}),
    "format": format_reward,
    "last_tag": last_tag,
    "geo3k format": geo3k.format_reward,
    "repetition": repetition_penalty,
    "last_boxed": math_reward.last_boxed,
    "final_answer": prime_math.final_answer,
    "canonical": canonical,
    "readings": lambda text: readings(canonical(text), canonical(text[::-1])),
    "judge prompt": lambda text: JUDGES[0].messages(text, text, {"question": text}),
    "judge control tokens": lambda text: CONTROL_TOKEN.sub("", text),
    "judge regex": JUDGES[0]._by_regex,
    "judge json": JUDGES[1]._by_json,
    "code": extract_code,
}
SYMBOLIC = {
    "math_reward": lambda text: math_reward.compute_score(text, "3"),
    "prime_math": lambda text: prime_math.compute_score(text, "3"),
    "geo3k": lambda text: geo3k.compute_score(text, "3"),
    "math_verify": lambda text: math_verify.compute_score(text, "3"),
    "math_batch": lambda text: math_batch.compute_score_batched(["x"], [text], ["3"], [{}]),
}

PIECES = [
    "\\boxed{", "}", "{", "\\frac", "\\text{", "\\left(", "\\sqrt", "$", "#### ", "-", "1", "9", ",", ".", "e", "^",
    "_",
    "<answer>", "</answer>", "<think>", "</think>", "Answer:", "the answer is", " ", "\n", "(", ")", "+", "*", "/", "=",
    "\\", "%", "\\%", "½", "٣", "٪", "\u202e", "\x00", "\ud800", "Score: ", '{"score": ', "<|im_end|>",
    "__import__('os')",
]  # fmt: skip
HOSTILE = st.one_of(st.text(), st.lists(st.sampled_from(PIECES), max_size=30).map("".join))
LENGTH = 100_000


def repeated(piece):
    return (piece * (LENGTH // len(piece) + 1))[:LENGTH]


LONG = {
    **{repr(piece): repeated(piece) for piece in PIECES},
    "nested boxes": "\\boxed{" * 14_000 + "3" + "}" * 14_000,
    "braces": "{" * 50_000 + "}" * 50_000,
    "open box": "\\boxed{" + "{}" * 50_000,
    "blank after a mark": "####" + " " * LENGTH + "x",
    "blank after answer": "answer" + " " * LENGTH + "x",
    "blank after answer:": "answer:" + " " * LENGTH + "x",
    "blank after score": "Score:" + " *" * (LENGTH // 2) + "x",
    "blank after a number": "3" + " " * LENGTH + "!",
    "answers": repeated("the answer is "),
    "words": repeated("ab "),
    "a number of words": "3 " + repeated("ab ") + "!",
    "thousands": repeated("1,234"),
    "thinking": "<think>" + "</think>" * 12_000 + "\\boxed{" * 1_000,
    "objects": repeated('{"score": "x"} '),
    "nested objects": repeated('{"a":'),
    "bars": "<|" + "|" * LENGTH,
    "a fence that does not end": "```" + "a" * LENGTH,
    "blank behind a fence": "```" + " " * LENGTH,
    "fences": repeated("```\n"),
    "parentheses": "<answer>" + "(" * 120 + "1" + ")" * 120 + "</answer>",
    "a short text that is a large number": "<answer>" + "9" * 250 + "</answer>",
}


@pytest.mark.parametrize("scorer", PURE.values(), ids=PURE)
@given(text=HOSTILE)
@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text(scorer, text):
    with contextlib.suppress(RewardError):
        scorer(text)


@pytest.mark.parametrize("scorer", PURE.values(), ids=PURE)
def test_long_text_takes_no_quadratic_time(scorer):
    # Each takes milliseconds; a regular expression that backtracks over 100,000 characters takes minutes.
    for name, text in LONG.items():
        started = time.perf_counter()
        with contextlib.suppress(RewardError):
            scorer(text)
        assert time.perf_counter() - started < 5, name


def test_any_symbolic_answer_is_scored(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "math_verify")  # loaded before the time of a sample begins
    draw = random.Random(1)
    texts = ["".join(draw.choices(PIECES, k=draw.randint(0, 20))) for _ in range(15)]
    calls = [{"solution_str": f"\\boxed{{{text}}}", "ground_truth": draw.choice(["3", "x", "(1,2)"])} for text in texts]
    pool = KillablePool(prime_math.compute_score, budget=Budget(timeout_s=60.0, memory_mb=2048))
    outcomes = pool.map(calls)
    pool.close()
    for call, outcome in zip(calls, outcomes, strict=True):
        assert outcome.status == "ok", (call, outcome)


@pytest.mark.parametrize("scorer", SYMBOLIC.values(), ids=SYMBOLIC)
def test_long_text_is_not_compared_by_value(scorer):
    # An answer of more than 2,000 characters is compared as text, so nothing here reaches the algebra.
    started = time.perf_counter()
    for name in ("braces", "open box", "words", "'9'", "thousands", "'½'"):
        result = scorer(f"\\boxed{{{LONG[name]}}}")
        assert result in (0.0, [0.0]), name
    assert time.perf_counter() - started < 10


@pytest.mark.parametrize(
    "expression",
    ["__import__('os').getcwd()", "(lambda: 24)()", "24 if 1 else 0", "[24][0]", "4**2+8", "0x18", "1_0", "24 .real",
     "1e1", "2 3 + 4", "(1, 2)[0]", "True", "24;1", "24\n1", "f'{24}'", "4//1"],
)  # fmt: skip
def test_countdown_evaluates_nothing_but_arithmetic(expression):
    assert countdown.evaluate(expression) is None
    assert countdown.compute_score(f"<answer>{expression}</answer>", COUNTDOWN_TRUTH, format_score=0.1) == 0.0
