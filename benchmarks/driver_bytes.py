"""How many bytes pass through the driver in a step, against tokens: columns as values, and as references.

The driver is the real one, with Ray and two ranks; the ranks are stand-ins without a model (``benchmarks/standin.py``),
whose columns have the shapes and dtypes of real ones. GRPO with a KL loss: responses are generated, scored by a
function, and get old and reference log-probs and one update of two mini-batches. ::

    python -m benchmarks.driver_bytes [--lengths 512 2048 8192] [--by_column]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
import numpy as np

from benchmarks.standin import StandInRunner
from verl.protocol import DataProto, stored, tensor_columns
from verl.single_controller.base.dispatch import BatchPart
from verl.single_controller.base.worker_group import Call
from verl.single_controller.ray import RayWorkerGroup
from verl.testing.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo
from verl.trainer.ppo.ray_trainer import RayPPOTrainer

STEPS = 2
PROMPTS, SAMPLES = 16, 4
VALUE, REFERENCE = "sent as values", "sent as references"
READ = "read by the driver"
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7 / 7\n"
)


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
        return functools.partial(RayPPOTrainer, ray_worker_group_cls=CountingGroup)


def count_reads() -> None:
    """Count the columns that the driver copies into memory of its own."""
    gathered = stored.StoredColumn._gathered

    def counted(self: stored.StoredColumn) -> Any:
        CountingGroup.bytes[READ, "", ""] += self.nbytes
        return gathered(self)

    stored.StoredColumn._gathered = counted


def measured(folder: Path, length: int, least_bytes: int) -> Counter[tuple[str, str, str]]:
    """Bytes of one step with responses of at most ``length`` tokens; columns below ``least_bytes`` travel as values."""
    tensor_columns.LEAST_BYTES = least_bytes
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
    lines = ["| columns | tokens of a response | sent as values | sent as references | bytes as values per token |"]
    lines.append("|---|---|---|---|---|")
    for name, least in (("values", 2**62), ("references", stored.LEAST_BYTES)):
        for length in args.lengths:
            with tempfile.TemporaryDirectory() as folder:
                (Path(folder) / "reward.py").write_text(REWARD)
                os.environ["VERL_FILE_LOGGER_PATH"] = f"{folder}/metrics.jsonl"
                counts = measured(Path(folder), length, least)
            total = {kind: sum(size for key, size in counts.items() if key[0] == kind) for kind in (VALUE, REFERENCE)}
            tokens = PROMPTS * SAMPLES * length
            found[f"{name} {length}"] = total | {"tokens": tokens, READ: counts[READ, "", ""]}
            lines.append(
                f"| {name} | {length} | {total[VALUE] / 1e6:.1f} MB | {total[REFERENCE] / 1e6:.1f} MB "
                f"| {total[VALUE] / tokens:.1f} |"
            )
            if args.by_column:
                lines += [f"{size / tokens:8.2f} per token: {key}" for key, size in sorted(counts.items())]
    print("\n".join(["", *lines]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
