"""What it costs to give new weights to the rollout engine beside the trainer, against a copy of the weights.

    python benchmarks/weight_update.py [--rollout native] [--rounds 9]

The training engine holds the weights on one rank; ``awake`` of the rollout engine takes them under a new version each
time. The yardstick copies the same tensors into memory that is mapped already. The small model is the one of the other
benchmarks, the large one shows what grows with the weights. Some engines prepare the weights when they are first used:
the first token after an update is compared with one that follows no update.
"""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

import shape
from shape import TINY, Row, Work

TARGET = 1.5
"""Of an engine with a copy of its own; one that shares the trainer's tensors takes about nothing."""
LARGE = Work(hidden=1024, layers=8, heads=16, key_value_heads=8, intermediate=3072)


def measure(work: Work, rollout: str, rounds: int) -> dict[str, Any]:
    """Seconds of a copy, of an update, and of a token after an update and after none."""
    import torch

    from verl.utils import hf_tokenizer
    from verl.workers.config import FSDPEngineConfig, HFModelConfig, RolloutConfig
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import RolloutRequest, SamplingParams, get_rollout_class

    with tempfile.TemporaryDirectory() as name:
        model = HFModelConfig(path=work.save_model(name), enable_gradient_checkpointing=False)
        trainer = EngineRegistry.new(
            "language_model",
            "fsdp2",
            model_config=model,
            engine_config=FSDPEngineConfig(dtype="fp32", forward_only=True),
            device_name="cpu",
        )
        trainer.initialize()
        config = RolloutConfig(
            name=rollout,
            dtype="float32",
            prompt_length=work.prompt_length,
            response_length=work.response_length,
            free_cache_engine=False,
            tensor_model_parallel_size=1,
            log_prob_micro_batch_size_per_gpu=1,
        )
        engine = get_rollout_class(rollout)(config, model, hf_tokenizer(name), "cpu")
    request = RolloutRequest(work.prompt_ids()[0], SamplingParams(max_tokens=1, seed=0))
    sources = dict(trainer.get_per_tensor_param())
    targets = {name: torch.empty_like(tensor) for name, tensor in sources.items()}

    def copy() -> None:
        for name, tensor in sources.items():
            targets[name].copy_(tensor)

    def update() -> None:
        trainer.weight_version += 1
        with trainer.eval_mode(), engine.awake(trainer.get_per_tensor_param, trainer.weight_version):
            assert engine.weight_version == trainer.weight_version

    def token() -> None:
        with trainer.eval_mode(), engine.awake(trainer.get_per_tensor_param, trainer.weight_version):
            engine.generate([request])

    calls = {"copy": copy, "update": update, "token after an update": token, "token": token}
    seconds = {name: shape.summary(found) for name, found in shape.interleaved(calls, rounds).items()}
    return {
        "megabytes": sum(tensor.nbytes for tensor in sources.values()) / 1e6,
        "tensors": len(sources),
        "seconds": seconds,
    }


def row_of(found: dict[str, Any], rollout: str) -> Row:
    """The target, by the median: a copy has no least time that a step could count on."""
    seconds = {name: times["median"] for name, times in found["seconds"].items()}
    later = seconds["token after an update"] - seconds["token"]
    ratio = (seconds["update"] + max(0.0, later)) / seconds["copy"]
    detail = (
        f"{1e3 * seconds['update']:.2f} ms, and {1e3 * later:+.2f} ms at the first token : "
        f"{1e3 * seconds['copy']:.2f} ms for {found['megabytes']:.0f} MB in {found['tensors']} tensors"
    )
    return Row(
        f"weights to a colocated engine, {found['megabytes']:.0f} MB ({rollout})",
        "a copy of the weights",
        ratio,
        TARGET,
        False,
        detail,
    )


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.set_defaults(rounds=9)
    parser.add_argument("--rollout", default="native", help="rollout.name of our engine")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    works = [TINY, replace(TINY, hidden=64)] if arguments.tiny else [Work(), LARGE]
    results = [measure(work, arguments.rollout, arguments.rounds) for work in works]
    rows = [row_of(found, arguments.rollout) for found in results]
    for row in rows:
        print(f"{row.what}: {row.ratio:.2f} copies ({row.detail})")
    shape.write_result(
        arguments.json,
        part="weight_update",
        machine=shape.machine(),
        versions=shape.versions("torch", "transformers"),
        results=results,
        rows=rows,
    )


if __name__ == "__main__":
    main()
