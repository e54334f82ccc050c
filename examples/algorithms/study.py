"""The quickstart's task by many algorithms and several seeds: reward against steps, and a table in Markdown.

    python examples/algorithms/study.py --output_dir outputs/algorithms

Every algorithm starts from the same warmed-up model of a seed and sees as many responses in a step;
what differs is written in ``ALGORITHMS``. Runs that are complete in the folder are not done again.

    python examples/algorithms/study.py --algorithms grpo lag_4_none lag_4_token lag_4_bypass lag_4_a3po --steps 40

compares the corrections of samples that are four updates old (``CORRECTIONS``), with none of that age as reference;

    python examples/algorithms/study.py --algorithms grpo lag_1 colocate separate fully_async lag_4_token --steps 40

the modes of asynchronous training (``MODES``) with a run that samples and trains in turns;

    python examples/algorithms/study.py --algorithms grpo int8_none int8_token fp8_none fp8_token --steps 40

engines with weights of 8 bits (``QUANTIZED``) with one that has the trainer's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from examples.quickstart.quickstart import ACCURACY, exported_model, read_metrics, run_stage
from examples.quickstart.settings import Settings, command, rl_settings, sft_settings

TASK = Path(__file__).resolve().parents[1] / "quickstart" / "make_task.py"
REWARD = "critic/score/mean"
PROMPTS, RESPONSES = 32, 8
"""Prompts of a step, and responses to each; an algorithm without groups takes as many prompts as responses."""

ACTOR = "actor_rollout_ref.actor"
GROUPS: Settings = {"actor_rollout_ref.rollout.n": RESPONSES, "data.train_batch_size": PROMPTS}
HALF: Settings = {f"{ACTOR}.ppo_mini_batch_size": PROMPTS // 2}
ALGORITHMS: dict[str, Settings] = {
    "grpo": {"algorithm.adv_estimator": "grpo"},
    "dr_grpo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.norm_adv_by_std_in_grpo": False,
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-sum-norm",
    },
    "dapo": {
        "algorithm.adv_estimator": "grpo",
        "algorithm.filter_groups.enable": True,
        "algorithm.filter_groups.metric": "seq_reward",
        f"{ACTOR}.clip_ratio_high": 0.28,
    },
    "rloo": {"algorithm.adv_estimator": "rloo"},
    "maxrl": {"algorithm.adv_estimator": "maxrl"},
    "reinforce_plus_plus": {"algorithm.adv_estimator": "reinforce_plus_plus"},
    "gspo": {
        "algorithm.adv_estimator": "grpo",
        f"{ACTOR}.policy_loss.loss_mode": "gspo",
        f"{ACTOR}.loss_agg_mode": "seq-mean-token-mean",
        f"{ACTOR}.clip_ratio_low": 3e-3,
        f"{ACTOR}.clip_ratio_high": 4e-3,
    },
    "cispo": {
        "algorithm.adv_estimator": "grpo",
        f"{ACTOR}.policy_loss.loss_mode": "cispo",
        f"{ACTOR}.clip_ratio_low": 1.0,
        f"{ACTOR}.clip_ratio_high": 4.0,
    },
    "ppo": {
        "algorithm.adv_estimator": "gae",
        "data.train_batch_size": PROMPTS * RESPONSES,
        "actor_rollout_ref.rollout.n": 1,
        f"{ACTOR}.ppo_mini_batch_size": PROMPTS * RESPONSES // 2,
    },
}

_CORRECTION, _LOSS = "algorithm.rollout_correction", f"{ACTOR}.policy_loss"
_LAG: Settings = {"algorithm.adv_estimator": "grpo", "trainer.async.lag": 4}
CORRECTIONS: dict[str, Settings] = {
    "lag_4_none": _LAG | {f"{_CORRECTION}.rollout_is": "null"},
    "lag_4_token": _LAG | {f"{_CORRECTION}.rollout_is": "token"},
    "lag_4_bypass": _LAG | {f"{_CORRECTION}.bypass_mode": True},
    "lag_4_mask": _LAG | {f"{_CORRECTION}.rollout_is": "sequence", f"{_CORRECTION}.rollout_is_threshold": "0.0_3.0"},
    "lag_4_opsm": _LAG | {f"{_CORRECTION}.rollout_is": "token", f"{_LOSS}.off_policy_mask_threshold": 0.05},
    "lag_4_vespo": _LAG | {f"{_LOSS}.loss_mode": "vespo"},
    "lag_4_m2po": _LAG | {f"{_LOSS}.loss_mode": "m2po"},
    "lag_4_topr": _LAG | {f"{_LOSS}.loss_mode": "topr"},
    "lag_4_a3po": _LAG | {f"{_CORRECTION}.prox_logp_method": "loglinear", f"{_CORRECTION}.rollout_is": "token"},
}
"""GRPO on samples of the weights four updates before, by their correction (docs/rollout_correction.md)."""
_TWO_POOLS: Settings = {
    "trainer.controller": "ray",
    "actor_rollout_ref.hybrid_engine": False,
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
    "trainer.v1.trainer_mode": "separate_async",
    "trainer.v1.separate_async.parameter_sync_step": 2,  # mini-batches of a step
}
MODES: dict[str, Settings] = {
    "lag_1": {"algorithm.adv_estimator": "grpo", "trainer.async.lag": 1},
    "lag_4": {"algorithm.adv_estimator": "grpo", "trainer.async.lag": 4},
    "colocate": {"algorithm.adv_estimator": "grpo", "trainer.v1.trainer_mode": "colocate_async"},
    "separate": {"algorithm.adv_estimator": "grpo"} | _TWO_POOLS,
    "fully_async": {"algorithm.adv_estimator": "grpo", "trainer.async.volume": 0.5, "trainer.async.sync_every": 2}
    | _TWO_POOLS,
}
"""GRPO in the modes of asynchronous training (docs/asynchronous.md), with their default correction."""
_TOKEN: Settings = {f"{_CORRECTION}.rollout_is": "token"}
QUANTIZED: dict[str, Settings] = {
    f"{format}{suffix}": {"algorithm.adv_estimator": "grpo", "actor_rollout_ref.rollout.quantization": format}
    | correction
    for format in ("int8", "fp8")
    for suffix, correction in {"_none": {}, "_token": _TOKEN}.items()
}
"""GRPO on responses of an engine whose weights have 8 bits, by their correction (docs/rollout_correction.md)."""
RUNS = ALGORITHMS | CORRECTIONS | MODES | QUANTIZED


def settings(algorithm: str, task: Path, model: Path, output: Path, seed: int, steps: int) -> Settings:
    """The run of one algorithm: the quickstart's settings, smaller steps, and what the algorithm changes."""
    base = rl_settings("ppo" if algorithm == "ppo" else "grpo", task, model, output, seed)
    symmetric = {f"{ACTOR}.clip_ratio_high": 0.2}
    shortened = {"trainer.total_training_steps": steps, "trainer.save_freq": -1, "trainer.test_freq": steps}
    return base | GROUPS | HALF | symmetric | shortened | RUNS[algorithm]


def warmed_up(seed: int, output: Path) -> tuple[Path, Path]:
    """Task and model of a seed; all algorithms share them."""
    task, sft = output / f"task-{seed}", output / f"sft-{seed}"
    if not (sft / "done").exists():
        sft.mkdir(parents=True, exist_ok=True)
        make_task = [sys.executable, str(TASK), f"--output_dir={task}", f"--seed={seed}"]
        run_stage(f"Tokenizer, tiny model, data; seed {seed}", make_task, output / f"task-{seed}.log")
        warm_up = command("verl.trainer.sft_trainer", sft_settings(task, sft, seed))
        run_stage(f"Supervised warm-up, seed {seed}", warm_up, sft / "log.txt", sft / "metrics.jsonl")
        (sft / "done").touch()
    return task, exported_model(sft / "checkpoints")


def run(algorithm: str, seed: int, steps: int, output: Path) -> list[tuple[int, dict]]:
    """The metrics of one run, step by step."""
    task, model = warmed_up(seed, output)
    folder = output / f"{algorithm}-{seed}-{steps}"
    if not (folder / "done").exists():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "metrics.jsonl").unlink(missing_ok=True)
        train = command("verl.trainer.main_ppo", settings(algorithm, task, model, folder, seed, steps))
        run_stage(f"{algorithm}, seed {seed}", train, folder / "log.txt", folder / "metrics.jsonl")
        (folder / "done").touch()
    return list(read_metrics(folder / "metrics.jsonl"))


Histories = dict[str, list[list[tuple[int, dict]]]]


def curve(history: list[tuple[int, dict]], name: str) -> dict[int, float]:
    """One metric by step."""
    return {step: metrics[name] for step, metrics in history if name in metrics}


def reward_name(algorithm: str) -> str:
    """The mean reward of what was sampled: with dynamic sampling that is more than what is trained on."""
    return "training/filter_groups/seq_reward/mean" if algorithm == "dapo" else REWARD


def table(histories: Histories) -> str:
    """One row for each algorithm, over its seeds."""
    lines = [
        "| algorithm | accuracy before | after: mean (each seed) | reward, last 5 steps | responses | seconds |",
        "|---|---|---|---|---|---|",
    ]
    for algorithm, runs in histories.items():
        accuracy = [list(curve(history, ACCURACY).values()) for history in runs]
        before, after = [a[0] for a in accuracy], [a[-1] for a in accuracy]
        reward = [statistics.mean(list(curve(h, reward_name(algorithm)).values())[-5:]) for h in runs]
        seconds = [sum(curve(history, "timing_s/step").values()) for history in runs]
        each = ", ".join(f"{100 * a:.1f}" for a in after)
        lines.append(
            f"| {algorithm} | {100 * statistics.mean(before):.1f} % | {100 * statistics.mean(after):.1f} % ({each}) "
            f"| {statistics.mean(reward):.3f} | {responses(runs[0])} | {statistics.mean(seconds):.0f} |"
        )
    return "\n".join(lines)


def responses(history: list[tuple[int, dict]]) -> str:
    """Responses that were sampled for training."""
    steps = len(curve(history, REWARD))
    batches = sum(curve(history, "training/filter_groups/num_gen_batches").values()) or steps
    return f"{int(batches) * PROMPTS * RESPONSES:,}"


def draw(histories: Histories, path: Path) -> None:
    """Mean reward of each step by algorithm: the mean over seeds, and the range."""
    columns = 3
    rows = -(-len(histories) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(11, 2.6 * rows), sharex=True, sharey=True, layout="constrained")
    means = {name: _over_seeds(runs, reward_name(name)) for name, runs in histories.items()}
    for axis, (algorithm, (steps, mean, low, high)) in zip(axes.flat, means.items(), strict=False):
        for other, (x, y, _, _) in means.items():
            if other != algorithm:
                axis.plot(x, y, color="#cccccc", linewidth=0.8)
        axis.fill_between(steps, low, high, color="#1f5f8b", alpha=0.2)
        axis.plot(steps, mean, color="#1f5f8b")
        axis.set_title(algorithm, fontsize=10)
        axis.grid(alpha=0.3)
    for axis in axes.flat[len(histories) :]:
        axis.set_visible(False)
    seeds = len(next(iter(histories.values())))
    figure.suptitle(f"Mean reward of the sampled responses by step; {seeds} seeds, range shaded, others in grey")
    figure.savefig(path, dpi=90)
    plt.close(figure)


def _over_seeds(runs: list[list[tuple[int, dict]]], name: str) -> tuple[list[int], list[float], ...]:
    curves = [curve(history, name) for history in runs]
    steps = sorted(set.intersection(*(set(c) for c in curves)))
    columns = [[c[step] for c in curves] for step in steps]
    return steps, [statistics.mean(c) for c in columns], [min(c) for c in columns], [max(c) for c in columns]


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--algorithms", nargs="+", choices=list(RUNS), default=list(ALGORITHMS))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/algorithms"))
    args = parser.parse_args(arguments)
    output = args.output_dir.resolve()
    output.mkdir(parents=True, exist_ok=True)
    histories: Histories = {name: [] for name in args.algorithms}
    for seed in args.seeds:
        for algorithm in args.algorithms:
            histories[algorithm].append(run(algorithm, seed, args.steps, output))
    (output / "table.md").write_text(table(histories) + "\n")
    (output / "settings.json").write_text(json.dumps({name: RUNS[name] for name in args.algorithms}, indent=2) + "\n")
    draw(histories, output / "reward.png")
    print(f"\n{table(histories)}\n\ntable and picture: {output}")


if __name__ == "__main__":
    main()
