"""Packed attention against attention with a full mask, and the isolation of sequences."""

import sys

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close

from verl.errors import ConfigError
from verl.workers.packed_attention import (
    AttentionRule,
    Packing,
    _imports_flash_attn,
    _varlen_kernel_of,
    attend,
    attend_packed,
    packed_attention_forward,
)

LENGTHS = [5, 1, 7]


class Layer(torch.nn.Module):
    is_causal = True


def rows(heads, dim=8, seed=0):
    return torch.randn(1, heads, sum(LENGTHS), dim, generator=torch.Generator().manual_seed(seed))


def naive(query, key, value, window=None, softcap=None, scaling=8**-0.5):
    """Softmax over what each token may see, written with one mask over the whole row."""
    group = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
    sequence = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    place = torch.arange(sum(LENGTHS))
    back = place[:, None] - place[None]
    visible = (sequence[:, None] == sequence[None]) & (back >= 0) & (back < (window or 10**6))
    scores = query @ key.transpose(2, 3) * scaling
    scores = scores if softcap is None else softcap * torch.tanh(scores / softcap)
    return (scores.masked_fill(~visible, float("-inf")).softmax(-1) @ value).transpose(1, 2)


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("softcap", [None, 0.5])
def test_equals_full_mask(kv_heads, window, softcap):
    query, key, value = rows(4, seed=1), rows(kv_heads, seed=2), rows(kv_heads, seed=3)
    found, weights = packed_attention_forward(
        Layer(),
        query,
        key,
        value,
        None,
        packing=Packing.from_lengths(LENGTHS, torch.device("cpu")),
        sliding_window=window,
        softcap=softcap,
    )
    assert weights is None
    assert_close(found, naive(query, key, value, window, softcap))


def test_scaling_is_used():
    query, key, value = rows(2, seed=1), rows(2, seed=2), rows(2, seed=3)
    packing = Packing.from_lengths(LENGTHS, torch.device("cpu"))
    found, _ = packed_attention_forward(Layer(), query, key, value, None, packing=packing, scaling=0.25)
    assert_close(found, naive(query, key, value, scaling=0.25))


def test_sequences_do_not_reach_each_other():
    query, key, value = (rows(2, seed=s).requires_grad_() for s in (1, 2, 3))
    packing = Packing.from_lengths(LENGTHS, torch.device("cpu"))
    found, _ = packed_attention_forward(Layer(), query, key, value, None, packing=packing)
    found[0, 5].sum().backward()  # the only token of the second sequence
    for x in (key, value):
        others = torch.ones(sum(LENGTHS), dtype=torch.bool)
        others[5] = False
        assert x.grad[:, :, others].eq(0).all()
    assert value.grad[:, :, 5].ne(0).all()


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_a_kernel_without_grouped_heads_gets_a_key_for_each_query(kv_heads):
    """PyTorch 2.11 has no ``enable_gqa``, and its kernel may take as many keys as queries only."""

    def plain(q, k, v, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        assert q.shape == k.shape == v.shape
        assert (max_q, max_k, window_size) == (4, 4, (-1, 0))
        parts = zip(*(x.transpose(0, 1).split(cu_q.diff().tolist(), dim=1) for x in (q, k, v)), strict=True)
        attended = [functional.scaled_dot_product_attention(*part, is_causal=True, scale=scale) for part in parts]
        return torch.cat(attended, dim=1).transpose(0, 1)

    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(7, heads, 8, generator=draw) for heads in (4, kv_heads, kv_heads))
    packing, rule = Packing.from_lengths([3, 4], query.device), AttentionRule(0.3)
    found = _varlen_kernel_of(plain)(query, key, value, packing, rule)
    q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (query, key, value))
    assert_close(found, attend_packed(q, k, v, packing, rule).squeeze(0))


@pytest.mark.parametrize(
    ("dtype", "masked", "heads"),
    [("bfloat16", False, 2), ("bfloat16", True, 4), ("float32", False, 4), ("float32", True, 4)],
)
def test_grouped_heads_on_a_gpu_stay_where_flash_takes_them(monkeypatch, dtype, masked, heads):
    """Elsewhere PyTorch would keep all scores: 2 GiB a layer for 4,096 tokens with 32 heads in fp32."""
    taken = []
    plain = functional.scaled_dot_product_attention

    def recorded(q, k, v, *args, **settings):
        taken.append((k.shape[1], v.shape[1], settings["enable_gqa"]))
        return plain(q, k, v, *args, **settings)

    monkeypatch.setattr(functional, "scaled_dot_product_attention", recorded)
    like = {"device": "meta", "dtype": getattr(torch, dtype)}  # no CPU
    q, k = torch.empty(3, 4, 5, 8, **like), torch.empty(3, 2, 5, 8, **like)
    real = torch.ones(3, 5, dtype=torch.bool, device="meta") if masked else None
    assert attend(q, k, k, AttentionRule(0.5), real).shape == q.shape
    assert taken == [(heads, heads, heads == 2)]


@pytest.mark.parametrize(("module", "has_version_2"), [("cute/__init__.py", False), ("__init__.py", True)])
def test_flash_attention_4_is_not_taken_for_version_2(module, has_version_2, tmp_path, monkeypatch):
    """SGLang installs version 4: a package of the same name that has only the folder ``cute``."""
    file = tmp_path / "flash_attn" / module
    file.parent.mkdir(parents=True)
    file.write_text("def flash_attn_varlen_func(): ...\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)
    assert _imports_flash_attn.__wrapped__() is has_version_2
    monkeypatch.delitem(sys.modules, "flash_attn", raising=False)


def test_a_kernel_that_refuses_its_arguments_is_not_a_model_that_cannot_run_packed(monkeypatch):
    # PackingCheck takes a TypeError of a model's code for a reason to run it padded.
    def old_kernel(q, k, v, packing):
        return q

    monkeypatch.setattr("verl.workers.packed_attention._varlen_kernel", lambda *_: old_kernel)
    q = torch.randn(1, 2, 5, 4)
    with pytest.raises(RuntimeError, match=r"the attention kernel old_kernel refuses its arguments: .*positional"):
        attend_packed(q, q, q, Packing.from_lengths([5], q.device), AttentionRule(0.5))


@pytest.mark.parametrize("extra", [{"s_aux": torch.ones(2)}, {"position_bias": torch.ones(1)}, {}])
def test_what_it_does_not_have_is_refused(extra):
    packing = Packing.from_lengths(LENGTHS, torch.device("cpu")) if extra else None
    with pytest.raises(ConfigError, match="cannot run packed"):
        packed_attention_forward(Layer(), rows(2), rows(2), rows(2), None, packing=packing, **extra)
