"""Fast layers against the Transformers layers they stand for: values and gradients."""

import copy
import logging
from functools import partial
from typing import Any

import pytest
import torch
from torch.nn import functional
from torch.testing import assert_close
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.workers.support import LAYOUTS, has_fast_layers, make_engine, ragged_batch
from verl.backends.cpu import layer_functions, layers
from verl.backends.cpu.kernels import FeedForward, Heads, Linear, Norm, cpu_kernels
from verl.backends.cpu.layer_functions import attention_inputs, feed_forward, linear, rms_norm
from verl.backends.cpu.layers import use_fast_layers
from verl.backends.replaced_layers import norm_rule
from verl.testing.models import FAMILIES, tiny_model, tiny_model_dir
from verl.workers.losses import sft_loss

CASES = [
    *((family, {}) for family in FAMILIES),
    ("llama", {"attention_bias": True}),
    ("llama", {"mlp_bias": True}),
    ("qwen3", {"attention_bias": True, "num_key_value_heads": 1}),
    ("mistral", {"sliding_window": 3}),
    ("gemma2", {"sliding_window": 3}),
    ("llama", {"hidden_act": "relu"}),
]


@pytest.fixture(autouse=True)
def small_layers_too(monkeypatch):
    """The kernels take them, which else only many rows repay."""
    if cpu_kernels() is None:
        pytest.skip("no C compiler here")
    monkeypatch.setattr(layer_functions, "_FEW_ROWS", 0)


def noise(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def run(model: Any, ids, mask):
    """Loss of a padded batch, and the gradient of every parameter."""
    logits = model(input_ids=ids, attention_mask=mask, use_cache=False).logits[mask]  # a cache takes the slow road
    loss = (logits.float() * noise(*logits.shape, seed=3)).sum() / 100
    loss.backward()
    return logits.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def pair(family, dtype=torch.float32, **overrides) -> tuple[Any, Any]:
    plain: Any = tiny_model(family, **overrides)
    for name, parameter in plain.named_parameters():
        if "norm" in name:  # ones at birth, or zeros: a forgotten factor would go unseen
            parameter.data += 0.3 * noise(*parameter.shape, seed=len(name))
    plain = plain.to(dtype)
    fast = copy.deepcopy(plain)
    use_fast_layers(fast, for_training=True)
    return plain, fast


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_equals_transformers(family, overrides):
    plain, fast = pair(family, **overrides)
    ids = torch.randint(2, 104, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    (expected, expected_grads), (found, found_grads) = run(plain, ids, mask), run(fast, ids, mask)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, expected_grad in expected_grads.items():
        difference = (found_grads[name] - expected_grad).norm() / expected_grad.norm()
        assert difference < 3e-6, (name, difference)


def normed(layer, eps, offset, x):
    return (offset + layer.weight) * x / (x.square().mean(-1, keepdim=True) + eps).sqrt()


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_gradients_are_as_exact_as_those_of_transformers(family):
    """The two differ in fp32 because they sum in another order: from fp64 both are as far away."""
    plain, fast = pair(family)
    exact, _ = pair(family, torch.float64)
    for module in exact.modules():
        if type(module).__name__.endswith("RMSNorm"):  # inside, Transformers' norms round to fp32
            module.forward = partial(normed, module, *(norm_rule(module) or ()))
    ids = torch.randint(2, 104, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    grads = [run(model, ids, mask)[1] for model in (plain, fast, exact)]
    errors = []
    for name, truth in grads[2].items():
        errors.append([float((found[name].double() - truth).norm() / truth.norm()) for found in grads[:2]])
    transformers, own = (sum(column) for column in zip(*errors, strict=True))
    assert own < 1.5 * transformers


def test_every_layer_is_fast_and_can_go_back():
    model = tiny_model("qwen3")
    before = {name: type(module) for name, module in model.named_modules()}
    names = list(model.state_dict())
    undo = use_fast_layers(model, for_training=True)
    kept = {name.split(".")[-1] for name, module in model.named_modules() if type(module) is before[name]}
    assert kept == {"", "model", "embed_tokens", "layers", "act_fn", "rotary_emb"}
    assert list(model.state_dict()) == names
    undo()
    assert {name: type(module) for name, module in model.named_modules()} == before


def test_a_layer_with_a_hook_or_an_adapter_keeps_its_own_forward():
    model: Any = tiny_model("qwen3", num_hidden_layers=2)
    seen = []
    first, second = model.model.layers
    first.mlp.up_proj.register_forward_hook(lambda *_: seen.append("up"))
    second.self_attn.v_proj = torch.nn.Sequential(second.self_attn.v_proj)
    kinds = type(first.mlp), type(second.self_attn)
    use_fast_layers(model, for_training=True)
    assert (type(first.mlp), type(second.self_attn)) == kinds
    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert seen == ["up"]


def test_generation_with_a_cache():
    plain, fast = pair("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]])
    found = [model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None) for model in (plain, fast)]
    assert found[0].tolist() == found[1].tolist()


# ---- the functions -------------------------------------------------------------------------------


def test_rms_norm_by_hand():
    # mean of squares of (3, 4) = 12.5; with eps 0: (3, 4)/sqrt(12.5) = (0.848528, 1.131371); times (2, 0.5)
    y = rms_norm(torch.tensor([[3.0, 4.0]]), Norm(torch.tensor([2.0, 0.5]), 0.0))
    assert_close(y, torch.tensor([[1.697056, 0.565685]]))
    y = rms_norm(torch.tensor([[3.0, 4.0]]), Norm(torch.tensor([1.0, -0.5]), 0.0, 1.0))
    assert_close(y, torch.tensor([[1.697056, 0.565685]]))


@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
def test_rms_norm_equals_transformers(kind, offset):
    layer = kind(16, eps=1e-5)
    layer.weight.data = noise(16)
    x = noise(3, 5, 16, seed=1)
    assert_close(rms_norm(x, Norm(layer.weight, 1e-5, offset)), layer(x), rtol=1e-6, atol=1e-7)


def agree(function, formula, *shapes, trained=None):
    """Values and gradients in fp32 are those of the formula in fp64."""
    trained = trained or (True,) * len(shapes)
    found = []
    for dtype, compute in ((torch.float64, formula), (torch.float32, function)):
        sizes = enumerate(zip(shapes, trained, strict=True))
        given = [noise(*shape, seed=seed, dtype=dtype).requires_grad_(on) for seed, (shape, on) in sizes]
        outputs = compute(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((output.double() * noise(*output.shape, seed=i)).sum() for i, output in enumerate(outputs))
        assert isinstance(loss, torch.Tensor)
        grads = torch.autograd.grad(loss, [leaf for leaf in given if leaf.requires_grad])
        found.append([x.detach().double() for x in (*outputs, *grads)])
    for exact, single in zip(*found, strict=True):
        assert_close(single, exact, rtol=2e-5, atol=1e-5)


def norm_formula(x, weight, offset=0.0):
    return (offset + weight) * x / (x.square().mean(-1, keepdim=True) + 1e-3).sqrt()


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_gradients(offset):
    formula = partial(norm_formula, offset=offset)
    agree(lambda x, w: rms_norm(x, Norm(w, 1e-3, offset)), formula, (2, 3, 6), (6,))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("trained", [(True,) * 4, (True, False, False, False), (False, False, True, True)])
def test_feed_forward_gradients(activation, whole, trained):
    """Alone, and between a norm and what it is added to."""
    act = functional.silu if activation == "silu" else partial(functional.gelu, approximate="tanh")

    def layer(x, gate, up, down, weight):
        return feed_forward(x, FeedForward(gate, up, down, Norm(weight, 1e-3) if whole else None, activation, whole))

    def formula(x, gate, up, down, weight):
        n = norm_formula(x, weight) if whole else x
        y = (act(n @ gate.t()) * (n @ up.t())) @ down.t()
        return x + y if whole else y

    agree(layer, formula, (5, 4), (6, 4), (6, 4), (4, 6), (4,), trained=(*trained, whole))


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("with_biases", [False, True])
def test_attention_inputs_gradients(with_norms, with_biases):
    angle = noise(3, 2, dtype=torch.float64)
    shapes = [(3, 5), (8, 5), (4, 5), (4, 5)]
    shapes += [(8,), (4,), (4,)] * with_biases + [(5,), (4,), (4,)] * with_norms

    def heads(x, *rest):
        biases = rest[3:6] if with_biases else (None,) * 3
        norms = [Norm(weight, 1e-3) for weight in rest[-3:]] if with_norms else None
        rotation = (angle.to(x.dtype).cos(), angle.to(x.dtype).sin())
        projections: Any = tuple(map(Linear, rest[:3], biases))
        own = (norms[0], (norms[1], norms[2])) if norms else (None, None)
        return attention_inputs(x, Heads(projections, 4, *rotation, *own))

    def formula(x, *rest):
        n = norm_formula(x, rest[-3]) if with_norms else x
        parts = [functional.linear(n, w, rest[3 + i] if with_biases else None) for i, w in enumerate(rest[:3])]
        q, k, v = (part.unflatten(1, (-1, 4)) for part in parts)
        if with_norms:
            q, k = norm_formula(q, rest[-2]), norm_formula(k, rest[-1])
        cos, sin = angle.cos()[:, None], angle.sin()[:, None]
        turned = [torch.cat([a * cos - b * sin, b * cos + a * sin], -1) for a, b in (y.chunk(2, -1) for y in (q, k))]
        return *turned, v, x

    agree(heads, formula, *shapes)


def test_rotation_by_hand():
    # One head of 4 at an angle of 90 degrees in both planes: (a b c d) becomes (-c -d a b), as in Transformers.
    projection = Linear(torch.tensor([[1.0], [2.0], [3.0], [4.0]]))  # q = (1 2 3 4) of x = 1
    q, k, v, x = attention_inputs(
        torch.ones(1, 1), Heads((projection, projection, projection), 4, torch.zeros(1, 2), torch.ones(1, 2))
    )
    assert q.flatten().tolist() == [-3, -4, 1, 2]
    assert k.flatten().tolist() == [-3, -4, 1, 2]
    assert v.flatten().tolist() == [1, 2, 3, 4]
    assert x.tolist() == [[1]]


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("other", [False, True])
def test_linear(bias, other):
    shapes = [(3, 5, 16), (24, 16)] + [(24,)] * bias + [(3, 5, 24)] * other

    def layer(x, weight, *rest):
        return linear(x, weight, rest[0] if bias else None, rest[-1] if other else None)

    def formula(x, weight, *rest):
        return functional.linear(x, weight, rest[0] if bias else None) + (rest[-1] if other else 0)

    agree(layer, formula, *shapes)


MODELS = {"language_model": "causal_lm", "value_model": "token_classification", "reward_model": "token_classification"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", MODELS)
def test_every_kind_of_model_has_them(model_type, dtype, tmp_path):
    engine = make_engine(tiny_model_dir(tmp_path, task=MODELS[model_type]), model_type, dtype=dtype)
    assert has_fast_layers(engine) == (dtype == "fp32")  # in bf16 those of Transformers are as fast
    assert engine.compute_dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    found = engine.arithmetic()
    assert found.counter is not None
    assert found.counter.outputs == (104 if model_type == "language_model" else 1)
    assert (found.peak_flops or 0) > 1e8


def test_a_model_that_they_compute_otherwise_keeps_its_own(tmp_path, monkeypatch, caplog):
    path, batch = tiny_model_dir(tmp_path), ragged_batch()
    expected = make_engine(path).infer_batch(batch, {"log_probs"}, LAYOUTS["three"])["log_probs"]
    monkeypatch.setattr(layers, "rms_norm", lambda x, norm: 2 * rms_norm(x, norm))
    with caplog.at_level(logging.WARNING):
        engine = make_engine(path)
    assert "Qwen3ForCausalLM uses the layers of Transformers" in caplog.text
    assert not has_fast_layers(engine)
    assert_close(engine.infer_batch(batch, {"log_probs"}, LAYOUTS["three"])["log_probs"], expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("trained", [False, True])
def test_tokens_computed_are_tokens_useful(tmp_path, trained):
    engine = make_engine(tiny_model_dir(tmp_path), enable_gradient_checkpointing=False)
    batch = ragged_batch()
    rows = []
    backbone: Any = engine.model.hf.base_model
    backbone.layers[0].input_layernorm.register_forward_hook(lambda _, given, __: rows.append(given[0][..., 0].numel()))
    with engine.train_mode():
        if trained:
            engine.forward_backward_batch(batch, sft_loss, LAYOUTS["by tokens"])
        else:
            engine.infer_batch(batch, {"log_probs"}, LAYOUTS["by tokens"])
    assert len(rows) > 1
    assert sum(rows) == int(batch.batch["attention_mask"].sum())


def test_products_of_inference_are_compiled_for_few_numbers_of_rows():
    weight, bias = torch.randn(24, 16), torch.randn(24)
    for count in (1, 2, 9, 63, 64, 65, 129, 1000):
        x = torch.randn(count, 16)
        expected = (x.double() @ weight.double().T + bias).float()
        assert_close(layer_functions.inference_linear(x, weight, bias), expected, rtol=1e-5, atol=1e-5)
        assert_close(layer_functions.inference_linear(x[None], weight, bias)[0], expected, rtol=1e-5, atol=1e-5)
    counts = (8, 9, 17, 33, 64, 65, 72, 73, 128, 129, 1000, 1025)
    rounded = [8, 10, 20, 40, 64, 72, 72, 80, 128, 144, 1024, 1152]
    assert [layer_functions._compiled_rows(count) for count in counts] == rounded
    few, many = range(1, 65), range(65, 2**14 + 1)
    assert all(count <= layer_functions._compiled_rows(count) <= count * 5 / 4 for count in few)
    assert all(count <= layer_functions._compiled_rows(count) <= count * 9 / 8 for count in many)
    assert len({layer_functions._compiled_rows(count) for count in few}) == 8 + 3 * 4
    assert len({layer_functions._compiled_rows(count) for count in many}) == 8 * 8
