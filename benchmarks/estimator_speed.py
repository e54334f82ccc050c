"""Advantage estimators against plain Python loops, on a batch of [1024, 1024], in one run.

    python -m benchmarks.estimator_speed [--rows 1024] [--width 1024] [--threads 2] [--repeats 9] [--clock wall]

Two yardsticks, the loops that one would write first:

    tokens   a nested Python loop over rows and tokens; on lists of floats, the fastest such loop, and on
             elements of the tensors, the usual one. Both run on a slice of the rows, and their time is
             scaled to the whole batch.
    samples  a Python loop over the samples, of tensor operations on one row: append its reward to a dict
             of groups, statistics per group, then one advantage per sample.

Groups are of eight; responses have random lengths. A figure above 1 says how many times faster the
estimator is. Each result is compared with its loop's before it is timed. ``--clock cpu`` counts the processor
time of all threads instead, which a busy machine disturbs less.
"""

from __future__ import annotations

import argparse
import time
from collections import defaultdict
from collections.abc import Callable

import torch
from torch import Tensor

from verl.algorithms import adv_needs, compute_advantages, estimator_names, get_adv_estimator_fn
from verl.utils.torch_functional import masked_whiten

GAMMA, LAM = 0.99, 0.95
SETTINGS = {"gamma": GAMMA, "lam": LAM, "gdpo_reward_keys": ("accuracy", "format")}
Columns = dict


def make_batch(rows: int, width: int) -> Columns:
    g = torch.Generator().manual_seed(0)
    lengths = torch.randint(width // 4, width + 1, (rows,), generator=g)
    mask = (torch.arange(width) < lengths.unsqueeze(-1)).long()
    rewards = torch.zeros(rows, width)
    rewards[torch.arange(rows), lengths - 1] = torch.randint(0, 2, (rows,), generator=g).float()
    return {
        "token_level_rewards": rewards,
        "response_mask": mask,
        "values": torch.randn(rows, width, generator=g) * mask,
        "old_log_probs": -torch.rand(rows, width, generator=g) * mask,
        "sum_pi_squared": torch.rand(rows, width, generator=g) * mask,
        "reward_baselines": torch.rand(rows, generator=g),
        "index": [f"p{row // 8}" for row in range(rows)],
        "accuracy": rewards.sum(-1).numpy(),
        "format": torch.rand(rows, generator=g).numpy(),
    }


# ---- loops over tokens ------------------------------------------------------------------------


def gae_loop(batch: Columns, rows: int, as_floats: bool) -> list:
    """Advantages before whitening, row by row and token by token."""
    names = ("token_level_rewards", "values", "response_mask")
    r, v, m = (batch[name][:rows].tolist() if as_floats else batch[name][:rows] for name in names)
    width, advantages = len(r[0]), []
    for i in range(rows):
        row, after, next_value = [0.0] * width, 0.0, 0.0
        for t in range(width - 1, -1, -1):
            if m[i][t]:
                after = r[i][t] + GAMMA * next_value - v[i][t] + GAMMA * LAM * after
                row[t], next_value = after, v[i][t]
        advantages.append(row)
    return advantages


# ---- loops over samples -----------------------------------------------------------------------


def by_group(batch: Columns, rewards: Tensor) -> dict[str, list[Tensor]]:
    groups = defaultdict(list)
    for i in range(len(rewards)):
        groups[batch["index"][i]].append(rewards[i])
    return groups


def grpo_scores(batch: Columns, rewards: Tensor, by_std: bool = True) -> Tensor:
    mean, std = {}, {}
    for group, members in by_group(batch, rewards).items():
        mean[group], std[group] = torch.stack(members).mean(), torch.stack(members).std()
    scores = rewards.clone()
    for i in range(len(scores)):
        group = batch["index"][i]
        scores[i] = (scores[i] - mean[group]) / (std[group] + 1e-6) if by_std else scores[i] - mean[group]
    return scores


def rloo_scores(batch: Columns, rewards: Tensor) -> Tensor:
    groups, scores = by_group(batch, rewards), rewards.clone()
    for i in range(len(scores)):
        members = groups[batch["index"][i]]
        scores[i] = scores[i] - (torch.stack(members).sum() - scores[i]) / (len(members) - 1)
    return scores


def passk_scores(batch: Columns, rewards: Tensor) -> Tensor:
    rows, scores = defaultdict(list), torch.zeros_like(rewards)
    for i in range(len(rewards)):
        rows[batch["index"][i]].append(i)
    for group, members in by_group(batch, rewards).items():
        found = torch.stack(members)
        best = found.topk(2)
        scores[rows[group][int(best.indices[0])]] = (best.values[0] - best.values[1]) / (found.std() + 1e-6)
    return scores


def opo_scores(batch: Columns, rewards: Tensor) -> Tensor:
    lengths, total, length = batch["response_mask"].sum(-1).float(), defaultdict(float), defaultdict(float)
    for i in range(len(rewards)):
        total[batch["index"][i]] += rewards[i] * lengths[i]
        length[batch["index"][i]] += lengths[i]
    scores = rewards.clone()
    for i in range(len(scores)):
        scores[i] = scores[i] - total[batch["index"][i]] / length[batch["index"][i]]
    return scores


def gpg_scores(batch: Columns, rewards: Tensor) -> Tensor:
    return grpo_scores(batch, rewards, by_std=False) * len(rewards) / rewards.count_nonzero()


def maxrl_scores(batch: Columns, rewards: Tensor) -> Tensor:
    mean = {group: torch.stack(members).mean() for group, members in by_group(batch, rewards).items()}
    scores = torch.zeros_like(rewards)
    for i in range(len(scores)):
        group = batch["index"][i]
        if mean[group] > 0:
            scores[i] = (rewards[i] - mean[group]) / mean[group]
    return scores


def broadcast(scores: Tensor, batch: Columns) -> tuple[Tensor, Tensor]:
    advantages = scores.unsqueeze(-1) * batch["response_mask"]
    return advantages, advantages.clone()


def outcome(score: Callable[[Columns, Tensor], Tensor]) -> Callable[[Columns], Tensor]:
    return lambda batch: broadcast(score(batch, batch["token_level_rewards"].sum(-1)), batch)[0]


def gdpo_loop(batch: Columns) -> Tensor:
    scores = sum(grpo_scores(batch, torch.as_tensor(batch[key])) for key in SETTINGS["gdpo_reward_keys"])
    return masked_whiten(broadcast(scores, batch)[0], batch["response_mask"])


def baseline_loop(batch: Columns) -> Tensor:
    scores = grpo_scores(batch, batch["token_level_rewards"].sum(-1), by_std=False)
    return masked_whiten(broadcast(scores, batch)[0], batch["response_mask"])


def per_turn_loop(batch: Columns) -> Tensor:
    """One turn per response, as here: the runs of ones are found row by row."""
    rewards = []
    for i in range(len(batch["index"])):
        chosen = batch["response_mask"][i].bool()
        assert int((chosen[1:] & ~chosen[:-1]).sum()) == 0
        rewards.append(batch["token_level_rewards"][i][chosen].sum())
    return broadcast(grpo_scores(batch, torch.stack(rewards)), batch)[0]


def token_baseline_loop(batch: Columns) -> Tensor:
    """Every row by itself, its sums added up per group."""
    mask, returns, weights = batch["response_mask"], [], []
    above, below, reach = defaultdict(float), defaultdict(float), defaultdict(int)
    for i in range(len(batch["index"])):
        group = batch["index"][i]
        returns.append((batch["token_level_rewards"][i] * mask[i]).flip(0).cumsum(0).flip(0) * mask[i])
        gradient = 1 - 2 * batch["old_log_probs"][i].exp() + batch["sum_pi_squared"][i]
        weights.append((gradient * mask[i]).double().cumsum(0) * mask[i])
        above[group], below[group] = above[group] + returns[i] * weights[i], below[group] + weights[i]
        reach[group] = reach[group] + mask[i]
    rows = []
    for i in range(len(batch["index"])):
        group = batch["index"][i]
        baseline = torch.where(reach[group] > 1, above[group] / (below[group] + 1e-8), 0.0)
        rows.append(((returns[i] - baseline) * mask[i]).float())
    return torch.stack(rows)


SAMPLE_LOOPS: dict[str, Callable[[Columns], Tensor]] = {
    "grpo": outcome(grpo_scores),
    "rloo": outcome(rloo_scores),
    "grpo_passk": outcome(passk_scores),
    "opo": outcome(opo_scores),
    "gpg": outcome(gpg_scores),
    "maxrl": outcome(maxrl_scores),
    "gdpo": gdpo_loop,
    "reinforce_plus_plus_baseline": baseline_loop,
    "grpo_per_turn": per_turn_loop,
    "optimal_token_baseline": token_baseline_loop,
    "tir_optimal_token_baseline": token_baseline_loop,
}


# ---- measuring --------------------------------------------------------------------------------


CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter


def milliseconds(call: Callable[[], object], repeats: int) -> float:
    """Least time of a call, after one that warms up: the one that other processes disturbed least."""
    call()
    times = []
    for _ in range(repeats):
        start = clock()
        call()
        times.append(clock() - start)
    return 1000 * min(times)


def measure_gae(batch: Columns, repeats: int) -> list[str]:
    rows = len(batch["index"])
    advantages, returns = compute_advantages("gae", batch, SETTINGS)
    expected = torch.tensor(gae_loop(batch, 8, as_floats=True))
    torch.testing.assert_close(returns[:8] - batch["values"][:8], expected, rtol=1e-4, atol=1e-4)
    assert advantages.shape == returns.shape
    ours = milliseconds(lambda: compute_advantages("gae", batch, SETTINGS), repeats)
    lines = []
    for kind, part in (("floats", 64), ("tensor elements", 2)):
        loop = milliseconds(lambda part=part, kind=kind: gae_loop(batch, part, kind == "floats"), 3) * rows / part
        lines.append(f"| gae | {ours:.1f} | tokens, {kind} ({part} rows, scaled) | {loop:.0f} | {loop / ours:.1f} |")
    return lines


def measure_groups(batch: Columns, repeats: int) -> list[str]:
    lines = []
    for name, loop in SAMPLE_LOOPS.items():
        columns = batch if adv_needs(name).wants_all else {k: v for k, v in batch.items() if k not in SETTINGS}
        found = compute_advantages(name, columns, SETTINGS)[0]
        torch.testing.assert_close(found, loop(batch), rtol=1e-3, atol=1e-3)
        ours = milliseconds(lambda name=name: compute_advantages(name, batch, SETTINGS), repeats)
        slow = milliseconds(lambda loop=loop: loop(batch), max(repeats // 3, 1))
        lines.append(f"| {name} | {ours:.1f} | samples | {slow:.0f} | {slow / ours:.1f} |")
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag, default in (("--rows", 1024), ("--width", 1024), ("--threads", 2), ("--repeats", 9)):
        parser.add_argument(flag, type=int, default=default)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    global clock
    clock = CLOCKS[options.clock]
    torch.set_num_threads(options.threads)
    batch = make_batch(options.rows, options.width)
    print(
        f"[{options.rows}, {options.width}], {options.threads} threads, {options.clock} time, "
        f"torch {torch.__version__}\n"
    )
    print("| estimator | ms | loop over | its ms | times faster |\n|---|---|---|---|---|")
    print("\n".join([*measure_gae(batch, options.repeats), *measure_groups(batch, options.repeats)]))
    same = {name for name in estimator_names() for known in SAMPLE_LOOPS if is_same(name, known)}
    if rest := sorted(set(estimator_names()) - same - {"gae"}):
        print(f"\nnot measured (no groups, or your own): {', '.join(rest)}")


def is_same(name: str, other: str) -> bool:
    return get_adv_estimator_fn(name) is get_adv_estimator_fn(other)


if __name__ == "__main__":
    main()
