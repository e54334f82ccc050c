"""Ages of the tokens that steps trained on, for the page: the metrics ``training/off_policy/tokens_by_age``."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from typing import TypedDict

from verl.plugins.view.curves import Curve
from verl.plugins.view.timeline import MAX_STEPS

AGE = re.compile(r"training/off_policy/tokens_by_age/(\d+)")


class StepAges(TypedDict):
    """Shares of a step's tokens by age: the first is of those of the newest weights, the second one update older."""

    step: int
    shares: list[float]


def names_of_ages(names: Iterable[str]) -> list[str]:
    """Return those of the metrics that are shares of tokens by age, from the lowest age."""
    ages = {int(match[1]): name for name in names if (match := AGE.fullmatch(name))}
    return [ages[age] for age in sorted(ages)]


def ages_of(curves: Mapping[str, Curve], first: int | None, last: int | None) -> list[StepAges]:
    """Return the shares of steps ``first`` to ``last``, of the newest ``MAX_STEPS`` of them.

    Of a step that was made again after a resumption the later one counts, with the ages that it has.

    Args:
        curves: of all metrics that :func:`names_of_ages` returns.
        first: None for the first step of the run.
        last: None for its last step.
    """
    times: dict[int, float] = {}
    steps: dict[int, dict[int, float]] = {}
    for name in names_of_ages(curves):
        curve, age = curves[name], int(name.rpartition("/")[2])
        for step, time, share in zip(curve.steps.tolist(), curve.times.tolist(), curve.values.tolist(), strict=True):
            if (first is None or step >= first) and (last is None or step <= last) and not math.isnan(share):
                written_at = 0.0 if math.isnan(time) else time
                if written_at > times.get(int(step), -1.0):
                    times[int(step)], steps[int(step)] = written_at, {}
                if written_at == times[int(step)]:
                    steps[int(step)][age] = share
    return [
        {"step": step, "shares": [steps[step].get(age, 0.0) for age in range(max(steps[step]) + 1)]}
        for step in sorted(steps)[-MAX_STEPS:]
    ]
