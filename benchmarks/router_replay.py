"""How far rollout and training are apart for a mixture of experts, with and without router replay.

    python -m benchmarks.router_replay [--prompts 16] [--tokens 64] [--seeds 3]

A rollout in bf16 samples from a model of random weights (4 layers of 16 experts, 2 per token), and training in fp32
computes the log-probs of the same tokens: first with experts of its own choice, then with those of the rollout
(actor.router_replay.mode=R3). A dense model of the same width shows what the format alone does.
"""

from __future__ import annotations

import argparse
import tempfile
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from verl.config import (
    ActorRolloutRefConfig,
    FSDPActorConfig,
    FSDPEngineConfig,
    HFModelConfig,
    RolloutConfig,
    RouterReplayConfig,
)
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_tokenizer
from verl.workers.fsdp_workers import ActorRolloutRefWorker

PROMPT = 16
SHAPE: dict[str, Any] = {
    "vocab_size": 104,
    "hidden_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 16,
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
}
EXPERTS = Qwen3MoeConfig(**SHAPE, num_experts=16, num_experts_per_tok=2, moe_intermediate_size=64, norm_topk_prob=True)
DENSE = Qwen3Config(**SHAPE, intermediate_size=128)


def policy(path: str, tokens: int, routing: bool) -> Any:
    """A policy that trains in fp32 and samples in bf16."""
    actor = FSDPActorConfig(
        fsdp_config=FSDPEngineConfig(dtype="fp32"),
        router_replay=RouterReplayConfig(mode="R3" if routing else "disabled"),
    )
    rollout = RolloutConfig(
        tensor_model_parallel_size=1,
        prompt_length=PROMPT,
        response_length=tokens,
        dtype="bf16",
        ignore_eos=True,
        log_prob_micro_batch_size_per_gpu=8,
        enable_rollout_routing_replay=routing,
    )
    config = ActorRolloutRefConfig(model=HFModelConfig(path=path), actor=actor, rollout=rollout)
    worker = LocalWorkerGroup.describe(ActorRolloutRefWorker, device_name="cpu", config=config, role="actor_rollout")
    group = LocalWorkerGroup(ray_cls_with_init=worker)
    group.init_model()
    return group


def measure(model: Any, prompts: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """|log p of training - log p of rollout| at each token, without replay and (mixtures of experts) with it."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 104, (prompts, PROMPT), generator=generator)
    batch = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={"uid": np.arange(prompts).astype(str).astype(object), "sample_index": np.zeros(prompts, int)},
        meta_info={"global_steps": seed, "validate": False},
    )
    routing = model is EXPERTS
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(model).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        group = policy(folder, tokens, routing)
        columns = group.generate_sequences(batch)
        own = columns.select(batch_keys=[name for name in columns.batch.keys() if name != "routed_experts"])
        drawn = columns.batch["rollout_log_probs"]
        gaps = {"own choice": (group.compute_log_prob(own).batch["old_log_probs"] - drawn).abs()}
        if routing:
            gaps["R3"] = (group.compute_log_prob(columns).batch["old_log_probs"] - drawn).abs()
    return gaps


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--seeds", type=int, default=3, help="of weights, prompts and sampling")
    args = parser.parse_args()
    found: dict[str, list[torch.Tensor]] = {}
    for seed in range(args.seeds):
        for name, model in (("experts", EXPERTS), ("dense", DENSE)):
            for way, gap in measure(model, args.prompts, args.tokens, seed).items():
                found.setdefault(f"{name}, {way}", []).append(gap.flatten())
    print(f"{'|log p training - log p rollout|':36} {'mean':>9} {'99 %':>9} {'largest':>9}")
    for name, gaps in found.items():
        gap = torch.cat(gaps)
        print(f"{name:36} {gap.mean():9.4f} {gap.quantile(0.99):9.4f} {gap.max():9.4f}")


if __name__ == "__main__":
    main()
