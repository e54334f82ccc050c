"""How the time of a rollout and of a training step grows: with ranks, with responses, with their length.

The model is a 4.75 M-parameter Qwen3 shape with random weights, made on the spot; the workers, the rollout and the
update are those of a run, over Ray, in fp32. Every rank has one thread, so that two ranks against one is about
scaling and not about threads. Random weights hardly ever end a response, and the end-of-sequence token is ignored
besides: every response has the full length.

A step is what a run of GRPO with a reference does with a rollout: old log-probs, reference log-probs, one update.
Linear means: half the time on two ranks; time in proportion to the responses, and to their length. The last columns
are the times over what linear growth from the first row of their part would give; up to 1 is no worse than linear.
All rows of a part take turns, and the least time of each counts.

Two ranks are also measured apart: as two runs of one rank, side by side, each with half of the work and a model of
its own. They exchange nothing, so what they miss linear by is what the machine takes for two processes at a time
(cache, memory, clock), and what two ranks of one run miss it by beyond that is what their exchange costs. ::

    python -m benchmarks.scaling [--rollout native] [--parts ranks responses length] [--json scaling.json]
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

os.environ["OMP_NUM_THREADS"] = "1"
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config, Qwen3ForCausalLM

from verl.protocol import DataProto
from verl.single_controller.ray import RayClassWithInitArgs, RayResourcePool, RayWorkerGroup, run_task
from verl.testing.models import tiny_tokenizer
from verl.workers.config import (
    ActorRolloutRefConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    RefConfig,
    RolloutConfig,
)
from verl.workers.fsdp_workers import ActorRolloutRefWorker

SHAPE = {
    "hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "intermediate_size": 768, "vocab_size": 104, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
PROMPT_LENGTH, SAMPLES = 24, 8
TOKENS_PER_MICRO_BATCH = 4096

T = TypeVar("T")


@dataclass(frozen=True)
class Work:
    """One measurement: how many ranks, responses, and tokens in each response."""

    ranks: int
    responses: int
    length: int
    groups: int = 1
    """Runs that know nothing of each other, each with its part of the ranks and of the responses."""

    @property
    def size(self) -> float:
        """What the time of one rank is in proportion to, if it is linear."""
        return self.responses * self.length / self.ranks


PARTS = {
    "ranks": [Work(1, 64, 128), Work(2, 64, 128), Work(2, 64, 128, groups=2)],
    "responses": [Work(2, 64, 32), Work(2, 512, 32)],
    "length": [Work(2, 16, 128), Work(2, 16, 1024)],
}


def make_model(folder: Path) -> str:
    """The model and a tokenizer of its size, saved."""
    torch.manual_seed(0)
    Qwen3ForCausalLM(Qwen3Config(**SHAPE)).save_pretrained(folder)
    tiny_tokenizer("char").save_pretrained(folder)
    return str(folder)


def start(path: str, work: Work, rollout: str, pool: RayResourcePool) -> RayWorkerGroup:
    """Actor, reference and rollout in one process for each rank of a run."""
    fp32 = FSDPEngineConfig(dtype="fp32")
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=path),
        actor=FSDPActorConfig(
            fsdp_config=fp32,
            ppo_mini_batch_size=work.responses // work.groups // SAMPLES,
            use_dynamic_bsz=True,
            ppo_max_token_len_per_gpu=TOKENS_PER_MICRO_BATCH,
            use_kl_loss=True,
            optim=FSDPOptimizerConfig(lr=1e-6),
        ),
        rollout=RolloutConfig(
            tensor_model_parallel_size=1,
            name=rollout,
            prompt_length=PROMPT_LENGTH,
            response_length=work.length,
            n=SAMPLES,
            dtype="fp32",
            ignore_eos=True,
            log_prob_use_dynamic_bsz=True,
            log_prob_max_token_len_per_gpu=TOKENS_PER_MICRO_BATCH,
        ),
        ref=RefConfig(
            fsdp_config=fp32, log_prob_use_dynamic_bsz=True, log_prob_max_token_len_per_gpu=TOKENS_PER_MICRO_BATCH
        ),
    )
    worker = RayClassWithInitArgs(ActorRolloutRefWorker, config=config, role="actor_rollout_ref", device_name="cpu")
    group = RayWorkerGroup(pool, worker)
    group.init_model()
    return group


def prompts(responses: int, seed: int, step: int) -> DataProto:
    """Random prompts of full length, each as often as it has responses."""
    ids = torch.randint(4, 104, (responses // SAMPLES, PROMPT_LENGTH), generator=torch.Generator().manual_seed(seed))
    ids = ids.repeat_interleave(SAMPLES, 0)
    return DataProto.from_dict(
        {"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        {"uid": [str(i // SAMPLES) for i in range(responses)], "sample_index": [i % SAMPLES for i in range(responses)]},
        {"global_steps": step, "validate": False},
    )


def one_rollout(group: RayWorkerGroup, given: DataProto) -> DataProto:
    """The prompts with their responses."""
    return given.select([]) | group.generate_sequences(given)


def one_step(group: RayWorkerGroup, batch: DataProto) -> None:
    """Log-probs under policy and reference, and one update."""
    batch = batch | group.compute_log_prob(batch) | group.compute_ref_log_prob(batch)
    mask = batch.batch["response_mask"]
    # Half of the responses are better than their siblings, half are worse.
    sign = 1.0 - 2.0 * (torch.arange(len(batch)) % 2)
    group.update_actor(batch | DataProto.from_dict({"advantages": sign[:, None] * mask}))


class Contender:
    """The runs of one measurement, side by side; between its turns their ranks sleep."""

    def __init__(self, path: str, work: Work, rollout: str) -> None:
        self.work = work
        self.rollouts: list[float] = []
        """Seconds of each turn; the first warms up."""
        self.steps: list[float] = []
        self._pools = [RayResourcePool([work.ranks // work.groups], use_gpu=False) for _ in range(work.groups)]
        self._groups = [start(path, work, rollout, pool) for pool in self._pools]
        self._threads = ThreadPoolExecutor(work.groups)

    def turn(self) -> None:
        """One rollout and one step of each run; a time ends when the last of them has ended."""
        work, step = self.work, len(self.rollouts)
        given = [prompts(work.responses // work.groups, work.groups * step + i, step) for i in range(work.groups)]
        started = time.perf_counter()
        batches = self._at_once(one_rollout, given)
        generated = time.perf_counter()
        self._at_once(one_step, batches)
        self.rollouts.append(generated - started)
        self.steps.append(time.perf_counter() - generated)
        assert sum(int(batch.batch["response_mask"].sum()) for batch in batches) == work.responses * work.length

    def _at_once(self, call: Callable[[RayWorkerGroup, DataProto], T], batches: Iterable[DataProto]) -> list[T]:
        return list(self._threads.map(call, self._groups, batches))

    def close(self) -> None:
        """End all ranks."""
        self._threads.shutdown()
        for group, pool in zip(self._groups, self._pools, strict=True):
            group.shutdown()
            pool.release()


def rows_of(part: str, found: list[tuple[Work, float, float]]) -> list[dict]:
    """Work and seconds of rollout and step as JSON; the first is what the others are compared with."""
    first, first_rollout, first_step = found[0]
    return [
        {
            "part": part,
            **asdict(work),
            "rollout_s": rollout,
            "step_s": step,
            "rollout_of_linear": rollout / first_rollout / (work.size / first.size),
            "step_of_linear": step / first_step / (work.size / first.size),
        }
        for work, rollout, step in found
    ]


class Benchmark:
    """All parts, one after the other; ``run_task`` puts Ray around it."""

    def run(self, config: argparse.Namespace) -> None:
        results = []
        print(f"rollout: {config.rollout}; one thread per rank, {os.cpu_count()} cores")
        print(f"{'':10}{'ranks':>8}{'responses':>10}{'length':>7}{'rollout s':>11}{'step s':>9}{'of linear':>19}")
        with tempfile.TemporaryDirectory() as folder:
            path = make_model(Path(folder))
            for part in config.parts:
                results += self.part(part, path, config)
        if config.json:
            Path(config.json).write_text(json.dumps({"rollout": config.rollout, "results": results}, indent=1) + "\n")

    def part(self, part: str, path: str, config: argparse.Namespace) -> list[dict]:
        """One part of the table."""
        contenders: list[Contender] = []
        try:
            contenders += [Contender(path, work, config.rollout) for work in PARTS[part]]
            for number in range(config.repeats + 1):
                for contender in contenders if number % 2 == 0 else reversed(contenders):
                    contender.turn()
        finally:
            for contender in contenders:
                contender.close()
        rows = rows_of(part, [(c.work, min(c.rollouts[1:]), min(c.steps[1:])) for c in contenders])
        for row in rows:
            ranks = f"{row['ranks']}{' apart' if row['groups'] > 1 else ''}"
            print(
                f"{part:10}{ranks:>8}{row['responses']:10}{row['length']:7}{row['rollout_s']:11.2f}{row['step_s']:9.2f}"
                f"{row['rollout_of_linear']:10.2f}{row['step_of_linear']:9.2f}",
                flush=True,
            )
        return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rollout", default="native", help="rollout.name")
    parser.add_argument("--parts", nargs="+", choices=list(PARTS), default=list(PARTS))
    parser.add_argument("--repeats", type=int, default=3, help="turns that count, after one that warms up")
    parser.add_argument("--json")
    args = parser.parse_args()
    # Ranks that wait for their turn have a place too.
    places = max(sum(work.ranks for work in PARTS[part]) for part in args.parts)
    ray_init = {"num_cpus": places, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
    run_task(Benchmark, args, OmegaConf.create({"ray_init": ray_init, "timeline_json_file": None}))


if __name__ == "__main__":
    main()
