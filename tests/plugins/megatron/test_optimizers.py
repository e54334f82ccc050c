"""Optimizers under strategy=megatron: Muon in any layout, moments in bfloat16, state in host memory."""

import zlib
from typing import Any

import pytest
import torch
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import TP, megatron_engine
from tests.support.tiny_run import same
from tests.workers.engine.test_experts import CONFIGS
from tests.workers.support import EPS, LR, run_ranks, weights_of
from verl.config import FSDPOptimizerConfig
from verl.plugins.megatron import optimizer
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.engine.model.adapters import own_name
from verl.workers.engine.muon import hidden_matrices
from verl.workers.engine.optimizer import build_optimizer

pytest.importorskip("verl.plugins.megatron.library")

MUON = {"optimizer": "Muon", "lr": 3e-4, "weight_decay": 0.1, "override_optimizer_config": {"adamw": {"eps": EPS}}}
STATE = ("model", "optimizer")
ADAMW = {"lr": LR, "weight_decay": 0.1, "override_optimizer_config": {"eps": EPS}}
CASES = {
    "tensor": ("dense", TP),
    "pipeline": ("dense", {"pipeline_model_parallel_size": 2}),
    "data": ("dense", {}),
    "data, whole optimizer": ("dense", {"use_distributed_optimizer": False}),
    "experts": ("experts", {"expert_model_parallel_size": 2}),
    "experts by columns": ("experts", {"expert_tensor_parallel_size": 2}),
}
SAVED = ("tensor", "data")


def gradient_of(name, shape, step):
    return torch.randn(shape, generator=torch.Generator().manual_seed(1000 * step + zlib.crc32(name.encode()) % 1000))


def update(engine, step):
    """One step with known gradients, the same in every layout."""
    with engine.train_mode(), torch.no_grad():
        engine.optimizer_zero_grad()
        for region in engine.model.regions:
            whole = gradient_of(own_name(region.name), engine.model.shapes[region.name], step)
            box = tuple(slice(first, first + count) for first, count in zip(*region.box, strict=True))
            if region.parameter in engine.optimizer.parameters:
                region.write(engine.optimizer.parameters[region.parameter].main_grad, whole[box])
        engine.optimizer.step(1.0)
    return weights_of(engine)


def on_ranks(rank, world_size, folder, paths, cases, saved):
    weights = {}
    for case, (model, settings) in cases.items():
        engine = megatron_engine(paths[model], optimizer=MUON, **settings)
        update(engine, 1)
        if case in saved:
            engine.save_checkpoint(str(folder / case), 1)
            held = engine.state(1).states
        weights[case] = update(engine, 2)
        if case in saved:
            engine.load_state(held)
            assert same(update(engine, 2), weights[case])
    for case in saved:
        model, settings = cases[case]
        engine = megatron_engine(paths[model], optimizer=MUON, **settings)
        for saver in saved:
            if cases[saver][0] == model:
                engine.load_checkpoint(str(folder / saver), STATE)
                weights[f"{saver} as {case}"] = update(engine, 2)
    torch.save(weights, folder / f"rank_{rank}.pt")


def alone(path):
    """Weights after two steps of the optimizer on whole weights."""
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    optimizer = build_optimizer(
        model.parameters(), FSDPOptimizerConfig(**MUON), hidden_matrices(model, model.lm_head).values()
    )
    for step in (1, 2):
        for name, parameter in model.named_parameters():
            parameter.grad = gradient_of(name, parameter.shape, step)
        optimizer.step()
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    dense = tiny_model_dir(folder / "dense", "qwen3", tie_word_embeddings=True)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS["qwen3"]).save_pretrained(folder / "experts")
    tiny_tokenizer().save_pretrained(folder / "experts")
    return {"dense": dense, "experts": str(folder / "experts")}


def check_muon(paths, folder, cases, ranks, saved):
    """All ranks have the weights of plain PyTorch, matrices bit by bit."""
    run_ranks(on_ranks, ranks, folder, paths, cases, saved)
    found = [torch.load(folder / f"rank_{rank}.pt", weights_only=False) for rank in range(ranks)]
    expected = {model: alone(path) for model, path in paths.items()}
    for case, weights in found[0].items():
        wanted = expected[cases[case.rsplit(" as ")[-1]][0]]
        assert all(same(weights, other[case]) for other in found[1:])
        assert weights.keys() >= wanted.keys()  # biases of routers are no parameters
        for name, weight in ((name, weights[name]) for name in wanted):
            tolerance = 0 if weight.dim() > 1 and "embed" not in name else 1e-7  # AdamW's kernel takes other stretches
            message = lambda text, at=f"{case}, {name}": f"{at}: {text}"  # noqa: E731
            assert_close(weight, wanted[name], atol=tolerance, rtol=tolerance, msg=message)


def test_muon_on_two_ranks_is_muon_on_one(paths, tmp_path):
    check_muon(paths, tmp_path, CASES, 2, SAVED)


@pytest.mark.slow
def test_muon_on_four_ranks_is_muon_on_one(paths, tmp_path):
    experts = TP | {"expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    cases = {
        "tensor": ("dense", TP),
        "pipeline": ("dense", TP | {"pipeline_model_parallel_size": 2}),
        "experts": ("experts", experts),
        "experts by columns": ("experts", {"expert_tensor_parallel_size": 2}),
    }
    check_muon(paths, tmp_path, cases, 4, ("tensor", "pipeline"))


@pytest.mark.parametrize(("dtype", "of", "distributed"), [("bfloat16", ADAMW, True), ("fp32", MUON, False)])
def test_state_in_host_memory_changes_no_bit(paths, monkeypatch, tmp_path, dtype, of, distributed):
    monkeypatch.setattr(optimizer, "CHUNK", 5000)
    found, norms = [], []
    for fraction in (0.0, 0.5, 1.0):
        settings = of | {"offload_fraction": fraction}
        engine = megatron_engine(paths["dense"], dtype=dtype, optimizer=settings, use_distributed_optimizer=distributed)
        update(engine, 1)
        norms.append(engine.optimizer.grad_norm())
        engine.save_checkpoint(str(tmp_path / str(fraction)), 1)
        resumed = megatron_engine(paths["dense"], dtype=dtype, optimizer=settings)
        resumed.load_checkpoint(str(tmp_path / str(fraction)), STATE)
        found.append(update(engine, 2))
        assert same(update(resumed, 2), found[-1])
        held = [part.weights.numel() for part in engine.optimizer._parts if part.main in engine.optimizer._on_host]
        total = sum(parameter.numel() for parameter in engine.optimizer.parameters.values())
        # Whole chunks, of which one matrix may be larger.
        assert fraction - 0.25 <= sum(held) / total <= fraction + 0.01
        assert (fraction == 1) == (not list(engine.optimizer.tensors()))
    assert same(found[0], found[1])
    assert same(found[0], found[2])
    assert norms[0] == norms[1] == norms[2]  # it decides about clipping


class Counter(torch.optim.Optimizer):
    """It counts the steps of each element in whole numbers, as optimizers with quantized moments keep bytes."""

    def __init__(self, params, lr, weight_decay):
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                state = self.state[parameter]
                state["steps"] = state.get("steps", torch.zeros_like(parameter, dtype=torch.int16)) + 1


def test_states_keep_their_format_in_host_memory(paths):
    of_this_file = {"optimizer_impl": __name__, "optimizer": "Counter", "offload_fraction": 1.0}
    engine: Any = megatron_engine(paths["dense"], optimizer=of_this_file)
    update(engine, 1)
    update(engine, 2)
    counts = [state["steps"] for state in engine.optimizer.torch.state.values()]
    assert counts[0].dtype == torch.int16
    assert all((count == 2).all() for count in counts)


def test_moments_in_bfloat16_are_rounded_after_each_step(paths, tmp_path):
    stored = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
    engine: Any = megatron_engine(paths["dense"], optimizer=ADAMW | stored)
    name, (beta, beta_sq) = "model.layers.0.self_attn.q_proj.weight", (0.9, 0.999)
    weight = weights_of(engine)[name]
    exact, mean, square = weight.clone(), torch.zeros_like(weight), torch.zeros_like(weight)
    moments = [torch.zeros_like(weight), torch.zeros_like(weight)]
    for step in (1, 2, 3):
        gradient = gradient_of(name, weight.shape, step)
        if step == 3:
            engine.save_checkpoint(str(tmp_path), 2)
            resumed = megatron_engine(paths["dense"], optimizer=ADAMW | stored)
            resumed.load_checkpoint(str(tmp_path), STATE)
        mean, square = beta * mean + (1 - beta) * gradient, beta_sq * square + (1 - beta_sq) * gradient**2
        moments = [beta * moments[0] + (1 - beta) * gradient, beta_sq * moments[1] + (1 - beta_sq) * gradient**2]
        for values, (first, second) in ((weight, (mean, square)), (exact, moments)):
            root = (second / (1 - beta_sq**step)).sqrt()
            values.mul_(1 - LR * 0.1).sub_(LR * first / (1 - beta**step) / (root + EPS))
        mean, square = mean.bfloat16().float(), square.bfloat16().float()
        updated = update(engine, step)
        assert_close(updated[name], weight, atol=1e-7, rtol=0)
    assert (weight - exact).abs().max() > 1e-6
    assert same(update(resumed, 3), updated)
    sizes = {tensor.dtype for tensor in engine.optimizer.tensors()}
    assert sizes == {torch.bfloat16}
    elements = sum(parameter.numel() for parameter in engine.optimizer.parameters.values())
    assert 8 <= engine.state_bytes() / elements < 8.1  # buffers are padded
