"""Weights of 8 bits in the native engine: how they are rounded, their memory, and what is computed with them."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from torch import Tensor

from tests.support.vision_models import tiny_vision_model
from tests.workers.rollout.test_native_rollout import engine_for, full_forward, saved
from verl.errors import RolloutError
from verl.testing.models import tiny_model
from verl.testing.rollout_conformance import greedy
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.adapted_layers import computes_adapters
from verl.workers.rollout.file_names import FileNames
from verl.workers.rollout.native.model import NativeModel
from verl.workers.rollout.quantized_layers import FORMATS
from verl.workers.rollout.vllm_rollout import VLLMRollout

PROMPTS = ([10, 20, 30, 40], [7, 8])
# The numbers of e4m3: 3 bits of mantissa, exponents -6 to 8 and subnormals below, without infinity.
E4M3 = np.array(
    [m / 8 * 2.0**-6 for m in range(8)] + [(1 + m / 8) * 2.0**e for e in range(-6, 9) for m in range(8)][:-1]
)


def test_weights_are_rounded_by_output() -> None:
    weight = torch.tensor([[127.0, -63.5, 0.4, 2.5], [-0.254, 0.001, 0.003, 0.0], [0, 0, 0, 0]])
    q, s = FORMATS["int8"].quantize(weight)
    assert q.tolist() == [[127, -64, 0, 2], [-127, 0, 2, 0], [0, 0, 0, 0]]  # 0.5 to even; 0.003 / 0.002 = 1.5 to even
    torch.testing.assert_close(s, torch.tensor([[1.0], [0.002], [1.0]]))
    weight = torch.tensor([[-448.0, 17.0, 1.07, 0.0009], [224, 9.5, 10.6, 0]])
    q, s = FORMATS["fp8"].quantize(weight)
    assert s.tolist() == [[1.0], [0.5]]
    # Steps of 2 from 16 to 32, of 1/8 from 1 to 2, of 1/512 near 0; 17 and 19 to even.
    assert q.float().tolist() == [[-448, 16, 1.125, 0], [448, 20, 22, 0]]
    for quantization in FORMATS.values():  # the least number of fp32, whose scale would be 0
        q, s = quantization.quantize(torch.tensor([[2.0**-149, 0.0]]))
        assert (q.float().tolist(), s.item()) == ([[0, 0]], 1)
    columns, of_columns = FORMATS["int8"].quantize(weight.T[None], inputs=-2)
    rows, of_rows = FORMATS["int8"].quantize(weight)
    assert torch.equal(columns[0].T, rows)
    assert torch.equal(of_columns[0].T, of_rows)


def is_quantized(name: str, tensor: Tensor) -> bool:
    """Matrices of decoder layers but for those of routers, whose name ends with ``gate``."""
    return ".layers." in name and tensor.dim() >= 2 and not name.endswith("gate.weight")


def rounded(weight: Tensor, quantization: str) -> Tensor:
    """s q by NumPy, in float64."""
    w = weight.numpy()
    s = np.abs(w).max(-1, keepdims=True) / np.float32(127 if quantization == "int8" else 448)
    ratio = w / s
    q = np.rint(ratio) if quantization == "int8" else np.sign(ratio) * nearest(np.abs(ratio))
    return torch.from_numpy(q.astype(np.float64) * s)


def nearest(x: np.ndarray) -> np.ndarray:
    above = np.searchsorted(E4M3, x).clip(1, len(E4M3) - 1)
    low, high = E4M3[above - 1], E4M3[above]
    return np.where(x - low < high - x, low, high)


def oracle_of(model: transformers.PreTrainedModel, quantization: str) -> transformers.PreTrainedModel:
    exact = copy.deepcopy(model).double()
    exact.set_experts_implementation("eager")  # the one that knows float64
    with torch.no_grad():
        for (name, weight), of_model in zip(exact.named_parameters(), model.parameters(), strict=True):
            if is_quantized(name, weight):
                weight.copy_(rounded(of_model, quantization))
    return exact


@pytest.mark.parametrize(("family", "quantization"), [("qwen3", "int8"), ("qwen3", "fp8"), ("qwen3_moe", "int8")])
def test_log_probs_are_those_of_rounded_weights(tmp_path: Path, family: str, quantization: str) -> None:
    """In two versions of the weights; memory is a byte for each rounded weight, and four for each scale."""
    model = tiny_model(family).requires_grad_(False)
    engine: Any = engine_for(saved(model, tmp_path), quantization=quantization, free_cache_engine=True)
    for version in (0, 1):
        expected = oracle_of(model, quantization)
        engine.wake()
        engine.load_weights(model.named_parameters(), version)
        outputs = engine.generate([greedy(prompt) for prompt in PROMPTS])
        for prompt, output in zip(PROMPTS, outputs, strict=True):
            log_probs = full_forward(expected, prompt, output.token_ids)
            torch.testing.assert_close(torch.tensor(output.log_probs).double(), log_probs, atol=2e-6, rtol=1e-5)
            assert (log_probs - full_forward(model, prompt, output.token_ids)).abs().max() > 1e-3
        sizes = {True: 0, False: 0}
        for name, weight in model.named_parameters():
            sizes[is_quantized(name, weight)] += weight.numel()
            sizes[False] += weight.shape[:-1].numel() if is_quantized(name, weight) else 0
        assert engine.weight_bytes == sizes[True] + 4 * sizes[False]
        engine.sleep()
        assert engine.weight_bytes == 0
        for weight in model.parameters():  # in place, as an optimizer does
            weight.mul_(1.3)


def test_adapters_stay_exact_beside_rounded_weights(tmp_path: Path) -> None:
    """They change the log-probs and are less than half a step of int8, so merged ones would be rounded away."""
    model = tiny_model("qwen3").requires_grad_(False)
    engine = engine_for(saved(model, tmp_path), quantization="int8")
    layer = "model.layers.0.mlp.up_proj"
    weight = model.get_parameter(f"{layer}.weight")
    outputs, inputs = weight.shape
    down, up = torch.linspace(-1, 1, inputs)[None] * 1e-3, torch.linspace(-0.4, 0.4, outputs)[:, None]

    def adapters() -> Iterator[tuple[str, Tensor]]:
        yield from {f"{layer}.lora_A.weight": down, f"{layer}.lora_B.weight": up}.items()

    engine.wake()
    engine.load_adapted(AdaptedWeights(lambda: iter(model.named_parameters()), adapters, {layer: 2.0}), 0)
    output = engine.generate([greedy(PROMPTS[0])])[0]
    expected = oracle_of(model, "int8")
    without = full_forward(expected, PROMPTS[0], output.token_ids)
    change = 2.0 * up.double() @ down.double()
    assert change.abs().max() < FORMATS["int8"].quantize(weight)[1].min() / 2
    with torch.no_grad():
        expected.get_parameter(f"{layer}.weight").add_(change)
    log_probs = full_forward(expected, PROMPTS[0], output.token_ids)
    torch.testing.assert_close(torch.tensor(output.log_probs).double(), log_probs, atol=2e-6, rtol=1e-5)
    assert (log_probs - without).abs().max() > 1e-4
    adapted, settings = HFModelConfig(path="m", lora_rank=4), {"dtype": "float32", "tensor_model_parallel_size": 1}
    assert computes_adapters(RolloutConfig(name="native", quantization="int8", **settings), adapted)
    assert not computes_adapters(RolloutConfig(name="native", **settings), adapted)


def test_vllm_gets_rounded_weights_and_their_scales() -> None:
    model = tiny_model("qwen3").requires_grad_(False)
    rollout: Any = object.__new__(VLLMRollout)  # made as usual it starts a server
    rollout.config = RolloutConfig(name="vllm", quantization="int8")
    rollout._empty_model, rollout._file_names = model, FileNames(model)
    rollout._ranks_of_machines, rollout.device = {}, torch.device("cpu")
    sent = dict(rollout._in_files(model.named_parameters()))
    layers = {name for name, weight in model.named_parameters() if is_quantized(name, weight)}
    assert sent.keys() == {name for name, _ in model.named_parameters()} | {f"{name}_scale" for name in layers}
    assert {name for name, tensor in sent.items() if tensor.dtype == torch.int8} == layers


def test_only_linear_layers_of_the_decoder_are_rounded() -> None:
    config = transformers.GPT2Config(vocab_size=104, n_embd=32, n_layer=1, n_head=2)
    with pytest.raises(RolloutError, match="GPT2LMHeadModel: it has no linear layers"):
        NativeModel(config, torch.float32, torch.device("cpu"), quantization=FORMATS["int8"])
    with_images = tiny_vision_model().config
    model = NativeModel(with_images, torch.float32, torch.device("cpu"), quantization=FORMATS["int8"]).module
    names = {name for name, module in model.named_modules() if hasattr(module, "_verl_quantized")}
    layers = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj")
    layers += ("mlp.up_proj", "mlp.down_proj")
    assert names == {f"model.language_model.layers.{index}.{layer}" for index in (0, 1) for layer in layers}
