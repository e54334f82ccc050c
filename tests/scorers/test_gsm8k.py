"""GSM8K: numbers found, numbers compared, and forty real solutions."""

import json
from pathlib import Path

import pytest

from verl.errors import ConfigError
from verl.scorers import default_compute_score
from verl.scorers.gsm8k import compute_score, extract_solution

SAMPLE = [json.loads(line) for line in (Path(__file__).parents[1] / "datasets" / "gsm8k_sample.jsonl").open()]


@pytest.mark.parametrize(
    "text, strict, flexible",
    [
        ("so 3 + 4 = 7\n#### 7", "7", "7"),
        ("####7", "7", "7"),
        ("#### 1,234,567", "1234567", "1234567"),
        ("#### $1,200.50", "1200.50", "1200.50"),
        ("#### -5 apples", "-5", "-5"),
        ("#### .5", ".5", ".5"),
        ("#### 18.", "18", "18"),
        ("#### 3\nno, #### 4", "4", "4"),
        ("#### 4 of 10", "4", "10"),
        ("The answer is 72", None, "72"),
        ("#### seven", None, None),
        ("3, 4", None, "4"),
        ("version 5.5.5", None, None),
        ("#### 5.5.5", None, None),
        ("so...5", None, "5"),
        ("1.5, 2,", None, "2"),
        ("", None, None),
    ],
)
def test_extract(text, strict, flexible):
    assert extract_solution(text) == strict
    assert extract_solution(text, "flexible") == flexible


def test_format_score_and_method():
    assert compute_score("#### 3", "4", format_score=0.1) == 0.1
    assert compute_score("no number", "4", format_score=0.1) == 0.0
    assert compute_score("#### 4", "4", format_score=0.1, score=5.0) == 5.0
    assert compute_score("it is 4", "4", method="flexible") == 1.0
    assert compute_score("it is 5.5.5", "0.5", method="flexible") == 0.0
    with pytest.raises(ConfigError, match="method='loose'"):
        compute_score("#### 4", "4", method="loose")


@pytest.mark.parametrize("row", SAMPLE, ids=range(len(SAMPLE)))
def test_real_solutions_score_one_and_changed_ones_zero(row):
    truth = extract_solution(row["answer"])
    assert truth is not None
    assert default_compute_score("openai/gsm8k", row["answer"], truth) == 1.0
    assert default_compute_score("openai/gsm8k", row["answer"], str(int(truth) + 1)) == 0.0
    reasoning = row["answer"].split("####")[0]
    assert default_compute_score("openai/gsm8k", f"{reasoning}#### {int(truth) - 1}", truth) == 0.0
    assert default_compute_score("openai/gsm8k", reasoning, truth) == 0.0
