"""How far two passes over a mixture of experts are apart, with and without router replay.

    python -m benchmarks.router_replay [--prompts 16] [--tokens 64] [--seeds 3]

A rollout in bf16 samples from a model of random weights (4 layers of 16 experts, 2 per token), and training in fp32
computes the log-probs of the same tokens: first with experts of its own choice, then with those of the rollout
(actor.router_replay.mode=R3). Then half of the responses make one optimizer step, and the log-probs of the other half
are computed again, as the second mini-batch of an update does: with experts of its own choice, and with those of the
pass before the step (R2). A dense model of the same width shows what format and step alone do.
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
    FSDPOptimizerConfig,
    HFModelConfig,
    RolloutConfig,
    RouterReplayConfig,
)
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_tokenizer
from verl.workers.fsdp_workers import ActorRolloutRefWorker

PROMPT, RATE = 16, 1e-4
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


def policy(path: str, tokens: int, mode: Any, prompts: int, role: str = "actor_rollout") -> Any:
    """A policy that trains in fp32, ``prompts`` in each optimizer step, and samples in bf16."""
    routing = mode == "R3"
    actor = FSDPActorConfig(
        fsdp_config=FSDPEngineConfig(dtype="fp32"),
        router_replay=RouterReplayConfig(mode=mode),
        ppo_mini_batch_size=prompts,
        ppo_micro_batch_size_per_gpu=8,
        optim=FSDPOptimizerConfig(lr=RATE),
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
    worker = LocalWorkerGroup.describe(ActorRolloutRefWorker, device_name="cpu", config=config, role=role)
    group = LocalWorkerGroup(ray_cls_with_init=worker)
    group.init_model()
    return group


def measure(model: Any, prompts: int, tokens: int, seed: int) -> dict[str, torch.Tensor]:
    """Differences of log-probs at each token between two passes, by the name of the row."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(4, 104, (prompts, PROMPT), generator=generator)
    batch = DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={"uid": np.arange(prompts).astype(str).astype(object), "sample_index": np.zeros(prompts, int)},
        meta_info={"global_steps": seed, "validate": False},
    )
    kind = "experts" if model is EXPERTS else "dense"
    gaps: dict[str, torch.Tensor] = {}
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(seed)
        AutoModelForCausalLM.from_config(model).save_pretrained(folder)
        tiny_tokenizer().save_pretrained(folder)
        group = policy(folder, tokens, "R3" if model is EXPERTS else "disabled", prompts // 2)
        columns = batch.select(batch_keys=[]) | group.generate_sequences(batch)
        own, drawn = without_routing(columns), columns.batch["rollout_log_probs"]
        gaps[f"rollout: {kind}, own choice"] = log_probs(group, own) - drawn
        if model is EXPERTS:
            gaps["rollout: experts, R3"] = log_probs(group, columns) - drawn
            group = policy(folder, tokens, "R2", prompts // 2, role="actor")
        signs = torch.randint(0, 2, (prompts, 1), generator=generator) * 2.0 - 1
        advantages = DataProto.from_dict(tensors={"advantages": signs.expand(-1, tokens).clone()})
        replayed = own | group.compute_log_prob(own) | advantages
        group.update_actor(replayed[: prompts // 2])
        later = replayed[prompts // 2 :]
        before = later.batch["old_log_probs"]
        gaps[f"update: {kind}, own choice"] = log_probs(group, without_routing(later)) - before
        if model is EXPERTS:
            gaps["update: experts, R2"] = log_probs(group, later) - before
    return gaps


def without_routing(batch: DataProto) -> DataProto:
    """The batch without the column of chosen experts."""
    return batch.select(batch_keys=[name for name in batch.batch.keys() if name != "routed_experts"])


def log_probs(group: Any, batch: DataProto) -> torch.Tensor:
    """Log-probs of the responses under the weights that the policy has now, (prompts, tokens)."""
    return group.compute_log_prob(batch).batch["old_log_probs"]


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=64, help="of each response")
    parser.add_argument("--seeds", type=int, default=3, help="of weights, prompts and sampling")
    args = parser.parse_args()
    found: dict[str, list[torch.Tensor]] = {}
    for seed in range(args.seeds):
        for model in (EXPERTS, DENSE):
            for name, gap in measure(model, args.prompts, args.tokens, seed).items():
                found.setdefault(name, []).append(gap.abs().flatten())
    print(f"{'|difference of log p|':36} {'mean':>9} {'99 %':>9} {'largest':>9}")
    for name, gaps in found.items():
        gap = torch.cat(gaps)
        print(f"{name:36} {gap.mean():9.4f} {gap.quantile(0.99):9.4f} {gap.max():9.4f}")


if __name__ == "__main__":
    main()
