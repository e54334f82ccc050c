"""Numina, Geometry3K, Search-R1, and the two thin roads to mathematical equality."""

import numpy as np
import pytest

from verl.errors import ConfigError, RewardError
from verl.scorers import (
    default_compute_score,
    geo3k,
    math_batch,
    math_verify,
    prime_math,
    search_r1_like_qa_em,
)
from verl.scorers.prime_math import final_answer


@pytest.mark.parametrize(
    "text, answer",
    [
        (r"so \boxed{\frac{1}{2}}.", r"\frac{1}{2}"),
        (r"The answer is 3. Really: \boxed{4}", "4"),
        (r"\boxed{4}. The answer is 3.", "4"),
        ("The answer is 12.", "12"),
        ("The answer is: $12$. It was easy.", "12"),
        ("The answer is 3, or rather answer: 4", "4"),
        ("The answers are 1 and 2", "1 and 2"),
        ("**Final answer:** 3.5\nbye", "3.5"),
        ("Answer:\n12", "12"),
        ("the answer is **12**.", "12"),
        ("the answer is", None),
        ("The answer is $72$ in all.", "72"),
        ("The answer is therefore $x = 3.5$.", "x = 3.5"),
        ("The answer is $5", "5"),
        ("The answer is $5 and not $6", "5 and not $6"),
        ("The answer is $a$ or $b$", "a$ or $b"),
        ("answerable is 3", None),
        ("12", None),
        ("", None),
    ],
)
def test_final_answer(text, answer):
    assert final_answer(text) == answer


def test_numina():
    score = lambda text, truth, **settings: default_compute_score("numina_olympiads", text, truth, **settings)  # noqa: E731
    assert score("The answer is $\\frac{1}{2}$.", "0.5") == 1.0
    assert score("The answer is $\\frac{1}{2}$.", r"\boxed{0.5}") == 1.0
    assert score("The answer is 2.", "0.5") == 0.0
    assert score("The answer is 2.", "0.5", format_score=0.1) == 0.1
    assert score("It is 2", "2", format_score=0.1) == 0.0
    assert score(r"\boxed{2}", "2", score=3.0) == 3.0


def test_math_verify_and_math_batch_decide_alike():
    responses, truths = [r"\boxed{\frac12}", r"\boxed{3}", "nothing"], ["0.5", "4", "5"]
    assert [math_verify.compute_score(text, truth) for text, truth in zip(responses, truths, strict=True)] == [1, 0, 0]
    assert math_batch.compute_score_batched(["x"] * 3, responses, truths, [None] * 3, format_score=0.1) == [1, 0.1, 0]
    with pytest.raises(ValueError, match="shorter"):
        math_batch.compute_score_batched(["x"] * 3, responses, truths[:2], [None] * 3)
    assert math_verify.compute_score(model_output="The answer is 7.", ground_truth=7) == 1.0
    assert prime_math.compute_score(model_output="The answer is 7.", ground_truth=7) == 1.0


@pytest.mark.parametrize(
    "response, accuracy, form",
    [
        (r"<think>hm</think> \boxed{2\sqrt{2}}", 1, 1),
        ("\n<think>\nhm\n</think>\n" + r"so \boxed{\sqrt{8}}.", 1, 1),
        (r"<think>hm</think> \boxed{3}", 0, 1),
        (r"\boxed{\sqrt{8}}", 1, 0),
        (r"well <think>hm</think> \boxed{\sqrt{8}}", 1, 0),
        (r"<think>\boxed{\sqrt{8}}</think>", 1, 0),
        (r"<think>hm \boxed{\sqrt{8}}", 1, 0),
        (r"<think>hm</think> \boxed{\sqrt{8}", 0, 1),  # a brace there is, but not the last one
        ("<think>hm</think> 2.83", 0, 0),
        ("", 0, 0),
    ],
)
def test_geo3k(response, accuracy, form):
    scored = default_compute_score("hiyouga/geometry3k", response, r"2\sqrt{2}")
    assert scored == pytest.approx(0.9 * accuracy + 0.1 * form)
    half = geo3k.compute_score(predict_str=response, ground_truth=r"2\sqrt{2}", format_score=0.5)
    assert half == pytest.approx(0.5 * accuracy + 0.5 * form)


def test_geo3k_without_a_box():
    assert geo3k.accuracy_reward(" 1/2 ", "0.5", use_boxed=False) == 1.0
    assert geo3k.accuracy_reward(" 1/2 ", "0.5", use_boxed=True) == 0.0


@pytest.mark.parametrize(
    "text, normal",
    [
        ("The Beatles", "beatles"),
        ("  A  tale of\ttwo\ncities. ", "tale of two cities"),
        ("U.S.A.", "usa"),
        ("an apple, the pear", "apple pear"),
        ("theatre", "theatre"),
        ("Łódź", "łódź"),
        ("!!!", ""),
    ],
)
def test_squad_normalisation(text, normal):
    assert search_r1_like_qa_em.normalize_answer(text) == normal


@pytest.mark.parametrize(
    "response, exact, part",
    [
        ("<answer>The City of Paris.</answer>", 1.0, 1.0),
        ("<answer>London</answer><answer> paris </answer>", 1.0, 1.0),
        ("<answer>paris</answer><answer>London</answer>", 0.2, 0.2),
        ("<answer>It is Paris, France</answer>", 0.2, 1.0),
        ("<answer></answer>", 0.2, 0.2),
        ("<answer>the</answer>", 0.2, 0.2),
        ("<answer>!</answer>", 1.0, 1.0),
        ("<answer>wow!</answer>", 0.2, 0.2),
        ("Paris", 0.0, 0.0),
        ("<answer>Paris", 0.0, 0.0),
        ("<answer>x</answer>" * 9 + "<answer>Paris</answer>", 1.0, 1.0),
        ("<answer>x</answer>" * 10 + "<answer>Paris</answer>", 0.25, 0.25),
    ],
)
@pytest.mark.parametrize("as_array", [False, True])
def test_search(response, exact, part, as_array):
    targets = ["Paris", "City of Paris", "!"]
    truth = {"target": np.array(targets, dtype=object) if as_array else targets}
    assert default_compute_score("searchR1_nq", response, truth, format_score=0.2) == exact
    assert search_r1_like_qa_em.compute_score_subem(response, truth, format_score=0.2) == part


def test_a_grade_is_found_by_both_forms():
    # Normalisation removes the article A, so nothing would be left to be contained.
    for answer, score in (("A", 1.0), ("a cat", 0.0)):
        text = f"<answer>{answer}</answer>"
        assert search_r1_like_qa_em.compute_score(text, "A") == score
        assert search_r1_like_qa_em.compute_score_subem(text, "A", "strict") == score
    with pytest.raises(ConfigError, match="method='loose'"):
        search_r1_like_qa_em.compute_score("<answer>A</answer>", "A", method="loose")


def test_forms_of_the_targets():
    for truth in ("Paris", ["Paris"], {"target": "Paris"}, {"target": ("Rome", "Paris")}):
        assert search_r1_like_qa_em.compute_score("<answer>paris</answer>", truth) == 1.0
    for truth in (None, [], {}, {"target": []}, {"target": [3]}, {"answer": "Paris"}, 3):
        with pytest.raises(RewardError, match=r"expected \{'target'"):
            search_r1_like_qa_em.compute_score("<answer>paris</answer>", truth)


def test_parts_of_scorers_under_their_public_names():
    thought = r"<think>3 + 4</think> \boxed{7}"
    assert (geo3k.acc_reward(thought, "7"), geo3k.acc_reward(predict_str=thought, ground_truth="8")) == (1.0, 0.0)
    assert geo3k.acc_reward("7.0", "7", use_boxed=False) == 1.0
    assert (geo3k.format_reward(predict_str=thought), geo3k.format_reward(r"\boxed{7}")) == (1.0, 0.0)
    assert search_r1_like_qa_em.extract_solution("<answer> Rome </answer> no, <answer>Paris </answer>") == "Paris"
    assert search_r1_like_qa_em.extract_solution("Paris") is None
