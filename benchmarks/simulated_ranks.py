"""What the driver of 64, 256 and 1,024 ranks has to do in a step: seconds, bytes, memory.

The driver is the real one, in this process; its ranks are stand-ins without a model (``benchmarks/standin.py``) in the
same process, one after the other. Calls and results are pickled as for Ray's object store, and the time that stand-ins
take is not the driver's. How long real ranks would take is said by a cost model: a policy of ``--parameters``, each
token generated at ``--tokens_per_s`` per rank, trained at ``--flops`` per second and rank (6 FLOPs per parameter and
token, 2 without gradients). GRPO with a KL loss, 8 responses per rank. ::

    python -m benchmarks.simulated_ranks [--ranks 64 256 1024] [--response 1024] [--lag 1] [--json simulated.json]
"""

from __future__ import annotations

import argparse
import functools
import itertools
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

os.environ.setdefault("OMP_NUM_THREADS", "1")
import ray
import torch

from benchmarks.standin import StandInRunner
from tests.support.tiny_run import make_tiny_run, overrides
from verl.protocol import DataProto, stored
from verl.single_controller.base.dispatch import PendingOutputs
from verl.single_controller.base.resource_pool import PoolManager, ResourcePool
from verl.single_controller.base.worker_group import Call, WorkerGroup
from verl.single_controller.ray.session import prepare_for_batches
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.trainer.ppo.trainer import PPOTrainer

STEPS = 3
SAMPLES = 8
REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n    return len(solution_str) % 7 / 7\n"
)

Sent = tuple[bytes, list[memoryview]]


def packed(value: Any) -> Sent:
    """Pickle as Ray does: large buffers beside the pickle, copied once."""
    buffers: list[pickle.PickleBuffer] = []
    with stored.by_reference():
        message = pickle.dumps(value, protocol=5, buffer_callback=buffers.append)
    return message, [memoryview(bytes(buffer.raw())) for buffer in buffers]


def unpacked(sent: Sent) -> Any:
    """Invert :func:`packed`; arrays lie in read-only memory."""
    return pickle.loads(sent[0], buffers=sent[1])


def size_of(sent: Sent) -> int:
    """Bytes of a pickle and its buffers."""
    return len(sent[0]) + sum(buffer.nbytes for buffer in sent[1])


def page_faults() -> int:
    """Pages that the kernel has mapped for this thread."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


class Store:
    """Results of calls, for those who fetch them by number."""

    objects: ClassVar[dict[int, Sent]] = {}
    numbers = itertools.count()
    ends: ClassVar[deque[int]] = deque()
    """Numbers at the ends of the last steps."""
    lag: ClassVar[int] = 0
    """Steps between sampling and training."""

    @classmethod
    def values_of(cls, results: list[int]) -> list[Any]:
        """Return the results."""
        return [unpacked(cls.objects[result]) for result in results]

    @classmethod
    def forget(cls) -> None:
        """Called after each step: delete the results from which no later step has columns."""
        cls.ends.append(next(cls.numbers))
        if len(cls.ends) > cls.lag:
            end = cls.ends.popleft()
            cls.objects = {number: sent for number, sent in cls.objects.items() if number > end}


class SimulatedGroup(WorkerGroup):
    """Worker group whose ranks are objects of this process."""

    ranks_s: ClassVar[float] = 0.0
    """Seconds that the ranks took so far."""
    ranks_cpu_s: ClassVar[float] = 0.0
    """Processor time in them."""
    ranks_faults: ClassVar[int] = 0
    """Pages that the kernel mapped for them."""
    sent_bytes: ClassVar[int] = 0
    """Bytes of all arguments so far."""

    def __init__(
        self, resource_pool: Any = None, ray_cls_with_init: Any = None, device_name: str | None = None
    ) -> None:
        super().__init__(resource_pool, ray_cls_with_init)
        os.environ["WORLD_SIZE"] = str(resource_pool.world_size)
        self._workers = []
        for rank in range(resource_pool.world_size):
            os.environ["RANK"] = str(rank)
            self._workers.append(ray_cls_with_init())

    def _start(self, method: str, calls: Sequence[Call]) -> PendingOutputs[Any]:
        results = []
        for call in calls:
            sent = packed((call.args, call.kwargs))
            start, used, faults = time.perf_counter(), time.thread_time(), page_faults()
            args, kwargs = unpacked(sent)
            host = self._workers[call.rank]
            worker = host if self._member is None else host.workers[self._member]
            result = next(Store.numbers)
            Store.objects[result] = packed(getattr(worker, method)(*args, **kwargs))
            results.append(result)
            SimulatedGroup.ranks_s += time.perf_counter() - start
            SimulatedGroup.ranks_cpu_s += time.thread_time() - used
            SimulatedGroup.ranks_faults += page_faults() - faults
            SimulatedGroup.sent_bytes += size_of(sent)
        return PendingOutputs(results, method, [call.rank for call in calls])

    def wait_for(self, outputs: PendingOutputs[Any]) -> list[Any]:
        values = Store.values_of(list(outputs))
        for value, result in zip(values, outputs, strict=True):
            if isinstance(value, DataProto):
                value.remember(result)
        return values

    @property
    def workers(self) -> list[Any]:
        return self._workers

    @property
    def worker_names(self) -> list[str]:
        return [str(rank) for rank in range(len(self._workers))]

    @property
    def master_address(self) -> str:
        return "localhost"

    @property
    def master_port(self) -> str:
        return "0"

    def start_worker_aliveness_check(self, every_n_seconds: float = 1) -> None: ...

    def guard(self, hang_timeout_s: float | None = None) -> None: ...

    def shutdown(self) -> None:
        self._workers.clear()


class SimulatedPools(PoolManager):
    """Pools of any size, which take nothing."""

    pool_cls = ResourcePool


class MeasuredTrainer(PPOTrainer):
    """Measures each step."""

    steps: ClassVar[list[dict[str, float]]] = []

    def step(self, context: Any) -> DataProto:
        before = time.perf_counter(), SimulatedGroup.ranks_s, SimulatedGroup.sent_bytes
        used = time.thread_time() - SimulatedGroup.ranks_cpu_s, page_faults() - SimulatedGroup.ranks_faults
        batch = super().step(context)
        seconds = time.perf_counter() - before[0]
        ranks_s = SimulatedGroup.ranks_s - before[1]
        reward_s = context.seconds.get("reward", 0.0)  # the last steps of a lag sample nothing
        self.steps.append(
            {
                "driver_s": seconds - ranks_s - reward_s,
                "cpu_s": time.thread_time() - SimulatedGroup.ranks_cpu_s - used[0],
                "faults": page_faults() - SimulatedGroup.ranks_faults - used[1],
                "reward_s": reward_s,
                "sent_bytes": SimulatedGroup.sent_bytes - before[2],
                "tokens": int(batch.batch["attention_mask"].sum()),
                "responses": int(batch.batch["response_mask"].sum()),
            }
        )
        Store.forget()
        return batch


class SimulatedRunner(StandInRunner):
    """A run of the real driver over simulated ranks."""

    def trainer_class(self) -> Any:
        return functools.partial(MeasuredTrainer, ray_worker_group_cls=SimulatedGroup)

    def init_resource_pool_mgr(self, config: Any) -> Any:
        return SimulatedPools({"global_pool": [config.trainer.n_gpus_per_node]}, self.mapping, "cpu")


def one_size(ranks: int, response: int, lag: int) -> dict[str, float]:
    """Means over all steps but the first, which imports and starts the processes of the reward function.

    With a lag the first step also samples the batches of later ones, and the last ``lag`` steps, which sample nothing,
    are left out.
    """
    ray.get = Store.values_of  # of a stored column that is read (verl/protocol/stored.py)
    Store.lag = lag
    prepare_for_batches()  # as a Ray session does
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "reward.py").write_text(REWARD)
        os.environ["VERL_FILE_LOGGER_PATH"] = f"{folder}/metrics.jsonl"
        settings = {
            "data__train_batch_size": ranks,
            "data__max_response_length": response,
            "actor_rollout_ref__actor__ppo_mini_batch_size": ranks // 2,
            "actor_rollout_ref__actor__use_kl_loss": "true",
            "actor_rollout_ref__rollout__n": SAMPLES,
            "custom_reward_function__path": folder / "reward.py",
            "trainer__controller": "ray",
            "trainer__n_gpus_per_node": ranks,
            "trainer__total_training_steps": STEPS + lag,
            "trainer__async__lag": lag,
            "trainer__recovery__snapshot_freq": 0,
        }
        config = load_config(
            compose(overrides(make_tiny_run(folder, prompts=ranks * (STEPS + lag)), folder, **settings))
        )
        SimulatedRunner().run(config)
    steps = MeasuredTrainer.steps[1:STEPS]
    means = {key: sum(step[key] for step in steps) / len(steps) for key in steps[0]}
    return means | {"peak_bytes": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}


def simulated_s(means: dict[str, float], ranks: int, args: argparse.Namespace) -> float:
    """Seconds of the ranks by the cost model: generation, two passes without gradients and the update."""
    generation = means["responses"] / ranks / args.tokens_per_s
    return generation + (2 + 2 + 6) * args.parameters * means["tokens"] / ranks / args.flops


def main() -> None:
    """Measure each size in a process of its own, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, nargs="+", default=[64, 256, 1024], help="numbers of ranks")
    parser.add_argument("--response", type=int, default=1024, help="tokens of the longest response")
    parser.add_argument("--lag", type=int, default=0, help="trainer.async.lag")
    parser.add_argument("--parameters", type=float, default=7e9, help="of the simulated policy")
    parser.add_argument("--flops", type=float, default=4e14, help="per second, of one simulated rank in training")
    parser.add_argument("--tokens_per_s", type=float, default=2500, help="that one simulated rank generates")
    parser.add_argument("--json", type=Path, help="write the measurements there")
    parser.add_argument("--one", action="store_true", help="measure the first size here and print JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.one:
        print(json.dumps(one_size(args.ranks[0], args.response, args.lag)))
        return
    found: dict[str, dict[str, float]] = {}
    heads = "responses | tokens | driver | CPU per rank | faults per rank | reward | sent | memory | simulated"
    lines = [f"| ranks | {heads} |", f"|{'---|' * 10}"]
    for ranks in args.ranks:
        command = [sys.executable, "-m", "benchmarks.simulated_ranks", "--one", "--response", str(args.response)]
        command += ["--lag", str(args.lag)]
        done = subprocess.run([*command, "--ranks", str(ranks)], stdout=subprocess.PIPE, text=True, check=True)
        means = found[str(ranks)] = json.loads(done.stdout.splitlines()[-1])
        cells = [
            f"{ranks} | {ranks * SAMPLES} | {means['tokens'] / 1e6:.2f} M | {means['driver_s']:.2f} s",
            f"{means['cpu_s'] / ranks * 1e3:.1f} ms | {means['faults'] / ranks:.0f} | {means['reward_s']:.2f} s",
            f"{means['sent_bytes'] / 1e6:.1f} MB | {means['peak_bytes'] / 1e9:.2f} GB",
            f"{simulated_s(means, ranks, args):.1f} s",
        ]
        lines.append(f"| {' | '.join(cells)} |")
    print("\n".join(["", *lines]))
    if args.json:
        args.json.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
