"""Watch the metrics of a run for signs of trouble; used while it trains, and by ``verl view`` on what it wrote."""

from __future__ import annotations

import fnmatch
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

WINDOW = 20
"""Steps that a mean or median is taken over."""
STUCK_STEPS = 50
"""Steps without any change of the reward, after which it counts as stuck."""
FIRST_STEPS = 5
"""Steps after which responses count as cut from the start."""
FIRST_VALIDATIONS = 3
"""Validations after which one whose score is still 0 is an alert."""
QUIET_STEPS = 20
"""Steps after an alert in which its rule says nothing."""


Samples = Literal["", "lowest", "highest", "longest", "failed", "gap", "kl", "advantage", "no advantage"]
"""Samples by their score, length or status, or by a number of :func:`verl.experience.records.sample_numbers`."""


@dataclass(frozen=True)
class Alert:
    """A sign of trouble at a step."""

    step: int
    rule: str
    metric: str
    reason: str
    """Observation with its numbers, and its likely meaning."""
    samples: Samples = ""
    """Samples of the step that show it."""


class History:
    """The newest values of a metric, and the mean of its first ``WINDOW``."""

    def __init__(self) -> None:
        self.recent: deque[float] = deque(maxlen=STUCK_STEPS + 1)
        self.first: list[float] = []

    def add(self, value: float) -> None:
        """Add a finite value."""
        self.recent.append(value)
        if len(self.first) < WINDOW:
            self.first.append(value)

    @property
    def last(self) -> float:
        """The newest value."""
        return self.recent[-1]

    @property
    def is_settled(self) -> bool:
        """True if there are as many values after the first ``WINDOW`` as means need."""
        return len(self.first) == WINDOW and len(self.recent) > WINDOW

    def mean(self) -> float:
        """Mean of the newest ``WINDOW`` values."""
        return statistics.fmean(list(self.recent)[-WINDOW:])

    def start(self) -> float:
        """Mean of the first ``WINDOW`` values."""
        return statistics.fmean(self.first)

    def median_before(self) -> float:
        """Median of the ``WINDOW`` values before the newest."""
        return statistics.median(list(self.recent)[-WINDOW - 1 : -1])


@dataclass(frozen=True)
class Rule:
    """A test of one metric.

    Attributes:
        metric: its name; ``*`` stands for any text, and each metric that fits is tested for itself.
        broken: returns the reason of an alert, or an empty text.
        samples: see :class:`Alert`.
        reads_rewards: skipped where nothing is learnt from rewards.
    """

    name: str
    metric: str
    broken: Callable[[History], str]
    samples: Samples = ""
    reads_rewards: bool = False


class HealthWatch:
    """Looks at the metrics of one step after the other.

    Example:
        >>> watch = HealthWatch()
        >>> [alert.rule for alert in watch.check(1, {"actor/loss": float("nan")})]
        ['not_finite']
    """

    def __init__(self) -> None:
        self._history: dict[str, History] = defaultdict(History)
        self._alerted_at: dict[str, int] = {}

    def check(self, step: int, metrics: Mapping[str, float]) -> list[Alert]:
        """Take the metrics of a step and return its new alerts; a rule is silent for a while after one."""
        alerts = [
            Alert(step, "not_finite", name, f"{name} is {metrics[name]}: {_NOT_TRUSTED}", samples)
            for name, samples in FINITE.items()
            if name in metrics and not math.isfinite(metrics[name])
        ]
        rule_metrics = {rule: fnmatch.filter(metrics, rule.metric) for rule in RULES}
        for name in {name for names in rule_metrics.values() for name in names}:
            if math.isfinite(metrics[name]):
                self._history[name].add(float(metrics[name]))
        teachers_alone = "distillation/loss" in metrics and "actor/pg_loss" not in metrics
        for rule, names in rule_metrics.items():
            if rule.reads_rewards and teachers_alone:
                continue
            for name in names:
                history = self._history[name]
                if history.recent and (reason := rule.broken(history)):
                    alerts.append(Alert(step, rule.name, name, reason, rule.samples))
        return [alert for alert in alerts if self._is_new(alert)]

    def _is_new(self, alert: Alert) -> bool:
        before = self._alerted_at.get(alert.rule, -QUIET_STEPS)
        self._alerted_at[alert.rule] = alert.step
        return alert.step - before >= QUIET_STEPS


FINITE: dict[str, Samples] = {
    "actor/loss": "advantage",
    "actor/pg_loss": "advantage",
    "distillation/loss": "",
    "actor/grad_norm": "advantage",
    "critic/vf_loss": "advantage",
    "critic/grad_norm": "advantage",
    "train/loss": "",
    "train/grad_norm": "",
}
"""Metrics that must be finite, and the samples that may say why: a number that is not finite counts as the largest."""
_NOT_TRUSTED = "the update of this step is not to be trusted."


def _stuck(history: History) -> str:
    values = list(history.recent)
    if len(values) <= STUCK_STEPS or max(values) - min(values) > 1e-9:
        return ""
    return f"the mean score has been {history.last:.4g} for {STUCK_STEPS} steps: the model gets no signal."


def _equal_groups(history: History) -> str:
    if len(history.recent) < WINDOW or history.mean() < 0.95:
        return ""
    return (
        f"{history.mean():.0%} of the groups of the last {WINDOW} steps have one and the same score: the prompts are "
        "too easy or too hard, and give no advantage."
    )


def _entropy(history: History) -> str:
    if not history.is_settled or history.mean() >= 0.1 * history.start() or history.mean() >= 0.1:
        return ""
    return (
        f"the entropy fell from {history.start():.3g} to {history.mean():.3g} nats per token: the model explores no "
        "more. Consider actor.entropy_coeff, actor.entropy_target or clip_ratio_high."
    )


def _gap(history: History) -> str:
    if not history.is_settled or history.mean() < max(0.01, 3 * history.start()):
        return ""
    return (
        f"the probabilities of rollout and trainer differ by {history.mean():.3g} on average, {history.start():.3g} at "
        "the start. Consider algorithm.rollout_correction."
    )


def _truncated(history: History) -> str:
    if len(history.recent) == FIRST_STEPS and min(history.recent) >= 0.5:
        return (
            f"half of the responses or more were cut at data.max_response_length in each of the first {FIRST_STEPS} "
            f"steps, {history.last:.0%} in this one: what is cut has no answer to score. Raise the limit."
        )
    if len(history.recent) < WINDOW or history.mean() < max(0.3, 2 * statistics.fmean(history.first)):
        return ""
    return (
        f"{history.mean():.0%} of the responses of the last {WINDOW} steps are cut at data.max_response_length "
        f"({statistics.fmean(history.first):.0%} at the start)."
    )


def _kl(history: History) -> str:
    if len(history.recent) <= WINDOW or abs(history.last) < 0.1:
        return ""
    before = abs(history.median_before())
    return "" if abs(history.last) < 10 * before else f"the KL rose from {before:.3g} to {history.last:.3g} in a step."


def _spike(history: History) -> str:
    if len(history.recent) <= WINDOW or history.last < 10 * history.median_before() or history.last < 1e-6:
        return ""
    return f"the gradient's norm is {history.last:.3g}, {history.median_before():.3g} in the {WINDOW} steps before."


def _errors(history: History) -> str:
    if history.last < 0.05:
        return ""
    return f"{history.last:.0%} of the samples could not be scored; they are left out of training."


def _zero(history: History) -> str:
    if len(history.recent) != FIRST_VALIDATIONS or any(history.recent):
        return ""
    return (
        f"each of the first {FIRST_VALIDATIONS} validations scored 0. Read a response: is the answer in the form that "
        "the scorer looks for, is it cut at data.max_response_length, and does the ground truth belong to this scorer?"
    )


RULES = (
    Rule("reward_stuck", "critic/score/mean", _stuck, "highest", reads_rewards=True),
    Rule("equal_groups", "reward/equal_group_rate", _equal_groups, "no advantage", reads_rewards=True),
    Rule("entropy_collapse", "actor/entropy", _entropy, "highest"),
    Rule("gap_growing", "training/rollout_probs_diff_mean", _gap, "gap"),
    Rule("truncation", "response_length/clip_ratio", _truncated, "longest"),
    Rule("kl_runaway", "actor/ppo_kl", _kl, "advantage"),
    Rule("kl_runaway", "actor/kl_loss", _kl, "kl"),
    Rule("grad_spike", "actor/grad_norm", _spike, "advantage"),
    Rule("grad_spike", "critic/grad_norm", _spike, "advantage"),
    Rule("grad_spike", "train/grad_norm", _spike),
    Rule("reward_errors", "reward/error_rate", _errors, "failed"),
    Rule("validation_zero", "val-core/*/mean@*", _zero, "lowest"),
)
DESCRIPTIONS = {
    "not_finite": ("Not finite", "a loss or a gradient norm is NaN or infinite"),
    "reward_stuck": ("Reward stuck", f"the mean score did not change for {STUCK_STEPS} steps"),
    "equal_groups": ("All groups equal", f"over {WINDOW} steps, 95 % of the groups have a single score"),
    "entropy_collapse": (
        "Entropy collapsing",
        f"its mean over {WINDOW} steps is below 0.1 nats and below a tenth of that of the first {WINDOW}",
    ),
    "gap_growing": (
        "Gap growing",
        "rollout and trainer differ by 0.01 in probability, and three times as much as at first",
    ),
    "truncation": (
        "Responses cut",
        f"30 % of the responses are cut, and twice as many as at first; or at least half in each of the first "
        f"{FIRST_STEPS} steps",
    ),
    "kl_runaway": ("KL running away", f"a KL above 0.1, and ten times the median of the {WINDOW} steps before"),
    "grad_spike": ("Gradient spike", f"the gradient norm is ten times the median of the {WINDOW} steps before"),
    "reward_errors": ("Errors of rewards", "5 % of the samples could not be scored"),
    "validation_zero": (
        "Validation at 0",
        f"a data source has score 0 in each of the first {FIRST_VALIDATIONS} validations",
    ),
}
"""Title of each rule's alerts, and when they come."""


def health_metrics(names: Iterable[str]) -> dict[str, list[str]]:
    """Return by rule those of the metrics that it tests."""
    names = sorted(names)
    metrics: dict[str, list[str]] = {"not_finite": [name for name in names if name in FINITE]}
    for rule in RULES:
        metrics.setdefault(rule.name, []).extend(fnmatch.filter(names, rule.metric))
    return metrics
