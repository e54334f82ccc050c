"""Scorers by data source."""

import pytest

from verl.errors import ConfigError, RewardError
from verl.scorers import (
    SCORERS,
    check_settings,
    countdown,
    default_compute_score,
    geo3k,
    get_scorer,
    gsm8k,
    kind_of,
    math_dapo,
    math_reward,
    prime_math,
    register_scorer,
    search_r1_like_qa_em,
)


@pytest.fixture
def my_scorer():
    @register_scorer("my/length", "my/other")
    def length(solution_str, ground_truth, extra_info=None, bonus=0.0):
        return {"score": len(solution_str) / ground_truth + bonus, "seen": extra_info}


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


def test_a_data_source_of_a_plugin_is_not_registered_again():
    with pytest.raises(ConfigError, match=r"'apps' is registered twice: verl\.plugins\.sandbox\.prime_code:SCORER"):
        register_scorer("apps")(lambda solution_str, ground_truth: 1.0)


@pytest.mark.parametrize(
    "source, says",
    [
        ("openai/gsm8", "Did you mean 'openai/gsm8k'"),
        ("", "data source ''"),
        ("codecontest", "Did you mean 'codecontests'"),
        ("aim", "no scorer has this name"),
        ("math_dapo_2", "Did you mean 'math_dapo'"),
    ],
)
@pytest.mark.parametrize("kind", [RewardError, NotImplementedError])
def test_a_source_without_scorer_lists_those_with(source, says, kind):
    with pytest.raises(kind) as caught:
        default_compute_score(source, "x", "y")
    for part in (says, "countdown", "lighteval/MATH", "custom_reward_function.path", "reward_format"):
        assert part in str(caught.value)


@pytest.mark.parametrize(
    "sources, module",
    [
        (("openai/gsm8k", "gsm8k"), gsm8k),
        (("lighteval/MATH", "DigitalLearningGmbH/MATH-lighteval", "HuggingFaceH4/MATH-500"), math_reward),
        (("math_dapo", "math", "math_dapo_reasoning", "aime", "aime24", "aime_2025"), math_dapo),
        (("numina_aops_forum", "numina_synthetic_math", "numina_amc_aime", "numina_synthetic_amc", "numina_cn_k12",
          "numina_olympiads"), prime_math),
        (("hiyouga/geometry3k",), geo3k),
        (tuple(f"searchR1_{name}" for name in (
            "nq", "triviaqa", "popqa", "hotpotqa", "2wikimultihopqa", "musique", "bamboogle")), search_r1_like_qa_em),
        (("countdown",), countdown),
    ],
)  # fmt: skip
def test_the_map(sources, module):
    for source in sources:
        assert get_scorer(source) is module.compute_score
        assert source in SCORERS
        assert kind_of(source) != "async"


def test_the_longest_beginning_wins_and_an_exact_name_over_all():
    scorers = {name: (lambda solution_str, ground_truth, name=name: name) for name in ("my*", "my/long*", "my/long/er")}
    for name, scorer in scorers.items():
        scorer.__qualname__ = name  # a registry tells lambdas of one place by it
        register_scorer(name)(scorer)
    for source, name in {"my": "my*", "my/lo": "my*", "my/longest": "my/long*", "my/long/er": "my/long/er"}.items():
        assert get_scorer(source) is scorers[name]
    assert "m" not in SCORERS


def test_a_scorer_that_needs_no_truth_gets_none():
    register_scorer("my/judge")(lambda solution_str, ground_truth=None: 2.0 if ground_truth is None else 3.0)
    assert default_compute_score("my/judge", "x", None) == 2.0
    assert default_compute_score("my/judge", "x", "y") == 3.0


def test_a_row_without_ground_truth_is_an_error_and_not_a_zero():
    with pytest.raises(RewardError, match=r"ground_truth is None"):
        default_compute_score("openai/gsm8k", "#### 3", None)
