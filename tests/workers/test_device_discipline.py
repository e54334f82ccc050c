"""What runs on a GPU runs on PyTorch's meta device too, which refuses tensors that were made on the CPU by mistake.

Operations on the meta device compute shapes and no values, and fail if a tensor of another device takes part. So code
runs there unless it looks at values. What must look at values is named here.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.support import losses
from tests.support.estimators import SETTINGS, random_batch
from tests.workers.cuda_branches import branches
from verl.algorithms import LossTotals, adv_needs, evaluate_policy_loss, policy_loss_info, prepare_update
from verl.algorithms.estimator_registry import ESTIMATORS
from verl.algorithms.value_loss import compute_value_loss
from verl.protocol import DataProto
from verl.testing.models import tiny_model
from verl.utils.transformers_private import use_attention
from verl.workers.engine.model.headed import HeadedModel, enable_gradient_checkpointing
from verl.workers.engine.model.inputs import prepare_inputs
from verl.workers.packed_attention import PACKED_ATTENTION, Packing
from verl.workers.rollout.native.memory import CopiedPromptMemory
from verl.workers.rollout.native.model import NativeModel
from verl.workers.rollout.request import SamplingParams
from verl.workers.rollout.sampling import TokenSampler

ROOT = Path(__file__).parents[2]
META = torch.device("meta")
LOOK_AT_VALUES = {
    "maxrl": "refuses negative rewards",
    "grpo_per_turn": "counts turns",
    "gigpo": "counts turns, and compares tokens",
    "gdpo": "reads columns of the reward function, which are no tensors",
}
"""Estimators that cannot run without values; they run on the driver, whose tensors are on the CPU. So do the masks of
Transformers for padded rows."""


def on_meta(columns: dict[str, Any]) -> dict[str, Any]:
    return {name: value.to(META) if isinstance(value, Tensor) else value for name, value in columns.items()}


def all_on_meta(values: Any) -> bool:
    return all(value.device == META for value in values if isinstance(value, Tensor))


def batch() -> DataProto:
    """Three rows of up to 4 prompt and 4 response tokens, padded on both sides."""
    mask = torch.tensor([[0, 1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0, 0, 0]])
    ids = torch.arange(2, 26).view(3, 8) * mask
    columns = {
        "input_ids": ids,
        "attention_mask": mask,
        "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
        "responses": ids[:, 4:],
        "response_mask": mask[:, 4:],
    }
    return DataProto.from_dict(tensors=columns)


def test_the_device_refuses_what_was_made_elsewhere():
    with pytest.raises(RuntimeError, match="device"):
        torch.ones(2, device=META) + torch.ones(2)


@pytest.mark.parametrize(
    ("family", "checkpoints"),
    [("qwen3", True), ("qwen2", False), ("llama", True), ("gemma2", False), ("mistral", True)],
)
def test_packed_passes_of_the_trainer(family, checkpoints):
    model = HeadedModel(tiny_model(family).to(META), "lm_head").train()
    if checkpoints:
        enable_gradient_checkpointing(model)
    use_attention(model.hf, PACKED_ATTENTION)
    # Which tokens there are is decided on the CPU; the inputs then move.
    inputs = prepare_inputs(batch(), True, META)
    assert all_on_meta(vars(inputs).values())
    found = model(inputs, frozenset({"log_probs", "entropy", "sum_pi_squared"}), 0.7)
    assert all_on_meta(found.values())
    columns = {name: inputs.scatter(values) for name, values in found.items()}
    assert columns["log_probs"].shape == (3, 4)
    (columns["log_probs"].sum() + columns["entropy"].sum()).backward()
    assert all_on_meta(parameter.grad for parameter in model.parameters())
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_scalar_head():
    model = HeadedModel(tiny_model("qwen3", task="token_classification").to(META), "score")
    use_attention(model.hf, PACKED_ATTENTION)
    values = model(prepare_inputs(batch(), True, META), frozenset({"values"}), 1.0)["values"]
    assert values.device == META
    assert values.shape == (2 + 4 + 1,)


@pytest.mark.parametrize(("name", "mode"), losses.PAIRS)
def test_policy_losses(name, mode):
    config, data = losses.actor(name, loss_agg_mode=mode), losses.batch(0)
    made = prepare_update({**data, "index": losses.groups(6)}, config, 0)
    totals: Any = on_meta(dict(LossTotals(row_weights=made.get("row_weights"))))
    columns = on_meta(data | made)
    log_probs = columns["log_probs"].requires_grad_()
    weights = torch.ones_like(log_probs) if policy_loss_info(name).takes_weights else None
    loss, metrics = evaluate_policy_loss(policy_loss_info(name), log_probs, columns, weights, mode, config, totals)
    loss.backward()
    assert all_on_meta([loss, log_probs.grad, *metrics.values()])


@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_the_value_loss(mode):
    columns = on_meta(random_batch(0))
    found = compute_value_loss(
        columns["values"], columns["returns"], columns["old_log_probs"], columns["response_mask"], 0.5, mode
    )
    assert all_on_meta(found)


@pytest.mark.parametrize("name", sorted(set(ESTIMATORS.names()) - set(LOOK_AT_VALUES)))
def test_advantage_estimators(name):
    function, columns = adv_needs(name).function, on_meta(random_batch(0))
    known = SETTINGS | columns
    arguments = {name: known[name] for name in inspect.signature(function).parameters if name in known}
    advantages, returns = function(**arguments)
    assert all_on_meta([advantages, returns])
    assert advantages.shape == columns["response_mask"].shape


@pytest.mark.parametrize("raw", [True, False])
def test_sampling(raw):
    params = [SamplingParams(max_tokens=3, seed=1), SamplingParams(max_tokens=2, temperature=0.0, seed=2)]
    params.append(SamplingParams(max_tokens=3, top_p=0.9, top_k=5, min_p=0.01, seed=3))
    sampler = TokenSampler(params, META, raw, never=[7])
    rows = torch.arange(3, device=META)
    tokens, log_probs = sampler(torch.zeros(3, 104, device=META), rows, torch.zeros(3, dtype=torch.long, device=META))
    assert all_on_meta([tokens, log_probs])
    assert tokens.shape == log_probs.shape == (3,)


@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral"])
def test_native_decoding(family):
    config = tiny_model(family).config
    model = NativeModel(config, torch.bfloat16, META)
    memory = model.memory(4, 8, 8)
    assert isinstance(memory, CopiedPromptMemory)
    prompts = [[3, 4, 5], [6, 7]]
    memory.admit([3, 2], [2, 1])
    logits = model.prefill(memory, prompts)
    assert logits.shape == (2, 104)
    for _ in range(3):
        logits = model.decode(memory, torch.zeros(3, dtype=torch.long, device=META))
        assert logits.shape == (3, 104)
        assert logits.device == META
    memory.admit([2], [1])
    assert model.prefill(memory, [[8, 9]]).shape == (1, 104)
    assert all_on_meta([memory.lengths, memory.prompt_lengths, memory.positions])


def test_bounds_of_packed_sequences_go_to_the_device_of_the_row():
    assert Packing.from_lengths([3, 1], META).cu_seqlens.device == META


def listed() -> dict[str, str]:
    """The rows of device_branches.md: place → the test that runs it."""
    rows = (line.split("|") for line in (ROOT / "tests/workers/device_branches.md").read_text().splitlines())
    return {row[1].strip(" `"): row[2].strip() for row in rows if len(row) == 4 and ":" in row[1] and "`" in row[1]}


def test_every_branch_by_device_is_listed():
    assert set(listed()) == branches(ROOT / "verl")


def test_listed_tests_exist_and_need_a_gpu():
    for place, test in listed().items():
        if not test.startswith("`"):
            assert test.startswith("none: "), place
            continue
        file, name = test.strip("`").split("::")
        source = (ROOT / "tests" / file).read_text()
        assert f"def {name}(" in source, place
        assert "pytest.mark.gpu" in source, place
