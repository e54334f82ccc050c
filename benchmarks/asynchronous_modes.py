"""Whole steps of the modes of asynchronous training, by turns in one run, on the same number of samples.

    python -m benchmarks.asynchronous_modes --work tools [--modes sync colocate lag separate] [--rounds 3]
    python -m benchmarks.asynchronous_modes --work lengths --modes sync separate lag

Each run is the public command with a tiny model. ``tools``: agents whose one tool takes a log-normal time (median
0.25 s, sigma 1.2, so one of a hundred takes over 4 s), drawn from the name of the sample. ``lengths``: single turns
whose lengths are log-normal, because the agent asks for so many tokens.

sync      the step samples, waits for the last response, and trains
colocate  ``trainer.v1.trainer_mode=colocate_async``: stragglers go on in the next step
lag       ``trainer.async.lag=1`` on two pools (``hybrid_engine=false``): sampling beside training, each batch of one
          version of the weights
separate  ``trainer.v1.trainer_mode=separate_async``: two pools, no waiting for stragglers

The time of a run is that between the ends of step 2 and of the last step, as its log has it.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks import shape
from verl.testing.models import tiny_model_dir

AGENT = """
import asyncio
import hashlib
import math
import statistics

from verl.agents.loop import AgentLoopBase, AgentLoopMetrics, AgentLoopOutput


def log_normal(name, median, sigma):
    share = (int.from_bytes(hashlib.blake2b(name.encode(), digest_size=6).digest(), "big") + 0.5) / 2**48
    return median * math.exp(sigma * statistics.NormalDist().inv_cdf(share))


class Worker(AgentLoopBase):
    def __init__(self, *args, work, **kwargs):
        super().__init__(*args, **kwargs)
        self.work = work

    async def run(self, sampling_params, **kwargs):
        prompt = kwargs["raw_prompt_ids"]
        name = f"{self.server_manager.sample.uid}/{self.server_manager.sample.sample_index}"
        first = {**sampling_params}
        if self.work == "lengths":
            first["max_tokens"] = min(self.rollout_config.response_length, 1 + int(log_normal(name, 12, 1.0)))
        drawn = await self.server_manager.generate("turn", prompt_ids=prompt, sampling_params=first)
        if self.work == "tools":
            await asyncio.sleep(log_normal(name, 0.25, 1.2))
        tokens = list(drawn.token_ids)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=tokens, response_mask=[1] * len(tokens),
                               response_logprobs=drawn.log_probs, num_turns=2, metrics=AgentLoopMetrics())
"""
REWARD = "def compute_score(solution_str, **others):\n    return len(set(solution_str)) / 64\n"
TWO_POOLS = {
    "actor_rollout_ref.hybrid_engine": "false",
    "actor_rollout_ref.rollout.nnodes": 1,
    "actor_rollout_ref.rollout.n_gpus_per_node": 1,
}
MODES: dict[str, dict[str, object]] = {
    "sync": {},
    "colocate": {"trainer.v1.trainer_mode": "colocate_async", "trainer.v1.colocate_async.num_warmup_batches": 1},
    "lag": {"trainer.async.lag": 1, **TWO_POOLS},
    "separate": {
        "trainer.v1.trainer_mode": "separate_async",
        "trainer.v1.separate_async.num_warmup_batches": 1,
        "trainer.v1.separate_async.parameter_sync_step": 1,
        **TWO_POOLS,
    },
}


def prepare(folder: Path, work: str) -> None:
    """Write model, prompts, reward function and agent loop."""
    tiny_model_dir(folder / "model", family="qwen3")
    rows = [
        {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"say {index}"}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": index},
        }
        for index in range(4096)
    ]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "reward.py").write_text(REWARD)
    (folder / "agents.py").write_text(AGENT)
    (folder / "agents.yaml").write_text(
        f"- {{name: worker, _target_: Worker, path: {folder}/agents.py, work: {work}}}\n"
    )


def command(folder: Path, mode: str, arguments: argparse.Namespace) -> list[str]:
    """The command line of one run."""
    settings: dict[str, object] = {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": folder / "train.jsonl",
        "data.val_files": folder / "train.jsonl",
        "data.train_batch_size": arguments.prompts,
        "data.max_prompt_length": 32,
        "data.max_response_length": 128 if arguments.work == "lengths" else 16,
        "data.dataloader_num_workers": 0,
        "actor_rollout_ref.model.path": folder / "model",
        "actor_rollout_ref.actor.ppo_mini_batch_size": arguments.prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": "true",
        "actor_rollout_ref.actor.ppo_epochs": arguments.epochs,
        "actor_rollout_ref.actor.fsdp_config.dtype": "float32",
        "actor_rollout_ref.rollout.name": "native",
        "actor_rollout_ref.rollout.dtype": "float32",
        "actor_rollout_ref.rollout.ignore_eos": "true",
        "actor_rollout_ref.rollout.n": 4,
        "actor_rollout_ref.rollout.agent.agent_loop_config_path": folder / "agents.yaml",
        "actor_rollout_ref.rollout.agent.default_agent_loop": "worker",
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "custom_reward_function.path": folder / "reward.py",
        "trainer.controller": arguments.controller if mode in ("sync", "colocate") else "ray",
        "trainer.device": "cpu",
        "trainer.logger": "[file]",
        "trainer.n_gpus_per_node": 1,
        "trainer.total_training_steps": arguments.steps,
        "trainer.save_freq": -1,
        "trainer.test_freq": -1,
        "trainer.val_before_train": "false",
        "trainer.resume_mode": "disable",
        "trainer.default_local_dir": folder / mode,
        **MODES[mode],
    }
    return [sys.executable, "-m", "verl.trainer.main_ppo", *(f"{key}={value}" for key, value in settings.items())]


def seconds_per_step(folder: Path, mode: str, arguments: argparse.Namespace) -> float:
    """Run once; the mean time of the steps after the second."""
    log = folder / f"{mode}.jsonl"
    log.unlink(missing_ok=True)
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(log), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        command(folder, mode, arguments), env=environment, cwd=shape.ROOT, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise SystemExit(f"{mode} failed:\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")
    steps = {record["step"]: record["data"] for record in map(json.loads, log.read_text().splitlines())}
    return statistics.mean(steps[step]["timing_s/step"] for step in range(3, arguments.steps + 1))


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", choices=("tools", "lengths"), default="tools")
    parser.add_argument("--modes", nargs="+", choices=tuple(MODES), default=list(MODES))
    parser.add_argument("--controller", choices=("local", "ray"), default="ray", help="of sync and colocate")
    parser.add_argument("--prompts", type=int, default=8, help="prompts of a step, each with 4 samples")
    parser.add_argument("--epochs", type=int, default=1, help="ppo_epochs, to make training as long as sampling")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="where the result goes")
    arguments = parser.parse_args()
    times: dict[str, list[float]] = {mode: [] for mode in arguments.modes}
    with tempfile.TemporaryDirectory() as name:
        prepare(Path(name), arguments.work)
        for _ in range(arguments.rounds):
            for mode in arguments.modes:
                times[mode].append(seconds_per_step(Path(name), mode, arguments))
    base = statistics.median(times[arguments.modes[0]])
    for mode, seconds in times.items():
        ratio = base / statistics.median(seconds)
        print(
            f"{mode:9} {statistics.median(seconds):6.2f} s per step  {ratio:5.2f} x  {[round(s, 2) for s in seconds]}"
        )
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(vars(arguments) | {"seconds": times}, indent=1) + "\n")


if __name__ == "__main__":
    main()
