"""Losses of routers and updates of their biases under strategy=megatron, against plain PyTorch."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import pytest
import torch
from torch.nn.functional import linear
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import CONFIG, TP, megatron_engine
from tests.workers.support import (
    EPS,
    LAYOUTS,
    LR,
    naive_outputs,
    naive_policy_loss,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
    with_log_probs,
)
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.workers.losses import PolicyLoss

pytest.importorskip("verl.plugins.megatron.library")

BALANCE, Z, RATE = 0.05, 0.02, 0.01
LOSSES = {"moe_aux_loss_coeff": BALANCE, "moe_z_loss_coeff": Z}
EXPERTS = TP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
CASES = {
    "experts": ("qwen3_moe", EXPERTS, "three"),
    "data": ("deepseek_v3", {}, "one by one"),
    "pipeline": ("deepseek_v3", {"pipeline_model_parallel_size": 2, "use_remove_padding": False}, "whole"),
    "context": ("deepseek_v3", {"context_parallel_size": 2, "enable_gradient_checkpointing": False}, "by tokens"),
}
BIAS = "model.layers.1.mlp.gate.e_score_correction_bias"


def override(family: str) -> dict[str, Any]:
    updates = {"moe_router_enable_expert_bias": True, "moe_router_bias_update_rate": RATE}
    return {"override_transformer_config": LOSSES | (updates if family == "deepseek_v3" else {})}


def on_two_ranks(rank, world_size, folder):
    result = {}
    for case, (family, settings, layout) in CASES.items():
        batch = torch.load(folder / f"{family}.pt", weights_only=False)
        engine = megatron_engine(str(folder / family), **settings, **override(family))
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.train_mode():
            metrics = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
            engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
        if case == "pipeline":
            engine.save_checkpoint(str(folder / "saved"), 1)
        result[case] = metrics, weights_of(engine)
    # The checkpoint has the biases, bit for bit.
    resumed = megatron_engine(str(folder / "deepseek_v3"), **EXPERTS, **override("deepseek_v3"))
    resumed.load_checkpoint(str(folder / "saved"))
    result["resumed"] = {}, weights_of(resumed)
    torch.save(result, folder / f"rank_{rank}.pt")


def plain_updates(path: str, family: str, batch: Any) -> tuple[dict[str, torch.Tensor], float, float, float]:
    """Weights after two updates, and of the first one the gradient norm and both losses as means over layers."""
    model: Any = AutoModelForCausalLM.from_pretrained(path)
    seen: dict[int, list[tuple[torch.Tensor, torch.Tensor]]] = defaultdict(list)
    sparse = [layer.mlp for layer in model.model.layers if hasattr(layer.mlp, "experts")]
    for index, mlp in enumerate(sparse):

        def record(module: Any, inputs: tuple[Any, ...], index: int = index, mlp: Any = mlp) -> None:
            hidden, chosen = inputs[0], inputs[1]
            seen[index].append((linear(hidden.flatten(0, -2), mlp.gate.weight), chosen))

        mlp.experts.register_forward_pre_hook(record)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    first: tuple[float, float, float] = (0.0, 0.0, 0.0)
    for step in range(2):
        seen.clear()
        optimizer.zero_grad()
        loss = naive_policy_loss(*naive_outputs(model, batch), batch, CONFIG)
        balance, z, loads = torch.zeros(()), torch.zeros(()), []
        for index in range(len(sparse)):
            logits = torch.cat([logits for logits, _ in seen[index]])
            chosen = torch.cat([chosen for _, chosen in seen[index]])
            load = torch.bincount(chosen.flatten(), minlength=8).float()
            scores = logits.sigmoid() if family == "deepseek_v3" else logits.softmax(-1)
            mean = (scores / scores.sum(-1, keepdim=True)).mean(0)
            balance = balance + 8 / 2 * (load / len(logits) * mean).sum()
            z = z + logits.logsumexp(-1).square().mean()
            loads.append(load)
        (loss + BALANCE * balance + Z * z).backward()
        norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        if step == 0:
            first = norm, balance.item() / len(sparse), z.item() / len(sparse)
        optimizer.step()
        for mlp, load in zip(sparse, loads, strict=True):
            if family == "deepseek_v3":
                mlp.gate.e_score_correction_bias += RATE * (load.mean() - load).sign()
    weights = dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n == BIAS}
    return {name: weight.detach() for name, weight in weights.items()}, *first


def test_routers_on_two_ranks_are_trained_as_by_plain_pytorch(tmp_path):
    expected = {}
    for family in ("qwen3_moe", "deepseek_v3"):
        path = tiny_model_dir(tmp_path / family, family)
        model = AutoModelForCausalLM.from_pretrained(path)
        with torch.no_grad():
            batch = with_log_probs(plain := ragged_batch(), naive_outputs(model, plain)[0])
        torch.save(batch, tmp_path / f"{family}.pt")
        expected[family] = plain_updates(path, family, batch)
    assert len(expected["deepseek_v3"][0][BIAS].unique()) > 1
    run_ranks(on_two_ranks, 2, tmp_path)
    for rank in range(2):
        result = torch.load(tmp_path / f"rank_{rank}.pt")
        _, resumed = result.pop("resumed")
        assert torch.equal(resumed[BIAS], result["pipeline"][1][BIAS])
        for case, (metrics, weights) in result.items():
            updated, norm, balance, z = expected[CASES[case][0]]
            assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5), case
            assert metrics["moe/aux_loss"] == pytest.approx(balance, rel=1e-5), case
            assert metrics["moe/z_loss"] == pytest.approx(z, rel=1e-5), case
            for name, weight in updated.items():
                assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=lambda t, n=name, c=case: f"{c} {n}: {t}")


def test_what_routers_need_is_told(tmp_path):
    moe, dense = tiny_model_dir(tmp_path / "moe", "qwen3_moe"), tiny_model_dir(tmp_path / "dense", "qwen3")
    with pytest.raises(ConfigError, match=r"moe_router_bias_update_rate=0\.001: routers of qwen3_moe have no bias"):
        megatron_engine(moe, override_transformer_config={"moe_router_enable_expert_bias": True})
    with pytest.raises(ConfigError, match=r"moe_z_loss_coeff=0\.1: qwen3 has no experts"):
        megatron_engine(dense, override_transformer_config={"moe_z_loss_coeff": 0.1})
    with pytest.raises(ConfigError, match=r"moe_aux_loss_coeff=0\.1, and model\.override_config has a balance loss"):
        megatron_engine(
            moe,
            override_config={"router_aux_loss_coef": 0.2},
            override_transformer_config={"moe_aux_loss_coeff": 0.1},
        )
