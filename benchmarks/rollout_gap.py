"""How far are the log-probs of a rollout from the trainer's, by number format of the engine's weights?

    python -m benchmarks.rollout_gap [--model FOLDER --prompts rl_test.parquet]
    .venv-vllm/bin/python -m benchmarks.rollout_gap --engine vllm

Responses are sampled at temperature 1 by one engine on a CPU, and scored by the trainer in fp32. Prints a table: the
bytes of weights that the engine got or holds, |log-prob of the trainer - log-prob of the rollout| as mean and maximum
over tokens, and the estimates k1 and k3 of KL(rollout || trainer) (``rollout_corr/kl``, ``rollout_corr/k3_kl``).
Without a model it makes a tiny Qwen3 of random weights, with heads of 32 numbers, the fewest that vLLM takes on a CPU.
"""

from __future__ import annotations

import argparse
import logging
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from tests.support.vision_models import picture_rows, write_parquet
from verl.config import HFModelConfig, RolloutConfig
from verl.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from verl.datasets.rl_dataset import RLHFDataset, collate_fn
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.trainer.ppo.rollout_corr_helper import compute_offpolicy_metrics
from verl.utils import hf_tokenizer
from verl.workers.engine import EngineRegistry, MicroBatchConfig
from verl.workers.rollout.base import get_rollout_class

FORMATS: dict[str, list[tuple[Any, Any]]] = {
    "native": [(dtype, rounded) for rounded in (None, "int8", "fp8") for dtype in ("float32", "bfloat16")],
    "vllm": [(dtype, rounded) for rounded in (None, "int8") for dtype in ("float32", "bfloat16")],  # no fp8 on a CPU
}
PROMPT_LENGTH = 64


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rollout_gap", description="Print the gap of log-probs by number format."
    )
    parser.add_argument("--engine", choices=FORMATS, default="native", help="rollout engine (%(default)s)")
    parser.add_argument("--model", help="folder of a model (a tiny random one)")
    parser.add_argument("--prompts", help="Parquet file of prompts (made up)")
    parser.add_argument("--rows", type=int, default=64, help="prompts (%(default)s)")
    parser.add_argument("--samples", type=int, default=4, help="responses to each (%(default)s)")
    parser.add_argument("--response_length", type=int, default=16, help="tokens of a response (%(default)s)")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    print("| engine | `dtype` | `quantization` | weights, bytes | mean gap | largest gap | k1 | k3 |")
    print("|---|---|---|---|---|---|---|---|", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or str(tiny_model_dir(f"{folder}/model", "qwen3", head_dim=32))
        file = args.prompts or write_parquet(Path(folder, "rows.parquet"), made_up(args.rows))
        prompts = read_prompts(path, file, args.rows, args.samples)
        trainer = trainer_of(path)
        for dtype, rounded in FORMATS[args.engine]:
            config = RolloutConfig(
                name=args.engine,
                dtype=dtype,
                quantization=rounded,
                prompt_length=PROMPT_LENGTH,
                response_length=args.response_length,
                tensor_model_parallel_size=1,
                enforce_eager=True,
            )
            nbytes, metrics = measured(config, path, prompts, trainer)
            gaps = " | ".join(f"{metrics[name]:.1e}" for name in ("mean", "max", "kl", "k3_kl"))
            print(f"| `{args.engine}` | {dtype} | {rounded or 'null'} | {nbytes:,} | {gaps} |", flush=True)
    dist.destroy_process_group()


def made_up(rows: int) -> list[dict[str, Any]]:
    """Rows of text alone."""
    return [{name: value for name, value in row.items() if name != "images"} for row in picture_rows(rows, 1)]


def read_prompts(path: str, file: str, rows: int, samples: int) -> DataProto:
    """The first prompts of a file, each as many times as it is answered."""
    dataset = RLHFDataset(file, hf_tokenizer(path), {"max_prompt_length": PROMPT_LENGTH})
    batch = DataProto.from_single_dict(collate_fn([dataset[number] for number in range(rows)]))
    batch = batch.repeat(samples, interleave=True)
    batch.non_tensor_batch |= {
        "uid": np.repeat(np.arange(rows), samples),
        "sample_index": np.tile(np.arange(samples), rows),
    }
    return batch


def trainer_of(path: str) -> Any:
    """The trainer's engine in fp32, on one rank."""
    trainer = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(path=path),
        engine_config=FSDPEngineConfig(dtype="fp32"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3),
        device_name="cpu",
    )
    trainer.initialize()
    return trainer


def measured(config: RolloutConfig, path: str, prompts: DataProto, trainer: Any) -> tuple[int, dict[str, float]]:
    """Bytes of the engine's weights, and the gap of its log-probs."""
    rollout: Any = get_rollout_class(config.name)(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
    with rollout.awake(trainer.get_per_tensor_param, version=0):
        nbytes = rollout.weight_bytes if config.name == "native" else rollout.sent_bytes
        drawn = rollout.generate_sequences(prompts)
    batch = prompts.select(batch_keys=[]) | drawn
    own = trainer.infer_batch(batch, {"log_probs"}, MicroBatchConfig())["log_probs"]
    log_probs, mask = batch.batch["rollout_log_probs"], batch.batch["response_mask"]
    gap = (own - log_probs).abs()[mask.bool()]
    return nbytes, compute_offpolicy_metrics(own, log_probs, mask) | {
        "mean": gap.mean().item(),
        "max": gap.max().item(),
    }


if __name__ == "__main__":
    main()
