"""What it costs to give new weights to the rollout engine beside the trainer, against a copy of the weights.

    python -m benchmarks.weight_update [--rollout native] [--rounds 15]

The training engine holds the weights on one rank. A rollout of one token that finds a new version of them is compared
with one that finds the version it has: so what an engine does when the weights come and what it does when they are
first used both count, and what every rollout does besides counts in neither. The yardstick copies the same tensors
into memory that is mapped already. The small model is the one of the other benchmarks, the large one shows what grows
with the weights. Whether the engine works on the trainer's own tensors is seen by changing one of them in place.
"""

from __future__ import annotations

import os
import statistics
import tempfile
from dataclasses import replace
from typing import Any

from benchmarks import shape
from benchmarks.shape import TINY, Row, Work

COPY_TARGET, SHARED_TARGET = 1.5, 0.1
"""In copies: of an engine with weights of its own, and of one that shares the trainer's and so moves no byte."""
LARGE = Work(hidden=1024, layers=8, heads=16, key_value_heads=8, intermediate=3072)


def measure(work: Work, rollout: str, rounds: int) -> dict[str, Any]:
    """Seconds of a copy, and of a rollout with new weights and with the same; whether the weights are shared."""
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

    def rollout_of_a_token() -> float:
        with trainer.eval_mode(), engine.awake(trainer.get_per_tensor_param, trainer.weight_version):
            assert engine.weight_version == trainer.weight_version
            return engine.generate([request])[0].log_probs[0]

    def with_new_weights() -> None:
        trainer.weight_version += 1
        rollout_of_a_token()

    # A copy before each of the two, so that both find the same in the processor's caches.
    calls = {"copy": copy, "new weights": with_new_weights, "copy again": copy, "same weights": rollout_of_a_token}
    seconds = {name: shape.summary(found) for name, found in shape.interleaved(calls, rounds).items()}
    before = rollout_of_a_token()
    with torch.no_grad():
        next(trainer.model.parameters()).mul_(2)  # the embedding, which is the head too
    return {
        "megabytes": sum(tensor.nbytes for tensor in sources.values()) / 1e6,
        "tensors": len(sources),
        "shared": rollout_of_a_token() != before,
        "seconds": seconds,
    }


def row_of(found: dict[str, Any], rollout: str) -> Row:
    """The target, by medians over the rounds: a difference of least times may be below nothing.

    What a machine does otherwise changes from round to round more than within one, so the difference is taken there.
    """
    seconds = {name: times["all"] for name, times in found["seconds"].items()}
    copy = statistics.median([*seconds["copy"], *seconds["copy again"]])
    rounds = zip(seconds["new weights"], seconds["same weights"], strict=True)
    update = max(0.0, statistics.median(new - same for new, same in rounds))
    how = "the trainer's own tensors" if found["shared"] else "copies of its own"
    detail = f"{1e3 * update:.2f} ms : {1e3 * copy:.2f} ms, {found['tensors']} tensors; the engine holds {how}"
    return Row(
        f"weights to a colocated engine, {found['megabytes']:.0f} MB ({rollout})",
        "a copy of the weights",
        update / copy,
        SHARED_TARGET if found["shared"] else COPY_TARGET,
        False,
        detail,
    )


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.set_defaults(rounds=15)
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
