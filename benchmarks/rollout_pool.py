"""Whole GRPO runs whose rollout engines share the ranks of the policy, or have a rank of their own.

Runs of a few steps take turns in one Ray session, so that they see the same machine. All have two ranks of one thread:
both train and sample (``shared``), or one trains and one samples, in turns (``pool``, lag 0) or at once (lag 1). What
counts is the time of a step, from its begin to its end, without the first two of each run: a run with a lag samples
more in the first one. Each row is the median over all other steps of all rounds, and the ratio is that of ``shared`` or
of the pool with lag 0. With ``--reward_s`` the reward function takes so long for each response, in its process, as
programs in a sandbox do. ::

    python -m benchmarks.rollout_pool [--rounds 3] [--steps 6] [--reward_s 0.2] [--json rollout_pool.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import ray

from benchmarks.shape import Work, machine
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

WARM_UP = 2
"""Steps of each run that do not count; the last one of a run with a lag samples nothing and does not count either."""
SHARED = {"trainer.n_gpus_per_node": 2}
POOL = {
    "trainer.n_gpus_per_node": 1,
    "actor_rollout_ref.hybrid_engine": "false",
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
}
RUNS = {
    "shared, lag 0": SHARED | {"trainer.async.lag": 0},
    "pool, lag 0": POOL | {"trainer.async.lag": 0},
    "shared, lag 1": SHARED | {"trainer.async.lag": 1},
    "pool, lag 1": POOL | {"trainer.async.lag": 1},
}
REWARD = """
import time

def compute_score(solution_str, **others):
    time.sleep({seconds})
    return len(set(solution_str)) / 64
"""


def settings(folder: Path, work: Work, steps: int, reward_s: float) -> dict[str, object]:
    """What all runs have; writes model, data and reward function."""
    texts = [f"{'abcdefghij' * 3}{i}"[-work.prompt_length :] for i in range(work.prompts * steps)]
    rows = [{"data_source": "own", "prompt": text, "reward_model": {"ground_truth": ""}} for text in texts]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD.format(seconds=reward_s))
    actor, rollout = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.jsonl",
        "data.val_files": folder / "train.jsonl",
        "data.train_batch_size": work.prompts,
        "data.max_prompt_length": 2 * work.prompt_length,
        "data.max_response_length": work.response_length,
        "actor_rollout_ref.model.path": work.save_model(folder / "model"),
        f"{actor}.ppo_mini_batch_size": work.prompts // 2,
        f"{actor}.use_dynamic_bsz": "true",
        f"{rollout}.name": "native",
        f"{rollout}.n": work.samples,
        f"{rollout}.ignore_eos": "true",
        "custom_reward_function.path": folder / "reward.py",
        "trainer.device": "cpu",
        "trainer.total_training_steps": steps,
        "trainer.val_before_train": "false",
        "trainer.save_freq": -1,
        "trainer.logger": "[file]",
        "trainer.recovery.snapshot_freq": 0,
        "trainer.progress": "off",
    }


def step_seconds(log: Path, common: dict[str, object], of_run: dict[str, object]) -> list[dict[str, float]]:
    """Train once; the times of the stages of the steps that count."""
    log.unlink(missing_ok=True)
    os.environ["VERL_FILE_LOGGER_PATH"] = str(log)
    run_ppo(compose([f"{key}={value}" for key, value in (common | of_run).items()]))
    records = [json.loads(line) for line in log.read_text().splitlines()]
    steps = [record["data"] for record in records][WARM_UP:-1]
    return [{key: value for key, value in step.items() if key.startswith("timing_s/")} for step in steps]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--reward_s", type=float, default=0.0, help="seconds of the reward function per response")
    parser.add_argument("--json")
    args = parser.parse_args()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="ERROR")
    work = Work(prompts=4, samples=4, response_length=256)
    seconds: dict[str, list[dict[str, float]]] = {name: [] for name in RUNS}
    with tempfile.TemporaryDirectory() as folder:
        common = settings(Path(folder), work, args.steps, args.reward_s)
        for round_index in range(args.rounds):
            for name in RUNS if round_index % 2 == 0 else reversed(RUNS):
                seconds[name] += step_seconds(Path(folder) / "log.jsonl", common, RUNS[name])
    print(f"{work.describe()}; reward {args.reward_s:g} s per response; {os.cpu_count()} cores")
    medians = {name: statistics.median(step["timing_s/step"] for step in steps) for name, steps in seconds.items()}
    print(f"{'':16}{'step s':>8}{'gen s':>8}{'wait s':>8}{'of shared, lag 0':>18}{'of pool, lag 0':>16}")
    for name, median in medians.items():
        gen, wait = (
            statistics.median(step.get(f"timing_s/{stage}", 0.0) for step in seconds[name])
            for stage in ("gen", "wait_prev_gen")
        )
        ratios = f"{medians['shared, lag 0'] / median:17.2f}x{medians['pool, lag 0'] / median:15.2f}x"
        print(f"{name:16}{median:8.2f}{gen:8.2f}{wait:8.2f}{ratios}")
    if args.json:
        found = {"machine": machine(), "work": work.describe(), "reward_s": args.reward_s, "seconds": seconds}
        Path(args.json).write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
