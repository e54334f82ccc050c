"""LoRA against full training: memory of a policy with its reference, and accuracy on the task of the quickstart.

    python -m benchmarks.lora memory
    python -m benchmarks.lora learning [--seed 1] [--output_dir outputs/lora]
    .venv-vllm/bin/python -m benchmarks.lora rollout

``memory`` makes one GRPO update with a KL loss in a process for each way, on one rank in fp32, and shows the bytes of
weights, gradients and optimizer state after it and the peak of resident memory above what the libraries took.
``learning`` runs the quickstart's warm-up once and then its 45 steps of GRPO from the same model, by all weights and
by adapters of rank 8, whose learning rate is ten times as large. ``rollout`` sends merged weights, and adapters alone,
to vLLM inside the process: bytes and seconds of an update, and tokens in a second.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.shape import Work
from examples.quickstart.quickstart import HERE, compare, exported_model, fresh_folder, report_accuracy, run_stage
from examples.quickstart.settings import command, rl_settings, sft_settings

LARGE = Work(hidden=1024, layers=8, heads=16, key_value_heads=8, intermediate=3072)
WAYS = {"all weights": 0, "LoRA, rank 8": 8}
LORA_LR = 2e-3


def measure(rank: int, path: str) -> dict[str, float]:
    """Bytes that a policy and its reference hold after one update; ``rank`` 0 trains all weights."""
    import torch

    from verl.config import ActorRolloutRefConfig, FSDPActorConfig, FSDPEngineConfig, HFModelConfig, RefConfig
    from verl.protocol import DataProto
    from verl.single_controller.local import LocalWorkerGroup
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    fp32 = FSDPEngineConfig(dtype="fp32")
    before = _peak_bytes()
    config = ActorRolloutRefConfig(
        model=HFModelConfig(path=path, lora_rank=rank),
        actor=FSDPActorConfig(
            fsdp_config=fp32, ppo_mini_batch_size=4, ppo_micro_batch_size_per_gpu=1, use_kl_loss=True
        ),
        ref=RefConfig(fsdp_config=fp32, log_prob_micro_batch_size_per_gpu=1),
    )
    groups = {}
    for role in ["actor"] if rank else ["ref", "actor"]:
        worker = LocalWorkerGroup.describe(ActorRolloutRefWorker, config=config, role=role, device_name="cpu")
        groups[role] = LocalWorkerGroup(ray_cls_with_init=worker)
        groups[role].init_model()
    mask = torch.ones(4, 32, dtype=torch.long)
    ids = torch.randint(4, 100, (4, 32), generator=torch.Generator().manual_seed(0))
    columns = {"input_ids": ids, "attention_mask": mask, "position_ids": mask.cumsum(-1) - 1}
    columns |= {"prompts": ids[:, :16], "responses": ids[:, 16:], "response_mask": mask[:, 16:]}
    batch = DataProto.from_dict(
        tensors=columns | {"advantages": torch.ones(4, 16), "old_log_probs": -torch.ones(4, 16)}
    )
    batch = batch | groups["actor" if rank else "ref"].compute_ref_log_prob(batch)
    groups["actor"].update_actor(batch)
    engines = [engine for group in groups.values() for engine in group.workers[0].engines]
    parameters = [p for engine in engines for p in engine.model.parameters()]
    states = [s for e in engines if e.optimizer for state in e.optimizer.state.values() for s in state.values()]
    return {
        "weights": sum(p.nbytes for p in parameters),
        "gradients": sum(p.grad.nbytes for p in parameters if p.grad is not None),
        "optimizer": sum(s.nbytes for s in states if isinstance(s, torch.Tensor)),
        "peak": _peak_bytes() - before,
    }


def _peak_bytes() -> int:
    """Peak of this process's resident memory; ``ru_maxrss`` would count what it was before the program began."""
    found = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return 1024 * int(found[1])


def memory() -> None:
    """Print a table of the bytes of each way."""
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        path = LARGE.save_model(folder)
        for name, rank in WAYS.items():
            arguments = [sys.executable, "-m", "benchmarks.lora", "measure", "--rank", str(rank), "--model", path]
            rows[name] = json.loads(subprocess.run(arguments, check=True, capture_output=True, text=True).stdout)
    parts = list(rows["all weights"])
    print(f"| MB, {LARGE.parameters / 1e6:.0f} M parameters | {' | '.join(parts)} |\n|{'---|' * (len(parts) + 1)}")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{row[part] / 1e6:.1f}' for part in parts)} |")


def rollout() -> None:
    """Print a table of what updates of vLLM cost in both ways, and what its responses take."""
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    import torch

    from verl.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig, RolloutConfig
    from verl.utils import hf_tokenizer
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import RolloutRequest, SamplingParams
    from verl.workers.rollout.vllm_rollout import VLLMRollout

    rounds, responses, length = 5, 32, 64
    print("| adapters | MB of an update | seconds of an update | tokens in a second |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        path = LARGE.save_model(folder)
        model = HFModelConfig(path=path, lora_rank=8)
        trainer = EngineRegistry.new(
            "language_model",
            "fsdp2",
            model_config=model,
            engine_config=FSDPEngineConfig(dtype="fp32"),
            optimizer_config=FSDPOptimizerConfig(lr=1e-3),
            device_name="cpu",
        )
        trainer.initialize()
        requests = [
            RolloutRequest([5 + number, 6, 7, 8], SamplingParams(max_tokens=length, seed=number, ignore_eos=True))
            for number in range(responses)
        ]
        for merges in (True, False):
            config = RolloutConfig(
                name="vllm",
                dtype="float32",
                prompt_length=8,
                response_length=length,
                enforce_eager=True,
                merge_adapters=merges,
                tensor_model_parallel_size=1,
            )
            engine: Any = VLLMRollout(config, model, hf_tokenizer(folder), torch.device("cpu"))
            weights = trainer.get_per_tensor_param if merges else trainer.adapted_weights()
            updates, speeds = [], []
            for version in range(1 + rounds):
                began = time.perf_counter()
                with trainer.eval_mode(), engine.awake(weights, version):
                    updates.append(time.perf_counter() - began)
                    began = time.perf_counter()
                    engine.generate(requests)
                    speeds.append(responses * length / (time.perf_counter() - began))
            seconds, speed = statistics.median(updates[1:]), statistics.median(speeds[1:])
            size = engine.sent_bytes / 1e6
            del engine  # its server ends before the next one starts
            print(f"| {'merged' if merges else 'alone'} | {size:.1f} | {seconds:.3f} | {speed:,.0f} |")


def learning(seed: int, output: Path) -> None:
    """Warm up once, train in both ways, and print the held-out accuracy before and after."""
    task, sft = output / "task", output / "sft"
    sft.mkdir(parents=True)
    make = [sys.executable, str(HERE / "make_task.py"), f"--output_dir={task}", f"--seed={seed}"]
    run_stage("Tokenizer, tiny model, data", make, output / "task.log")
    warm_up = command("verl.trainer.sft_trainer", sft_settings(task, sft, seed))
    run_stage("Supervised warm-up", warm_up, sft / "log.txt", sft / "metrics.jsonl")
    for name, rank in WAYS.items():
        folder = output / f"rank_{rank}"
        folder.mkdir()
        settings = rl_settings("grpo", task, exported_model(sft / "checkpoints"), folder, seed)
        if rank:
            settings |= {
                "actor_rollout_ref.model.lora_rank": rank,
                "actor_rollout_ref.model.lora_alpha": 2 * rank,
                "actor_rollout_ref.actor.optim.lr": LORA_LR,
            }
        arguments = command("verl.trainer.main_ppo", settings)
        seconds = run_stage(f"GRPO: {name}", arguments, folder / "log.txt", folder / "metrics.jsonl")
        report_accuracy(compare(folder / "validation", name, seed, seconds)[0])


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=["memory", "learning", "rollout", "measure"])
    parser.add_argument("--seed", type=int, default=1, help="learning: of data, weights and sampling")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/lora"), help="learning: where it writes")
    parser.add_argument("--rank", type=int, default=0, help="measure: of the adapters")
    parser.add_argument("--model", help="measure: folder of the model")
    args = parser.parse_args()
    if args.part == "memory":
        memory()
    elif args.part == "rollout":
        rollout()
    elif args.part == "measure":
        print(json.dumps(measure(args.rank, args.model)))
    else:
        learning(args.seed, fresh_folder(args.output_dir))


if __name__ == "__main__":
    main()
