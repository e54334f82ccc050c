"""Do trainer and rollout engines compute what Transformers computes? The largest differences, for each kind of model.

    python -m benchmarks.agreement [--kinds "dense (Qwen3)" ...] [--ranks 1 2]
    .venv-vllm/bin/python -m benchmarks.agreement --engines vllm --ranks 1 2 [--merged]
    .venv-sglang/bin/python -m benchmarks.agreement --engines sglang --ranks 1 [--merged]

Tiny models with random weights, in fp32 on one rank and on two: their responses are drawn by a rollout engine in each
rank, and one plain forward and backward pass of Transformers over each response alone, with the model's own attention
and positions, says what log-probs and gradients should be. Prints the rows of docs/internals/agreement.md. vllm and
sglang apply adapters, unless they get merged weights. With vllm all models have heads of 32
numbers, the fewest that it computes on a CPU; with sglang patches of pictures have 14 pixels a side, as it knows them.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import start_processes
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from tests.support.vision_models import heads_of_32, picture_rows, tiny_vision_model_dir, write_parquet
from verl.config import HFModelConfig, RolloutConfig
from verl.config.model import FSDPEngineConfig, FSDPOptimizerConfig
from verl.config.rollout import IN_PROCESS_ENGINES, SERVER_ENGINES
from verl.datasets.rl_dataset import RLHFDataset, collate_fn
from verl.protocol import DataProto
from verl.testing.models import MIXTURES, tiny_model_dir
from verl.utils import hf_processor, hf_tokenizer
from verl.utils.sharded_tensor import full_tensor, local_rows
from verl.vision.families import FAMILIES
from verl.workers.engine import EngineRegistry, MicroBatchConfig
from verl.workers.losses import SFTLoss
from verl.workers.rollout.base import get_rollout_class

ADAPTED = {"qwen3": "Qwen3", "qwen3_moe": "experts, qwen3_moe", "qwen2_5_vl": "images, qwen2_5_vl"}
KINDS = {
    "dense (Qwen3)": "qwen3",
    **{f"experts ({family})": family for family in MIXTURES},
    **{f"images ({family})": family for family in FAMILIES},
    **{f"LoRA ({name})": family for family, name in ADAPTED.items()},
}
ENGINES = (*IN_PROCESS_ENGINES, *SERVER_ENGINES)
REFUSED = {("deepseek_v3", "native")}  # latent attention
PROMPTS, RESPONSES, PROMPT_LENGTH, RESPONSE_LENGTH = 6, 2, 40, 8
TOLERANCE = 2e-5
"""Of log-probs, and of gradients relative to the largest one: a few roundings of fp32 at logits of size 10."""

CPU = torch.device("cpu")
Differences = tuple[float, float, float]
"""Of log-probs of the rollout, of log-probs of the trainer, and of gradients."""


def main() -> None:
    """Print the table; end with exit code 1 if a difference is above the tolerance."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.agreement",
        description="Compare trainer and rollout engines with Transformers, and print the table of differences. Exit "
        "code 1 if one is above the tolerance.",
    )
    parser.add_argument("--kinds", nargs="+", choices=KINDS, default=list(KINDS), help="rows of the table (all)")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=["hf", "native"], help="rollout engines")
    parser.add_argument("--merged", action="store_true", help="vllm and sglang get merged adapters")
    parser.add_argument("--ranks", nargs="+", type=int, choices=(1, 2, 4), default=[1, 2], help="ranks of the trainer")
    parser.add_argument("--tolerance", type=float, default=TOLERANCE, help="largest difference (%(default)s)")
    args = parser.parse_args()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    print("| kind | rollout engine | ranks | log-probs of the rollout | of the trainer | gradients of the trainer |")
    print("|---|---|---|---|---|---|", flush=True)
    largest = 0.0
    for ranks in args.ranks:
        with tempfile.TemporaryDirectory() as folder:
            # Processes of their own even for one rank: a process group ends with its processes.
            start_processes(
                on_rank, (ranks, args.kinds, args.engines, args.merged, folder), nprocs=ranks, start_method="fork"
            )
            found = json.loads((Path(folder) / "found.json").read_text())
        largest = max([largest, *(math.inf if math.isnan(value) else value for value in found)])
    if not largest <= args.tolerance:
        raise SystemExit(f"the largest difference, {largest:.1e}, is above {args.tolerance:.1e}")


def on_rank(rank: int, ranks: int, kinds: Sequence[str], engines: Sequence[str], merged: bool, folder: str) -> None:
    """Measure all kinds on one of the ranks of a gloo group; the first one prints rows and writes the differences."""
    logging.disable(logging.WARNING)
    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(ranks), "LOCAL_RANK": str(rank)}
    dist.init_process_group("gloo", store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    found: list[float] = []
    for kind in kinds:
        family = KINDS[kind]
        own = [engine for engine in engines if (family, engine) not in REFUSED]
        place = Path(folder, str(len(found)))
        for engine, row in measure(family, kind.startswith("LoRA"), place, own, merged).items():
            found += row
            if rank == 0:
                alone = kind.startswith("LoRA") and engine in SERVER_ENGINES and not merged
                name = f"{kind}, adapters alone" if alone else kind
                print(f"| {name} | `{engine}` | {ranks} | {' | '.join(f'{value:.1e}' for value in row)} |", flush=True)
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def measure(
    family: str, has_adapters: bool, folder: Path, engines: Sequence[str], merged: bool
) -> dict[str, Differences]:
    """Return the differences of a kind by rollout engine; gradients are relative to the largest gradient."""
    has_images, path = family in FAMILIES, str(folder / "model")
    if dist.get_rank() == 0:
        if has_images:
            of_patches = {"patch": 14, "side": 4} if "sglang" in engines else {}
            tiny_vision_model_dir(path, family, **(heads_of_32(family) if "vllm" in engines else {}), **of_patches)
        else:
            tiny_model_dir(path, family, **({"head_dim": 32} if "vllm" in engines else {}))
    dist.barrier()
    adapters: Any = {"lora_rank": 4, "lora_alpha": 8} if has_adapters else {}
    trainer: Any = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(path=path, **adapters),
        engine_config=FSDPEngineConfig(dtype="fp32"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-3),
        device_name="cpu",
    )
    trainer.initialize()
    torch.manual_seed(1 + dist.get_rank())
    with torch.no_grad():
        for name, parameter in trainer.model.named_parameters():
            if "lora_B" in name:  # zero at first
                local_rows(parameter)[0].normal_(std=0.1)
    weights = {name: tensor.detach().clone() for name, tensor in trainer.get_per_tensor_param()}
    plain: Any = (AutoModelForImageTextToText if has_images else AutoModelForCausalLM).from_pretrained(path)
    plain.load_state_dict(plain.state_dict() | weights)  # buffers, such as biases of routers, are not trained
    # Prompts of a rank are not adjacent, so that both have rows of text and rows with images.
    prompts = read_prompts(path, folder / str(dist.get_rank()), has_images)[dist.get_rank() :: dist.get_world_size()]
    return {engine: compared(engine, path, prompts, weights, plain, trainer, merged) for engine in engines}


def read_prompts(path: str, folder: Path, has_images: bool) -> DataProto:
    """Every third row is one of text, or all are."""
    rows = picture_rows(PROMPTS, text_every=3 if has_images else 1)
    if not has_images:
        rows = [{name: value for name, value in row.items() if name != "images"} for row in rows]
    file = write_parquet(folder / "rows.parquet", rows)
    dataset = RLHFDataset(file, hf_tokenizer(path), {"max_prompt_length": PROMPT_LENGTH}, hf_processor(path))
    batch = DataProto.from_single_dict(collate_fn([dataset[number] for number in range(PROMPTS)]))
    batch = batch.repeat(RESPONSES, interleave=True)
    batch.non_tensor_batch |= {
        "uid": np.repeat(np.arange(PROMPTS), RESPONSES),
        "sample_index": np.tile(np.arange(RESPONSES), PROMPTS),
    }
    return batch


def compared(
    engine: str, path: str, prompts: DataProto, weights: Mapping[str, Tensor], plain: Any, trainer: Any, merged: bool
) -> Differences:
    """Draw responses, and compare log-probs of the rollout and the trainer, and the trainer's gradients."""
    config: Any = {"name": engine, "prompt_length": PROMPT_LENGTH, "response_length": RESPONSE_LENGTH}
    config["tensor_model_parallel_size"] = 1
    applies = engine in SERVER_ENGINES and trainer.has_adapters and not merged
    if engine in SERVER_ENGINES:
        # The seed is one that draws no token of images, which the plain model would take for an image.
        config |= {"enforce_eager": True, "merge_adapters": not applies, "seed": 5}
    model = replace(trainer.model_config, path=path) if applies else HFModelConfig(path=path)
    rollout = get_rollout_class(engine)(RolloutConfig(dtype="float32", **config), model, hf_tokenizer(path), "cpu")
    with rollout.awake(trainer.adapted_weights() if applies else weights.items, version=0):
        found = rollout.generate_sequences(prompts)
    batch = prompts.select(batch_keys=[]) | found
    own = trainer.infer_batch(batch, {"log_probs"}, MicroBatchConfig())
    parts: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(parts, batch | DataProto.from_dict(tensors={"own": own["log_probs"]}))
    whole = DataProto.concat(parts)
    expected = plain_log_probs(plain, whole)
    mask = whole.batch["response_mask"]
    plain.zero_grad()
    (-(expected * mask).sum() / mask.sum()).backward()
    with trainer.train_mode():
        trainer.optimizer_zero_grad()
        trainer.forward_backward_batch(batch, SFTLoss(), MicroBatchConfig())
        gradients = {name: p.grad for name, p in trainer.model.named_parameters() if p.grad is not None}
        wanted = {name: gradient_of(name, trainer.model, plain) for name in gradients}
        largest = max(float(one.abs().max()) for one in wanted.values())
        gap = max(float((full_tensor(gradients[name], CPU) - one).abs().max()) for name, one in wanted.items())
    rollout_gap, own_gap = (
        float(((whole.batch[name] - expected.detach()) * mask).abs().max()) for name in ("rollout_log_probs", "own")
    )
    return rollout_gap, own_gap, gap / largest


def plain_log_probs(model: Any, batch: DataProto) -> Tensor:
    """Log-probs of the responses, (bsz, response_length), by Transformers alone, one sequence at a time."""
    columns, rows = batch.batch, []
    for number in range(len(batch)):
        seen = columns["attention_mask"][number].bool()
        ids, start = columns["input_ids"][number][seen][None], int(seen[:PROMPT_LENGTH].sum())
        given: dict[str, Any] = {}
        if "multi_modal_inputs" in batch.non_tensor_batch:
            given = dict(batch.non_tensor_batch["multi_modal_inputs"][number])
            is_image = (ids == model.config.image_token_id).int()
            is_image[:, start:] = 0
            given["mm_token_type_ids"] = is_image
        log_p = model(input_ids=ids, **given).logits[0, start - 1 : -1].log_softmax(-1)
        chosen = log_p.gather(1, ids[0, start:, None]).squeeze(1)
        rows.append(torch.nn.functional.pad(chosen, (0, RESPONSE_LENGTH - len(chosen))))
    return torch.stack(rows)


def gradient_of(name: str, trained: Any, plain: Any) -> Tensor:
    """What the gradient of a parameter of the trainer should be.

    Of adapters W + s B A it follows from that of W: s B^T dW for A, s dW A^T for B.
    """
    known = dict(plain.named_parameters())
    layer, _, part = name.partition(".lora_")
    if not part:
        return known[plain_name(name, known)].grad
    parameters = dict(trained.named_parameters())
    whole = known[plain_name(f"{layer}.weight", known)].grad
    other = name.replace("lora_A", "lora_B") if part.startswith("A") else name.replace("lora_B", "lora_A")
    factor = full_tensor(parameters[other], CPU)
    return 2.0 * (factor.T @ whole if part.startswith("A") else whole @ factor.T)  # 2: lora_alpha / lora_rank


def plain_name(name: str, known: Mapping[str, Any]) -> str:
    """The name in the plain model of a parameter that wrappers have given a longer one."""
    return max((one for one in known if name == one or name.endswith(f".{one}")), key=len)


if __name__ == "__main__":
    main()
