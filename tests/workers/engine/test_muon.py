"""Muon: a step by its definition in float64, and which weights it has. Two ranks and resuming: test_two_ranks.py."""

import re
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from verl.config import FSDPOptimizerConfig
from verl.errors import ConfigError
from verl.workers.engine.muon import hidden_matrices
from verl.workers.engine.optimizer import build_optimizer, state_bytes

LR, DECAY = 0.1, 0.5


def orthogonalized(matrix):
    """The polynomial of Newton-Schulz, five times on each singular value."""
    u, values, v = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.norm()
    for _ in range(5):
        values = 3.4445 * values - 4.775 * values**3 + 2.0315 * values**5
    return u * values @ v


def test_a_step_by_hand():
    # Singular values 0.6 and 0.8 of the normalised gradient become 0.7229 and 1.1192; s = 0.2 √2.
    weight, bias = nn.Parameter(torch.ones(2, 2)), nn.Parameter(torch.ones(2))
    config = FSDPOptimizerConfig(
        optimizer="Muon", lr=LR, weight_decay=DECAY, override_optimizer_config={"adamw": {"lr": 0.01}}
    )
    optimizer = build_optimizer([weight, bias], config, [weight])
    weight.grad, bias.grad = torch.diag(torch.tensor([3.0, 4.0])), torch.tensor([5.0, -5.0])
    optimizer.step()
    expected = torch.tensor([[0.95 - 0.02045, 0.95], [0.95, 0.95 - 0.03166]])
    assert_close(weight.data, expected, atol=1e-3, rtol=0)  # PyTorch iterates in bf16
    assert_close(bias.data, torch.tensor([0.985, 1.005]))  # AdamW: decay of 0.01 * 0.5, then a step of lr
    assert_close(optimizer.state[weight]["momentum_buffer"], 0.05 * weight.grad)
    assert optimizer.state[bias].keys() == {"step", "exp_avg", "exp_avg_sq"}
    assert state_bytes(optimizer) == 4 * (4 + 2 * 2)


@pytest.mark.parametrize("rule", ["original", "match_rms_adamw"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_two_steps_by_the_definition_and_by_pytorch(rule, nesterov):
    g = torch.Generator().manual_seed(0)
    shapes = [(5, 3), (3, 5), (2, 4, 3)]  # the last are two experts
    weights = [nn.Parameter(torch.randn(shape, generator=g)) for shape in shapes]
    gradients = [[torch.randn(shape, generator=g) for shape in shapes] for _ in range(2)]
    settings = {"adjust_lr_fn": rule, "nesterov": nesterov, "momentum": 0.9}
    config = FSDPOptimizerConfig(optimizer="Muon", lr=LR, weight_decay=DECAY, override_optimizer_config=settings)
    optimizer = build_optimizer(weights, config, weights)
    alone = [nn.Parameter(weight.detach().clone()) for weight in weights[:2]]
    pytorch = torch.optim.Muon(alone, lr=LR, weight_decay=DECAY, **settings)
    expected = [weight.detach().double() for weight in weights]
    moments = [torch.zeros(shape).double() for shape in shapes]
    for of_step in gradients:
        for index, (weight, gradient) in enumerate(zip(weights, of_step, strict=True)):
            weight.grad = gradient.clone()
            moments[index] = 0.9 * moments[index] + 0.1 * gradient
            direction = 0.9 * moments[index] + 0.1 * gradient if nesterov else moments[index]
            rows, columns = gradient.shape[-2:]
            scale = max(1, rows / columns) ** 0.5 if rule == "original" else 0.2 * max(rows, columns) ** 0.5
            each = direction.view(-1, rows, columns)
            change = torch.stack([orthogonalized(matrix) for matrix in each]).view_as(direction)
            expected[index] = (1 - LR * DECAY) * expected[index] - LR * scale * change
        for weight, gradient in zip(alone, of_step[:2], strict=True):
            weight.grad = gradient.clone()
        pytorch.step()
        optimizer.step()
    assert_close(weights[:2], alone)
    for weight, known in zip(weights, expected, strict=True):
        assert_close(weight.detach().double(), known, atol=0.012, rtol=0)  # PyTorch iterates in bf16


def test_matrices_of_hidden_layers_are_those_of_muon():
    sizes: dict[str, Any] = {
        "vocab_size": 20,
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "head_dim": 4,
    }
    sizes |= {"num_key_value_heads": 1, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 6}
    model = AutoModelForCausalLM.from_config(Qwen3MoeConfig(**sizes))

    def names():
        return {name.split("layers.0.")[-1] for name in hidden_matrices(model, model.lm_head)}

    attention = {f"self_attn.{name}_proj" for name in "qkvo"}
    experts = {"mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"}
    assert names() == {f"{name}.weight" for name in attention} | experts
    adapted = LoraConfig(r=2, target_modules=["q_proj", "embed_tokens"], target_parameters=["experts.down_proj"])
    get_peft_model(model, adapted)
    assert names() == {f"self_attn.q_proj.lora_{factor}.default.weight" for factor in "AB"}


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"betas": [0.9, 0.95]}, "override_optimizer_config.betas=.*Muon has no such setting"),
        ({"adamw": {"fused": False}}, "adamw.fused=false: Muon has no such setting"),
        ({"adjust_lr_fn": "adamw"}, "adjust_lr_fn=adamw: Muon has no such rule"),
        ({"adamw": 1e-4}, "adamw=0.0001: it holds settings by name"),
    ],
)
def test_settings_that_it_does_not_have_are_problems(settings, problem):
    config = FSDPOptimizerConfig(optimizer="Muon", override_optimizer_config=settings)
    assert re.search(problem, "\n".join(str(found) for found in config.problems("optim")))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16", "betas": (0.9, 0.99)}, []),
        ({"exp_avg_sq_dtype": "bf16"}, [("o.exp_avg_sq_dtype=bf16: with o.betas=[0.9, 0.999]", True)]),
    ],
)
def test_moments_that_bfloat16_cannot_lower_are_advised_against(settings, said):
    problems = [(str(found).split(" this")[0], found.advice) for found in FSDPOptimizerConfig(**settings).problems("o")]
    assert problems == said
    assert (torch.tensor(0.3).bfloat16() * 0.999).bfloat16() == torch.tensor(0.3).bfloat16()


def test_muon_without_whole_matrices_is_refused():
    with pytest.raises(ConfigError, match="which weights are matrices"):
        build_optimizer(nn.Linear(2, 2).parameters(), FSDPOptimizerConfig(optimizer="Muon"))
