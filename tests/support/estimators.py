"""Every advantage estimator again, slowly: plain Python over samples and tokens, written from the formulas."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from verl.schema import COLUMNS, RESPONSE

SETTINGS = {
    "gamma": 0.9,
    "lam": 0.8,
    "high_level_gamma": 0.7,
    "norm_adv_by_std_in_grpo": True,
    "gdpo_reward_keys": ("accuracy", "format"),
    "gdpo_reward_weights": (1.0, 0.5),
    "step_advantage_weight": 0.6,
    "episode_agents": ("solver",),
}
Rows = list[list[float]]


def random_batch(
    seed: int, groups: Sequence = ("a", "a", "a", "b", "b", "b"), width: int = 7, density: float = 0.7
) -> dict:
    """Any column that an estimator may ask for: every per-token column of the schema, at least 0 where that matters."""
    generator = torch.Generator().manual_seed(seed)
    rows = len(groups)
    mask = (torch.rand(rows, width, generator=generator) < density).long()
    batch: dict = {
        column.name: torch.rand(rows, width, generator=generator) * mask
        for column in COLUMNS.values()
        if column.dims == RESPONSE and column.dtype == "float32"
    }
    for name in ("values", "advantages", "returns"):
        batch[name] = torch.randn(rows, width, generator=generator) * mask
    for name in batch:
        if "log_prob" in name:
            batch[name] = -batch[name]
    pi = batch["old_log_probs"].exp()  # Σπ² holds π², and what the other tokens may share of the rest
    batch["sum_pi_squared"] = (pi**2 + batch["sum_pi_squared"] * (1 - pi) ** 2) * mask
    batch |= {
        "response_mask": mask,
        "reward_baselines": torch.randn(rows, generator=generator),
        "accuracy": np.array(torch.randint(0, 3, (rows,), generator=generator).tolist(), dtype=object),
        "format": np.array(torch.randn(rows, generator=generator).tolist(), dtype=object),
        "index": np.array([f"p{group}" for group in groups], dtype=object),
        "role_baselines": torch.randn(rows, generator=generator),
        # Few words, so that some states come twice.
        "trajectory_conversation": conversations(torch.randint(0, 2, (rows, width), generator=generator).tolist()),
        "agent": np.array(["solver/1" if group in ("b", 1) else "main" for group in groups], dtype=object),
        "trajectory_id": np.array([f"p{group}/0" for group in groups], dtype=object),
    }
    return batch


def conversations(observations: Sequence[Sequence[object]]) -> np.ndarray:
    """Messages of rows, from what the environment says before each turn of the policy."""
    column = np.empty(len(observations), dtype=object)
    for row, contents in enumerate(observations):
        pairs = ([{"role": "user", "content": str(one)}, {"role": "assistant", "content": ""}] for one in contents)
        column[row] = [message for pair in pairs for message in pair]
    return column


def only_rows(batch: dict, rows: list[int]) -> dict:
    """The batch with these rows, in this order."""
    return {name: column[np.array(rows, dtype=int)] if isinstance(column, np.ndarray) else column[rows]
            for name, column in batch.items()}  # fmt: skip


def whiten(values: Rows, mask: Rows) -> Rows:
    """(x - mean) / sqrt(unbiased variance + 1e-8) over the valid entries, 0 elsewhere."""
    kept = [x for row, m in zip(values, mask, strict=True) for x, v in zip(row, m, strict=True) if v]
    mean = sum(kept) / len(kept) if kept else 0.0
    var = sum((x - mean) ** 2 for x in kept) / max(len(kept) - 1, 1)
    return [
        [(x - mean) / math.sqrt(var + 1e-8) if v else 0.0 for x, v in zip(row, m, strict=True)]
        for row, m in zip(values, mask, strict=True)
    ]


class ListBatch:
    """A batch as lists of numbers."""

    def __init__(self, batch: dict) -> None:
        self.m: Rows = batch["response_mask"].tolist()
        self.r: Rows = batch["token_level_rewards"].double().tolist()
        self.n, self.width = len(self.m), len(self.m[0])
        self.valid = [[t for t in range(self.width) if row[t]] for row in self.m]
        self.total = [sum(self.r[i][t] for t in self.valid[i]) for i in range(self.n)]
        index = list(batch["index"])
        self.siblings = [
            [j for j in range(self.n) if index[j] == index[i] and self.valid[j]] for i in range(self.n)
        ]  # a response without tokens has no siblings
        self.batch = batch

    def column(self, name: str) -> list:
        column = self.batch[name]
        return column.double().tolist() if isinstance(column, torch.Tensor) else list(column)

    def spread(self, scores: list[float]) -> Rows:
        return [[score if v else 0.0 for v in row] for score, row in zip(scores, self.m, strict=True)]

    def per_row(self, score: Callable[[int, list[float]], float], totals: list[float] | None = None) -> Rows:
        """``score(i, rewards of the siblings)`` on every valid token of row i."""
        totals = self.total if totals is None else totals
        return self.spread([score(i, [totals[j] for j in self.siblings[i]]) if self.valid[i] else 0.0
                            for i in range(self.n)])  # fmt: skip

    def to_go(self, i: int) -> list[float]:
        row, after = [0.0] * self.width, 0.0
        for t in reversed(self.valid[i]):
            after = row[t] = self.r[i][t] + after
        return row

    def gamma_after(self, i: int, t: int) -> float:
        """The discount from token t to the next: inside of a turn, or from a turn to the next."""
        is_inside = t + 1 < self.width and bool(self.m[i][t + 1])
        return SETTINGS["gamma"] if is_inside else SETTINGS["high_level_gamma"]

    def discounted(self, i: int) -> list[float]:
        row, after = [0.0] * self.width, 0.0
        for t in reversed(self.valid[i]):
            after = row[t] = self.r[i][t] + self.gamma_after(i, t) * after
        return row


def mean(xs: list[float]) -> float:
    return sum(xs) / len(xs)


def std(xs: list[float]) -> float:
    return math.sqrt(sum((x - mean(xs)) ** 2 for x in xs) / (len(xs) - 1))


def normalised(own: float, siblings: list[float], by_std: bool = True) -> float:
    if len(siblings) == 1:
        return own / (1 + 1e-6) if by_std else own
    return (own - mean(siblings)) / (std(siblings) + 1e-6 if by_std else 1.0)


def gae(b: ListBatch) -> Rows:
    v, rows = b.column("values"), []
    for i in range(b.n):
        row, after, next_value = [0.0] * b.width, 0.0, 0.0
        for t in reversed(b.valid[i]):
            gamma = b.gamma_after(i, t)
            after = b.r[i][t] + gamma * next_value - v[i][t] + gamma * SETTINGS["lam"] * after
            row[t], next_value = after, v[i][t]
        rows.append(row)
    return whiten(rows, b.m)


def bi_level_gae(b: ListBatch) -> Rows:
    v, gamma, high, lam = b.column("values"), SETTINGS["gamma"], SETTINGS["high_level_gamma"], SETTINGS["lam"]
    rows = []
    for i in range(b.n):
        row, turns = [0.0] * b.width, turns_of(b.m[i])
        of_next_turn = value_of_next = 0.0
        for turn in reversed(turns):
            last = turn[-1]
            of_next_turn = b.r[i][last] + high * value_of_next - v[i][last] + high * lam * of_next_turn
            value_of_next = v[i][last]
            row[last] = of_next_turn
            for t in reversed(turn[:-1]):
                row[t] = b.r[i][t] + gamma * v[i][t + 1] - v[i][t] + gamma * lam * row[t + 1]
        rows.append(row)
    return whiten(rows, b.m)


def rloo(b: ListBatch) -> Rows:
    def score(i: int, siblings: list[float]) -> float:
        others = [b.total[j] for j in b.siblings[i] if j != i]
        return b.total[i] - (mean(others) if others else 0.0)

    return b.per_row(score)


def passk(b: ListBatch) -> Rows:
    def score(i: int, siblings: list[float]) -> float:
        if len(siblings) == 1:
            return b.total[i] / (1 + 1e-6)
        others = [b.total[j] for j in b.siblings[i] if j != i]
        return max(b.total[i] - max(others), 0.0) / (std(siblings) + 1e-6)

    return b.per_row(score)


def gdpo(b: ListBatch) -> Rows:
    scores = [0.0] * b.n
    for key, weight in zip(SETTINGS["gdpo_reward_keys"], SETTINGS["gdpo_reward_weights"], strict=True):
        values = b.column(key)
        for i in range(b.n):
            if b.valid[i]:
                scores[i] += weight * normalised(values[i], [values[j] for j in b.siblings[i]])
    return whiten(b.spread(scores), b.m)


def opo(b: ListBatch) -> Rows:
    def score(i: int, siblings: list[float]) -> float:
        if len(siblings) == 1:
            return b.total[i]
        lengths = [len(b.valid[j]) for j in b.siblings[i]]
        return b.total[i] - sum(n * x for n, x in zip(lengths, siblings, strict=True)) / sum(lengths)

    return b.per_row(score)


def gpg(b: ListBatch) -> Rows:
    rows = sum(1 for valid in b.valid if valid)
    alpha = rows / max(sum(1 for x in b.total if x != 0), 1)
    return b.per_row(lambda i, siblings: alpha * normalised(b.total[i], siblings, by_std=False))


def maxrl(b: ListBatch) -> Rows:
    def score(i: int, siblings: list[float]) -> float:
        if len(siblings) == 1:
            return b.total[i]
        return (b.total[i] - mean(siblings)) / mean(siblings) if mean(siblings) else 0.0

    return b.per_row(score)


def token_baseline(b: ListBatch, squeeze: bool) -> Rows:
    """Tokens by place: their position, or their number among the policy's tokens."""
    pi, squares, rho = b.column("old_log_probs"), b.column("sum_pi_squared"), b.column("rollout_is_weights")
    place = [{(k if squeeze else t): t for k, t in enumerate(valid)} for valid in b.valid]
    returns = [b.to_go(i) for i in range(b.n)]

    def weight(i: int, t: int) -> float:
        return sum((1 - 2 * math.exp(pi[i][s]) + squares[i][s]) * rho[i][s] ** 2 for s in b.valid[i] if s <= t)

    rows = []
    for i in range(b.n):
        row = [0.0] * b.width
        for p, t in place[i].items():
            beside = [(j, place[j][p]) for j in b.siblings[i] if p in place[j]]
            above = sum(returns[j][s] * weight(j, s) for j, s in beside)
            below = sum(weight(j, s) for j, s in beside) + 1e-8
            row[t] = returns[i][t] - (above / below if len(beside) > 1 else 0.0)
        rows.append(row)
    return rows


def turns_of(row: list[float]) -> list[list[int]]:
    found: list[list[int]] = []
    for t, v in enumerate(row):
        if v and (t == 0 or not row[t - 1]):
            found.append([])
        if v:
            found[-1].append(t)
    return found


def returns_of_turns(b: ListBatch) -> tuple[list[list[list[int]]], list[list[float]]]:
    turns = [turns_of(row) for row in b.m]
    returns: list[list[float]] = []
    for i in range(b.n):
        after, found = 0.0, []
        for turn in reversed(turns[i]):
            after = sum(b.r[i][t] for t in turn) + SETTINGS["high_level_gamma"] * after
            found.append(after)
        returns.append(found[::-1])
    return turns, returns


def gigpo(b: ListBatch) -> Rows:
    (turns, returns), said = returns_of_turns(b), b.column("trajectory_conversation")

    def state(i: int, k: int) -> list:
        words = [message["content"] for message in said[i] if message["role"] == "user"]
        last = len(words) - len(turns[i]) + k + 1
        return words[:last] if k == 0 else words[last - 1 : last]

    rows = []
    for i in range(b.n):
        row = [0.0] * b.width
        for k, turn in enumerate(turns[i]):
            alike = [returns[j][n] for j in b.siblings[i] for n in range(len(turns[j])) if state(j, n) == state(i, k)]
            step = normalised(returns[i][k], alike) if len(alike) > 1 else 0.0
            for t in turn:
                whole = normalised(b.total[i], [b.total[j] for j in b.siblings[i]])
                row[t] = whole + SETTINGS["step_advantage_weight"] * step
        rows.append(row)
    return rows


def per_turn(b: ListBatch) -> Rows:
    turns, returns = returns_of_turns(b)
    rows = []
    for i in range(b.n):
        row = [0.0] * b.width
        for k, turn in enumerate(turns[i]):
            for t in turn:
                row[t] = normalised(returns[i][k], [returns[j][k] for j in b.siblings[i] if k < len(turns[j])])
        rows.append(row)
    return rows


def remax(b: ListBatch) -> Rows:
    baseline = b.column("reward_baselines")
    return [[b.to_go(i)[t] - baseline[i] if b.m[i][t] else 0.0 for t in range(b.width)] for i in range(b.n)]


ORACLES: dict[str, Callable[[ListBatch], Rows]] = {
    "gae": gae,
    "bi_level_gae": bi_level_gae,
    "grpo": lambda b: b.per_row(lambda i, siblings: normalised(b.total[i], siblings)),
    "rloo": rloo,
    "grpo_passk": passk,
    "gdpo": gdpo,
    "reinforce_plus_plus": lambda b: whiten([b.discounted(i) for i in range(b.n)], b.m),
    "reinforce_plus_plus_baseline": lambda b: whiten(
        b.per_row(lambda i, siblings: normalised(b.total[i], siblings, by_std=False)), b.m
    ),
    "remax": remax,
    "opo": opo,
    "gpg": gpg,
    "maxrl": maxrl,
    "optimal_token_baseline": lambda b: token_baseline(b, squeeze=False),
    "tir_optimal_token_baseline": lambda b: token_baseline(b, squeeze=True),
    "grpo_per_turn": per_turn,
    "gigpo": gigpo,
    "hierarchical_grpo": lambda b: b.per_row(lambda i, siblings: normalised(b.total[i], siblings)),
    "rae": lambda b: b.spread([total - mean for total, mean in zip(b.total, b.column("role_baselines"), strict=True)]),
}
ORACLES["grpo_vectorized"], ORACLES["rloo_vectorized"] = ORACLES["grpo"], ORACLES["rloo"]


def oracle(name: str, batch: dict) -> torch.Tensor:
    """The advantages of the estimator ``name``, (bsz, response_length) float64."""
    return torch.tensor(ORACLES[name](ListBatch(batch)), dtype=torch.float64)
