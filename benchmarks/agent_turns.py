"""Turns of conversations a second on Ray, with an engine that answers at once: what the way to the engine costs.

The processes of agent loops are the real ones; the rank is a stand-in without a model (``benchmarks/standin.py``), so a
turn is the way of a request from its process to the rank, and that of the answer. Many conversations at once show how
many turns the way carries, one alone how long a turn takes. ::

    python -m benchmarks.agent_turns [--conversations 64] [--turns 20] [--rounds 5]

To compare two versions run it in both by turns.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
import ray

from benchmarks.standin import StandInWorker
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.columns import SequenceColumns
from verl.agents.policy import SampleId
from verl.agents.ray import RayAgents
from verl.agents.worker import Trajectory
from verl.single_controller.ray import RayResourcePool, RayWorkerGroup
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.rollout.request import SamplingParams

AGENT = """
from verl.agents.loop import AgentLoopBase, AgentLoopOutput

class ManyTurns(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt = row["raw_prompt_ids"]
        for _ in range(row["turns"]):
            drawn = await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=sampling_params)
        ids = drawn.token_ids
        return AgentLoopOutput(prompt_ids=prompt, response_ids=ids, response_mask=[1] * len(ids))
"""
TOKENS = 4
"""Drawn in each turn."""


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--conversations", type=int, default=64, help="at once")
    parser.add_argument("--turns", type=int, default=20, help="of each conversation")
    parser.add_argument("--workers", type=int, default=2, help="processes of agent loops")
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "agent.py").write_text(AGENT)
        (folder / "agents.yaml").write_text(f"- {{name: many, _target_: ManyTurns, path: {folder}/agent.py}}\n")
        agent = "actor_rollout_ref__rollout__agent__"
        settings = {
            f"{agent}agent_loop_config_path": folder / "agents.yaml",
            f"{agent}default_agent_loop": "many",
            f"{agent}num_workers": arguments.workers,
            "trainer__controller": "ray",
        }
        paths = make_tiny_run(folder)
        config = load_config(compose(overrides(paths, folder, **settings)))
        rollout = config.actor_rollout_ref.rollout
        ray.init(num_cpus=max(arguments.workers, 1) + 1, include_dashboard=False)
        agents = RayAgents(config, SequenceColumns(rollout, hf_tokenizer(paths["model"]), None))
        pool = RayResourcePool([1], use_gpu=False)
        describe = RayWorkerGroup.describe(StandInWorker, config.actor_rollout_ref)
        group = RayWorkerGroup(pool, describe, device_name="cpu")
        group.init_model()

        def seconds(conversations: int, turns: int) -> float:
            trajectories = [
                Trajectory(
                    agent_name="many",
                    sample=SampleId(step=1, uid=str(number), sample_index=0, prompt_ids=(5, 6)),
                    sampling=SamplingParams(max_tokens=TOKENS, seed=0),
                    row={"raw_prompt_ids": [5, 6], "turns": turns},
                )
                for number in range(conversations)
            ]
            began = time.perf_counter()
            future = agents.thread.submit(agents.run(trajectories))
            agents.serve_until(group, future.done)
            results, _ = future.result()
            assert all(result.status == "done" for result in results), results[0].message
            return time.perf_counter() - began

        seconds(arguments.workers, 1)  # starts the processes
        many, alone = [], []
        for _ in range(arguments.rounds):
            many.append(arguments.conversations * arguments.turns / seconds(arguments.conversations, arguments.turns))
            few, more = seconds(1, 1), seconds(1, 1 + 10 * arguments.turns)
            alone.append((more - few) / (10 * arguments.turns))
        print(
            f"{arguments.conversations} conversations at once: {statistics.median(many):.0f} turns/s "
            f"(best {max(many):.0f}); one alone: {1e3 * statistics.median(alone):.2f} ms a turn "
            f"(best {1e3 * min(alone):.2f})"
        )
        agents.shutdown()
        group.shutdown()
        pool.release()


if __name__ == "__main__":
    main()
