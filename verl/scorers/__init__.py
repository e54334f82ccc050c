"""Scorers, chosen by data source.

========================================================================== =============================
data source                                                                scorer
========================================================================== =============================
openai/gsm8k, gsm8k                                                        :mod:`.gsm8k`
lighteval/MATH, DigitalLearningGmbH/MATH-lighteval, HuggingFaceH4/MATH-500 :mod:`.math_reward`
math_dapo, math, math_dapo_reasoning, aime*                                :mod:`.math_dapo`
numina_aops_forum, numina_synthetic_math, numina_amc_aime,
numina_synthetic_amc, numina_cn_k12, numina_olympiads                      :mod:`.prime_math`
hiyouga/geometry3k                                                         :mod:`.geo3k`
searchR1_*                                                                 :mod:`.search_r1_like_qa_em`
countdown                                                                  :mod:`.countdown`
codecontests, apps, codeforces, taco                                       :mod:`.code`
llm_judge (by ``reward_model.reward_format``)                              :mod:`.llm_judge`
========================================================================== =============================

A scorer is a function ``(solution_str, ground_truth, **settings) -> float | dict``, plain or
``async``. Add one with ``@register_scorer("my/source")``, or set ``custom_reward_function.path``;
:mod:`.parts` has functions to build it from.
"""

from __future__ import annotations

from verl.scorers import (
    code,
    countdown,
    geo3k,
    gsm8k,
    llm_judge,
    math_dapo,
    math_reward,
    prime_math,
    search_r1_like_qa_em,
)
from verl.scorers.registry import (
    FORMATS,
    SCORERS,
    UnknownDataSourceError,
    check_settings,
    check_truth,
    default_compute_score,
    get_scorer,
    kind_of,
    register_scorer,
    row_truth,
    scorer_for_all,
    source_of,
)

__all__ = [
    "FORMATS",
    "SCORERS",
    "UnknownDataSourceError",
    "check_settings",
    "check_truth",
    "code",
    "countdown",
    "default_compute_score",
    "geo3k",
    "get_scorer",
    "gsm8k",
    "kind_of",
    "llm_judge",
    "math_dapo",
    "math_reward",
    "prime_math",
    "register_scorer",
    "row_truth",
    "scorer_for_all",
    "search_r1_like_qa_em",
    "source_of",
]
