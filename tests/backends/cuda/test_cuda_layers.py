"""Which layers of Transformers the GPU's backend replaces; what they compute runs on a GPU: ``pytest -m gpu``."""

from __future__ import annotations

import importlib.util
import os

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from transformers.models.glm4.modeling_glm4 import apply_rotary_pos_emb as rotate_pairs
from transformers.models.qwen3.modeling_qwen3 import apply_rotary_pos_emb

from verl.backends import backend_for
from verl.backends.cuda.decode_attention import decode_attention, parts_of_rows
from verl.backends.cuda.layers import _FusedRMSNorm, _rotates_halves, fuses_layers, use_fused_layers
from verl.errors import ConfigError
from verl.testing.models import tiny_model

INTERPRETS = os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None
"""Whether Triton's kernels run on the CPU, by its interpreter."""
on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def test_only_rotations_of_halves_are_replaced():
    assert _rotates_halves(apply_rotary_pos_emb)
    assert not _rotates_halves(rotate_pairs)  # of neighbours
    assert not _rotates_halves(lambda query, key, cos, sin, sections: (query, key))


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2", "qwen3_moe"])
def test_replaced_layers_leave_a_cpu_its_results_and_are_undone(family):
    model, ids = tiny_model(family).eval(), torch.arange(2, 9)[None]
    expected, classes = model(ids).logits, [type(module) for module in model.modules()]
    undo = use_fused_layers(model)
    replaced = {type(m).__name__ for m, kind in zip(model.modules(), classes, strict=True) if type(m) is not kind}
    assert len(replaced) >= 2
    assert all(name.endswith(("RMSNorm", "MLP", "Attention")) for name in replaced)
    assert any(name.endswith("MLP") for name in replaced) == (family in ("llama", "qwen3"))  # gemma2's gate is GELU
    norms = {(m._offset, m._casting) for m in model.modules() if isinstance(m, _FusedRMSNorm)}
    assert norms == {(1.0, "gemma") if family == "gemma2" else (0.0, "llama")}
    assert_close(model(ids).logits, expected, atol=0, rtol=0)  # the kernels are for tensors on a GPU
    undo()
    assert [type(module) for module in model.modules()] == classes


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="liger-kernel is installed")
def test_a_package_that_is_missing_is_refused_where_it_is_asked_for():
    assert not fuses_layers(None)
    assert not fuses_layers(False)
    with pytest.raises(ConfigError, match="use_liger=true: the package liger-kernel is not installed"):
        fuses_layers(True)
    backend_for(torch.device("cpu"), use_liger=True)  # it has no effect there


def test_layers_are_fused_where_the_package_is_installed_unless_the_run_says_no(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    assert [fuses_layers(use_liger) for use_liger in (None, True, False)] == [True, True, False]


def test_few_rows_are_divided_among_more_programs():
    # 2 · 132 programs are wanted; each part has at least 256 tokens.
    assert parts_of_rows(rows=64, tokens=8192, kv_heads=8, processors=132) == 1
    assert parts_of_rows(rows=4, tokens=8192, kv_heads=8, processors=132) == 9
    assert parts_of_rows(rows=1, tokens=600, kv_heads=2, processors=132) == 3


def plain_attention(query, key, value, keys, values, positions, scale, window, softcap):
    """Of each row alone, in float64."""
    out, group = torch.zeros_like(query), query.shape[1] // keys.shape[1]
    for row, position in enumerate(positions.tolist()):
        keys[row, :, position], values[row, :, position] = key[row], value[row]
        start = 0 if window is None else max(0, position - window + 1)
        k, v = (x[row, :, start : position + 1].double().repeat_interleave(group, 0) for x in (keys, values))
        scores = (k @ query[row].double()[..., None]).squeeze(-1) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        out[row] = (scores.softmax(-1)[:, None] @ v).squeeze(1).to(out.dtype)
    return out


@pytest.mark.parametrize(
    "rows, heads, kv_heads, tokens, width",
    [(3, 4, 2, 300, 16), pytest.param(70, 16, 8, 640, 128, marks=on_gpu), (2, 5, 1, 900, 64)],
)
@pytest.mark.parametrize("window, softcap", [(None, None), (100, None), (None, 5.0)])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), pytest.param(torch.bfloat16, 1e-2, marks=on_gpu)])
class TestDecodeAttention:
    pytestmark = [
        pytest.mark.gpu,
        pytest.mark.skipif(
            not INTERPRETS and not torch.cuda.is_available(), reason="needs a CUDA device, or TRITON_INTERPRET=1"
        ),
    ]

    def test_equals_attention_of_each_row(
        self, rows, heads, kv_heads, tokens, width, window, softcap, dtype, tolerance
    ):
        draw = torch.Generator().manual_seed(0)
        query = 3 * torch.randn(1, heads, rows, width, generator=draw)[0].transpose(0, 1)
        key = torch.randn(1, kv_heads, rows, width, generator=draw)[0].transpose(0, 1)
        value = torch.randn(rows, kv_heads, width, generator=draw)
        keys, values = (torch.randn(rows, kv_heads, tokens, width, generator=draw) for _ in range(2))
        positions = torch.randint(tokens, (rows,), generator=draw)
        positions[0], positions[1] = 0, tokens - 1
        states = [x.to(dtype) for x in (query, key, value, keys, values)]
        device = "cuda" if torch.cuda.is_available() else "cpu"
        copies = [x.to(device, copy=True) for x in states]
        settings = width**-0.5, window, softcap
        found = decode_attention(*copies, positions.to(device), *settings)
        expected = plain_attention(*states, positions, *settings)
        assert_close(found.cpu(), expected, atol=tolerance, rtol=tolerance)
        assert torch.equal(copies[3].cpu(), states[3])
        assert torch.equal(copies[4].cpu(), states[4])


@pytest.mark.parametrize("family", ["llama", "qwen3", "gemma2"])
@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)])
class TestFusedLayers:
    pytestmark = [
        *on_gpu,
        pytest.mark.skipif(not importlib.util.find_spec("liger_kernel"), reason="needs liger-kernel"),
    ]

    def test_have_the_results_and_gradients_of_the_others(self, family, dtype, tolerance):
        model, ids = tiny_model(family).to("cuda", dtype).eval(), torch.arange(2, 40, device="cuda")[None]

        def results() -> list[torch.Tensor]:
            model.zero_grad()
            logits = model(ids).logits.float()
            nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
            return [logits.detach(), *(p.grad.float() for p in model.parameters())]

        expected = results()
        undo = use_fused_layers(model)
        for found, wanted in zip(results(), expected, strict=True):
            assert (found - wanted).norm() <= tolerance * wanted.norm() + 1e-9
        undo()
