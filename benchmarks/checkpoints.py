"""What it costs a step that nothing can be lost: a save in place, a save in the background, a state held in memory.

The first part trains a Qwen3 shape of 50 M parameters in this process and saves it with its optimizer (0.6 GB) after
each step: what the step waits for the save, and how long step and save take together until the next step can begin.
The second part runs GRPO steps of the 4.75 M shape of ``scaling.py`` on two ranks over Ray, every other one with the
ranks' states held in the object store as a run does after each step. All numbers of a part are of one process, in
turn, in fp32 with one thread per rank; each is a median. ::

    python -m benchmarks.checkpoints [--parts saves memory] [--repeats 3] [--json checkpoints.json]
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"
import torch
from omegaconf import OmegaConf
from transformers import Qwen3Config, Qwen3ForCausalLM

from benchmarks.scaling import Work, make_model, one_step, prompts
from benchmarks.scaling import start as start_ranks
from verl.checkpoint.resume import CheckpointPlan
from verl.checkpoint.run import TrainerCheckpoint
from verl.checkpoint.states import RunState
from verl.config import SFTDataConfig
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.single_controller.ray import RayResourcePool, run_task
from verl.testing.models import tiny_tokenizer
from verl.trainer.config import SFTConfig
from verl.workers.config import CheckpointConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.training_workers import TrainingWorker

SHAPE = {
    "hidden_size": 768, "num_hidden_layers": 8, "num_attention_heads": 12, "num_key_value_heads": 4, "head_dim": 64,
    "intermediate_size": 2048, "vocab_size": 104, "max_position_embeddings": 2048, "tie_word_embeddings": True,
}  # fmt: skip
ROWS, LENGTH = 8, 32


def timed(task: Callable[[], object]) -> float:
    """Seconds."""
    started = time.perf_counter()
    task()
    return time.perf_counter() - started


def batch() -> DataProto:
    """Random tokens, all of them learned from."""
    ids = torch.randint(4, 104, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    return DataProto.from_dict(
        {
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(LENGTH).expand(ROWS, -1).contiguous(),
            "responses": ids[:, 1:],
            "response_mask": torch.ones_like(ids[:, 1:]),
        }
    )


def saves(repeats: int) -> dict[str, float]:
    """A save in place against one in the background."""
    found: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        model = Qwen3ForCausalLM(Qwen3Config(**SHAPE))
        model.save_pretrained(folder)
        tiny_tokenizer("char").save_pretrained(folder)
        print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.1f} M parameters, fp32, AdamW")
        config = SFTConfig(
            model=HFModelConfig(path=folder),
            engine=FSDPEngineConfig(dtype="fp32"),
            optim=FSDPOptimizerConfig(lr=1e-6),
            data=SFTDataConfig(micro_batch_size_per_gpu=ROWS),
        )
        group = LocalWorkerGroup(ray_cls_with_init=LocalWorkerGroup.describe(TrainingWorker, config, "cpu"))
        group.init_model()
        data = batch()
        group.train_batch(data)
        found["step_s"] = statistics.median(timed(lambda: group.train_batch(data)) for _ in range(repeats))
        step = 0
        for name, background in (("in place", False), ("background", True)):
            group.workers[0].checkpoint = CheckpointConfig(async_save=background)
            checkpoint = TrainerCheckpoint(CheckpointPlan(root=f"{folder}/{name}", keep={".": 1}), {".": group})
            waits, together = [], []
            for _ in range(repeats):
                step += 1
                state = RunState(global_step=step, dataloader={}, controllers={}, rng={})
                waits.append(timed(lambda state=state, checkpoint=checkpoint: checkpoint.save(state)))
                together.append(waits[-1] + timed(checkpoint.poll) + timed(lambda: group.train_batch(data)))
                checkpoint.finish()
            found[f"{name}: wait_s"] = statistics.median(waits)
            found[f"{name}: wait and next step_s"] = statistics.median(together)
        found["wait, background over in place"] = found["background: wait_s"] / found["in place: wait_s"]
        size = sum(path.stat().st_size for path in Path(folder, "background").rglob("*") if path.is_file())
        found["checkpoint_gb"] = size / 1e9
    return found


class Memory:
    """A step with and without the states of all ranks held; ``run_task`` puts Ray around it."""

    def run(self, config: argparse.Namespace) -> None:
        work = Work(ranks=2, responses=64, length=64)
        with tempfile.TemporaryDirectory() as folder:
            pool = RayResourcePool([work.ranks], use_gpu=False)
            group = start_ranks(make_model(Path(folder)), work, "native", pool)
            held = None
            seconds: dict[bool, list[float]] = {False: [], True: []}
            for step in range(2 * config.repeats + 2):
                holds = bool(step % 2)
                started = time.perf_counter()
                if holds:
                    held = group.execute_all_async("snapshot", step)
                given = prompts(work.responses, seed=step, step=step)
                one_step(group, given.select([]) | group.generate_sequences(given))
                seconds[holds].append(time.perf_counter() - started)
            alone = [timed(lambda: group.wait_for(group.execute_all_async("snapshot", 0))) for _ in range(5)]
            del held
            group.shutdown()
            pool.release()
        without, with_state = (statistics.median(seconds[holds][1:]) for holds in (False, True))
        config.found |= {
            "GRPO step_s": without,
            "GRPO step with state held_s": with_state,
            "step with state held over without": with_state / without,
            "snapshot alone, read by the driver_s": statistics.median(alone),
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=["saves", "memory"], default=["saves", "memory"])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json")
    args = parser.parse_args()
    args.found = {}
    if "saves" in args.parts:
        args.found |= saves(args.repeats)
    if "memory" in args.parts:
        ray_init = {"num_cpus": 2, "include_dashboard": False, "log_to_driver": False, "logging_level": "ERROR"}
        run_task(Memory, args, OmegaConf.create({"ray_init": ray_init, "timeline_json_file": None}))
    for name, value in args.found.items():
        print(f"{name:45}{value:10.3f}")
    if args.json:
        Path(args.json).write_text(json.dumps(args.found, indent=1) + "\n")


if __name__ == "__main__":
    main()
