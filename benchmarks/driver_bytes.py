"""How many bytes pass through the driver in a step, against tokens: columns as values, and as references.

The driver is the real one, with Ray and two ranks; the ranks are stand-ins without a model (``benchmarks/standin.py``),
whose columns have the shapes and dtypes of real ones. GRPO with a KL loss: responses are generated, scored by a
function, and get old and reference log-probs and one update of two mini-batches. The responses of agent loops are
conversations of two turns with a tool's answer between them. Read is what the driver copies out of the object store,
here for scores and metrics; told is what the processes of agent loops tell it of their conversations. ::

    python -m benchmarks.driver_bytes [--lengths 512 2048 8192] [--by_column]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np

from benchmarks.standin import StandInRunner
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.ray import RayAgents
from verl.protocol import DataProto, stored, tensor_columns
from verl.single_controller.base.dispatch import BatchPart
from verl.single_controller.base.worker_group import Call
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.trainer import PPOTrainer

STEPS = 2
PROMPTS, SAMPLES = 16, 4
VALUE, REFERENCE = "sent as values", "sent as references"
READ, TOLD = "read by the driver", "told by agent loops"
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7 / 7\n"
)
AGENT = """
from verl.agents.loop import AgentLoopBase, AgentLoopOutput

class TwoTurns(AgentLoopBase):
    async def run(self, sampling_params, **row):
        prompt, half = row["raw_prompt_ids"], self.rollout_config.response_length // 2
        settings = {**sampling_params, "max_tokens": half - 4}
        tool = [7] * 8
        first = (await self.server_manager.generate("a", prompt_ids=prompt, sampling_params=settings)).token_ids
        so_far = prompt + first + tool
        second = (await self.server_manager.generate("a", prompt_ids=so_far, sampling_params=settings)).token_ids
        mask = [1] * len(first) + [0] * len(tool) + [1] * len(second)
        return AgentLoopOutput(prompt_ids=prompt, response_ids=first + tool + second, response_mask=mask)
"""


class CountingGroup(RayWorkerGroup):
    """Counts the bytes of columns in the calls of the driver."""

    bytes: ClassVar[Counter[tuple[str, str, str]]] = Counter()

    def _start(self, method: str, calls: Sequence[Call]) -> Any:
        for value in (value for call in calls for value in (*call.args, *call.kwargs.values())):
            rows = value.rows if isinstance(value, BatchPart) else value
            if isinstance(rows, DataProto):
                with stored.by_reference():
                    columns = rows._tensor_columns.wire()[1]
                for name, column in columns.items():
                    is_stored = isinstance(column, stored.StoredColumn)
                    size = column.nbytes if is_stored else sum(part.nbytes for part in _pieces(column[2]))
                    self.bytes[REFERENCE if is_stored else VALUE, method, name] += size
        return super()._start(method, calls)


def _pieces(data: Any) -> list[np.ndarray]:
    return [data] if isinstance(data, np.ndarray) else data


class CountingRunner(StandInRunner):
    """A run of stand-ins whose driver counts."""

    def trainer_class(self) -> Any:
        return functools.partial(PPOTrainer, ray_worker_group_cls=CountingGroup)


def count_reads() -> None:
    """Count the columns that the driver copies into memory of its own, and what agent loops tell it."""
    gathered, run = stored.StoredColumn._gathered, RayAgents.run

    def counted(self: stored.StoredColumn) -> Any:
        CountingGroup.bytes[READ, "", self.origin.names[0]] += self.nbytes
        return gathered(self)

    async def counted_run(self: RayAgents, *args: Any) -> Any:
        results, columns = await run(self, *args)
        CountingGroup.bytes[TOLD, "", ""] += len(pickle.dumps(results))
        return results, columns

    stored.StoredColumn._gathered, RayAgents.run = counted, counted_run


def measured(folder: Path, length: int, least_bytes: int, agents: bool) -> Counter[tuple[str, str, str]]:
    """Bytes of one step with responses of at most ``length`` tokens; columns below ``least_bytes`` travel as values."""
    (folder / "reward.py").write_text(REWARD)
    (folder / "agent.py").write_text(AGENT)
    (folder / "agents.yaml").write_text(f"- {{name: two_turns, _target_: TwoTurns, path: {folder}/agent.py}}\n")
    tensor_columns.MIN_BYTES = least_bytes
    CountingGroup.bytes.clear()
    settings = {
        "data__train_batch_size": PROMPTS,
        "data__max_response_length": length,
        "actor_rollout_ref__actor__ppo_mini_batch_size": PROMPTS // 2,
        "actor_rollout_ref__actor__use_kl_loss": "true",
        "actor_rollout_ref__rollout__n": SAMPLES,
        "custom_reward_function__path": folder / "reward.py",
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
        "trainer__total_training_steps": STEPS,
        "trainer__recovery__snapshot_freq": 0,
    }
    if agents:
        agent = "actor_rollout_ref__rollout__agent__"
        settings |= {
            f"{agent}agent_loop_config_path": folder / "agents.yaml",
            f"{agent}default_agent_loop": "two_turns",
            f"{agent}num_workers": 2,
        }
    run_ppo(compose(overrides(make_tiny_run(folder, prompts=64), folder, **settings)), CountingRunner)
    return Counter({key: size // STEPS for key, size in CountingGroup.bytes.items()})


def main() -> None:
    """Print a table, and with ``--by_column`` what travelled as values."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 2048, 8192], help="tokens of a response")
    parser.add_argument("--by_column", action="store_true", help="list what travelled as values")
    parser.add_argument("--json", type=Path, help="write the counts there")
    args = parser.parse_args()
    count_reads()
    found: dict[str, dict[str, int]] = {}
    lines = ["| responses of | columns travel as | tokens of a response | sent as values | sent as references "]
    lines[0] += "| read by the driver | told by agent loops | values per token |"
    lines.append("|---" * 8 + "|")
    kinds = ("one turn", "values", 2**62), ("one turn", "references", stored.MIN_BYTES)
    for source, name, least in (*kinds, ("agent loops", "references", stored.MIN_BYTES)):
        for length in args.lengths:
            with tempfile.TemporaryDirectory() as folder:
                os.environ["VERL_FILE_LOGGER_PATH"] = f"{folder}/metrics.jsonl"
                counts = measured(Path(folder), length, least, source == "agent loops")
            kinds_of = (VALUE, REFERENCE, READ, TOLD)
            total = {kind: sum(size for key, size in counts.items() if key[0] == kind) for kind in kinds_of}
            tokens = PROMPTS * SAMPLES * length
            found[f"{source} {name} {length}"] = total | {"tokens": tokens}
            cells = " | ".join(f"{size / 1e6:.2f} MB" if size else "" for size in total.values())
            per_token = (total[VALUE] + total[TOLD]) / tokens
            lines.append(f"| {source} | {name} | {length} | {cells} | {per_token:.1f} |")
            if args.by_column:
                lines += [f"{size / tokens:8.2f} per token: {key}" for key, size in sorted(counts.items())]
    print("\n".join(["", *lines]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
