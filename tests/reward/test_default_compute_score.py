"""Scorers by data source."""

import pytest

from verl.errors import ConfigError, RewardError
from verl.utils.reward_score import SCORERS, check_settings, default_compute_score, register_scorer


@pytest.fixture
def my_scorer():
    @register_scorer("my/length", "my/other")
    def length(solution_str, ground_truth, extra_info=None, bonus=0.0):
        return {"score": len(solution_str) / ground_truth + bonus, "seen": extra_info}

    yield length
    for source in ("my/length", "my/other"):
        del SCORERS._entries[source]


def test_a_registered_scorer_gets_what_it_names(my_scorer):
    assert default_compute_score("my/length", "abcd", 8, {"a": 1}) == {"score": 0.5, "seen": {"a": 1}}
    assert default_compute_score("my/other", "abcd", 8, bonus=1.0)["score"] == 1.5


def test_settings_go_to_the_scorers_that_name_them(my_scorer):
    # gsm8k takes format_score and no bonus, the other one the reverse; both may be set for mixed data.
    assert default_compute_score("openai/gsm8k", "#### 3", "4", format_score=0.2, bonus=1.0) == 0.2
    assert default_compute_score("my/length", "abcd", 8, format_score=0.2, bonus=1.0)["score"] == 1.5


def test_a_setting_that_nobody_takes():
    with pytest.raises(ConfigError, match=r"'format_scor'\. Did you mean 'format_score'"):
        default_compute_score("openai/gsm8k", "#### 3", "4", format_scor=0.2)
    with pytest.raises(ConfigError, match="'formt'"):
        check_settings(["format_score", "formt"])
    check_settings(["format_score", "method", "score"])


@pytest.mark.parametrize(
    "source, says",
    [
        ("openai/gsm8", "Did you mean 'openai/gsm8k'"),
        ("", "data source ''"),
        ("codecontests", "code run against tests"),
        ("hiyouga/geometry3k", "geometry with pictures"),
        ("searchR1_nq", "question answering with search"),
        ("numina_olympiads", "Numina mathematics"),
        ("aime2024", "competition mathematics"),
        ("math_dapo", "competition mathematics"),
    ],
)
@pytest.mark.parametrize("kind", [RewardError, NotImplementedError])
def test_a_source_without_scorer_lists_those_with(source, says, kind):
    with pytest.raises(kind) as caught:
        default_compute_score(source, "x", "y")
    for part in (says, "countdown", "lighteval/MATH", "custom_reward_function.path", "reward_model.reward_format"):
        assert part in str(caught.value)


def test_a_row_without_ground_truth_is_an_error_and_not_a_zero():
    with pytest.raises(RewardError, match=r"no reward_model\.ground_truth"):
        default_compute_score("openai/gsm8k", "#### 3", None)
