"""Ragged batches, and what plain PyTorch makes of them: no packing, no micro-batches, no FSDP."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.forks import FORKS
from verl.algorithms import prepare_aggregation
from verl.protocol import DataProto
from verl.workers.config import ActorConfig, FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
from verl.workers.engine import BaseEngine, EngineRegistry, FSDPEngine, MicroBatchConfig

P, R = 6, 8
"""Prompt and response length of the batches here."""

LR, EPS = 1e-3, 1e-4
"""Of AdamW. Its step is lr · m / (√v + ε): with the usual tiny ε it would blow rounding errors up to lr."""

WHOLE = MicroBatchConfig()
LAYOUTS = {
    "whole": WHOLE,
    "one by one": MicroBatchConfig(micro_batch_size_per_gpu=1),
    "three": MicroBatchConfig(micro_batch_size_per_gpu=3),
    "by tokens": MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=20),
}


def ragged_batch(bsz: int = 8, vocab: int = 104, seed: int = 0) -> DataProto:
    """Prompts and responses of all lengths: row 0 has an empty response, row 1 a full one, row 2 a hole in its mask."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(1, P + 1, (bsz,), generator=g)
    response = torch.randint(1, R + 1, (bsz,), generator=g)
    response[0], response[1], response[2] = 0, R, R - 2
    attention_mask = torch.cat(
        [torch.arange(P) >= P - prompt[:, None], torch.arange(R) < response[:, None]], dim=1
    ).long()
    response_mask = attention_mask[:, P:].clone()
    response_mask[2, 2:4] = 0  # what a tool said
    ids = torch.randint(2, vocab, (bsz, P + R), generator=g) * attention_mask

    def noise(scale: float) -> Tensor:
        return torch.randn(bsz, R, generator=g) * scale * response_mask

    return DataProto.from_dict(
        tensors={
            "prompts": ids[:, :P],
            "responses": ids[:, P:],
            "input_ids": ids,
            "attention_mask": attention_mask,
            "position_ids": (attention_mask.cumsum(-1) - 1).clamp(min=0),
            "response_mask": response_mask,
            "advantages": noise(1.0),
            "values": noise(1.0),
            "returns": noise(1.0),
            "noise": noise(0.4),
        }
    )


def with_log_probs(batch: DataProto, log_probs: Tensor) -> DataProto:
    """``batch`` with old and reference log-probs around ``log_probs``, far enough for some ratios to be clipped."""
    noise = batch.batch["noise"]
    columns = {"old_log_probs": log_probs.detach() + noise, "ref_log_prob": log_probs.detach() - noise}
    # For prompt-mean: rows 0 1, 2 3, ... answer one prompt.
    columns |= prepare_aggregation("prompt-mean", batch.batch["response_mask"], [row // 2 for row in range(len(batch))])
    return batch | DataProto.from_dict(tensors=columns)


def ppo_batch(path: str, batch: DataProto | None = None) -> DataProto:
    """``batch``, or :func:`ragged_batch`, with old and reference log-probs around those of a model."""
    plain = ragged_batch() if batch is None else batch
    with torch.no_grad():
        log_probs, _ = naive_outputs(AutoModelForCausalLM.from_pretrained(path), plain)
    return with_log_probs(plain, log_probs)


def with_kept_ids(batch: DataProto, count: int = 5) -> DataProto:
    """One to ``count`` kept ids per token, that of the response among them; of every third token they are unknown."""
    g = torch.Generator().manual_seed(1)
    kept = torch.rand(len(batch), R, 104, generator=g).topk(count).indices.int()
    kept[(kept == batch.batch["responses"].unsqueeze(-1)).any(-1)] = torch.arange(count, dtype=torch.int32)
    kept[..., 0] = batch.batch["responses"]
    kept[torch.arange(count) > torch.arange(R).unsqueeze(-1) % count + torch.zeros_like(kept)] = -1
    kept[:, 2::3] = -1
    kept[batch.batch["response_mask"] == 0] = -1
    return batch | DataProto.from_dict({"kept_ids": kept})


def naive_outputs(model: Any, batch: DataProto, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Log-probs, over ``kept_ids`` where there are some, and entropy, by full logits of one sequence at a time.

    Both are (bsz, R).
    """
    columns = batch.batch
    no_ids = columns["response_mask"].new_zeros(*columns["response_mask"].shape, 0)
    rows_p, rows_h = [], []
    for ids, seen, chosen, kept_ids in zip(
        columns["input_ids"],
        columns["attention_mask"].bool(),
        columns["response_mask"],
        columns.get("kept_ids", no_ids),
        strict=True,
    ):
        tokens = ids[seen]
        logits = model(input_ids=tokens[None]).logits[0]
        log_p = (logits.to(torch.promote_types(logits.dtype, torch.float32)) / temperature).log_softmax(-1)
        start = int(seen[:P].sum())  # place of the first response token
        zero = log_p.sum() * 0.0
        p, h = [zero] * R, [zero] * R
        for t in range(R):
            if chosen[t]:
                before = log_p[start + t - 1]
                p[t], h[t] = before[tokens[start + t]], -(before.exp() * before).sum()
                if len(kept := kept_ids[t][kept_ids[t] >= 0].unique()):
                    p[t] = p[t] - before[kept].logsumexp(-1)
        rows_p.append(torch.stack(p))
        rows_h.append(torch.stack(h))
    return torch.stack(rows_p), torch.stack(rows_h)


def naive_aggregate(loss: Tensor, mask: Tensor, mode: str, factor: float | None = None) -> Tensor:
    """The denominators by their definition."""
    sums, lengths = (loss * mask).sum(-1), mask.sum(-1)
    if mode == "token-mean":
        return sums.sum() / lengths.sum()
    if mode == "token-sum":
        return sums.sum()
    if mode == "seq-mean-token-sum":
        return sums.mean()
    if mode == "seq-mean-token-mean":
        return (sums / lengths.clamp(min=1)).mean()
    if mode == "prompt-mean":
        pairs = sums.view(-1, 2).sum(-1) / lengths.view(-1, 2).sum(-1)
        return pairs.mean()
    assert mode == "seq-mean-token-sum-norm"
    return sums.mean() / (factor or loss.shape[1])


def naive_policy_loss(log_probs: Tensor, entropy: Tensor, batch: DataProto, config: ActorConfig) -> Tensor:
    """PPO with dual clip, entropy bonus and k3 divergence, written out."""
    columns = batch.batch
    mask, A = columns["response_mask"], columns["advantages"]
    ratio = (log_probs - columns["old_log_probs"]).exp()
    loss = torch.maximum(-A * ratio, -A * ratio.clamp(1 - config.clip_ratio_low, 1 + config.clip_ratio_high))
    loss = torch.where(A < 0, torch.minimum(loss, -A * config.clip_ratio_c), loss)
    gap = columns["ref_log_prob"] - log_probs
    kl = (gap.exp() - gap - 1).clamp(-10, 10)

    def total(x: Tensor) -> Tensor:
        return naive_aggregate(x, mask, config.loss_agg_mode, config.loss_scale_factor)

    result = total(loss) - config.entropy_coeff * total(entropy)
    return result + config.kl_loss_coef * total(kl) if config.use_kl_loss else result


def naive_update(path: str, batch: DataProto, config: ActorConfig, steps: int = 2) -> tuple[dict[str, Tensor], float]:
    """Weights after ``steps`` AdamW steps on the whole batch, and the norm of the first gradient."""
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    first = 0.0
    for step in range(steps):
        optimizer.zero_grad()
        naive_policy_loss(*naive_outputs(model, batch), batch, config).backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        first = float(norm) if step == 0 else first
        optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, first


def make_engine(
    path: str,
    model_type: str = "language_model",
    trained: bool = True,
    optimizer: dict[str, Any] | None = None,
    device_name: str = "cpu",
    frozen: tuple[str, ...] = (),
    strategy: str = "fsdp2",
    **settings: Any,
) -> FSDPEngine:
    """An initialised fp32 engine; ``settings`` go to the section that has them, those of the optimizer apart."""
    model_keys = HFModelConfig.__pydantic_fields__
    model = {key: value for key, value in settings.items() if key in model_keys}
    placement = {"dtype": "fp32"} | {key: value for key, value in settings.items() if key not in model_keys}
    engine = EngineRegistry.new(
        model_type,
        strategy,
        model_config=HFModelConfig(path=path, **model),
        engine_config=FSDPEngineConfig(forward_only=not trained, **placement),
        optimizer_config=FSDPOptimizerConfig(
            **({"lr": LR, "weight_decay": 0.1, "override_optimizer_config": {"eps": EPS}} | (optimizer or {}))
        )
        if trained
        else None,
        device_name=device_name,
        frozen=frozen,
    )
    engine.initialize()
    assert isinstance(engine, FSDPEngine)
    return engine


def has_fast_layers(engine: FSDPEngine) -> bool:
    """Whether attention, feed-forward and norm of every layer are computed by verl's kernels."""
    kinds = [type(module) for module in engine.model.modules()]
    fast = [kind for kind in kinds if kind.__mro__[1].__name__ in ("_FastAttention", "_FastMLP", "_FastRMSNorm")]
    known = [kind for kind in kinds if kind.__name__.endswith(("Attention", "MLP", "RMSNorm"))]
    return bool(fast) and fast == known


def weights_of(engine: BaseEngine) -> dict[str, Tensor]:
    """All weights, whole; every rank must ask."""
    return {name: tensor.clone() for name, tensor in engine.get_per_tensor_param()}


def share(batch: DataProto, rank: int, world_size: int) -> DataProto:
    """The rows of one rank: dealt out in turn."""
    return batch.select_idxs(list(range(rank, len(batch), world_size)))


TIMEOUT = timedelta(minutes=17)
"""Time limit of collectives in :func:`run_ranks`; not a default of PyTorch or megatron-core."""


def check_group_timeouts() -> None:
    """Check that no collective of this process has another time limit than those of the default group."""
    groups = dist.distributed_c10d._world.pg_map
    assert len(groups) > 1
    assert {group._get_backend(torch.device("cpu")).options._timeout for group in groups} == {TIMEOUT}


def run_ranks(function: Callable[..., None], world_size: int, folder: Path, *args: Any) -> None:
    """``function(rank, world_size, folder, *args)`` in processes that form a gloo group."""
    given = (function, world_size, folder, args, dict(os.environ))
    mp.start_processes(_rank, given, world_size, start_method=FORKS.get_start_method())


def _rank(
    rank: int, function: Callable[..., None], world_size: int, folder: Path, args: tuple, environment: dict[str, str]
) -> None:
    os.environ.update(environment, RANK=str(rank), WORLD_SIZE=str(world_size), LOCAL_RANK=str(rank))
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), world_size)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=TIMEOUT)
    function(rank, world_size, folder, *args)
    dist.barrier()
    dist.destroy_process_group()
