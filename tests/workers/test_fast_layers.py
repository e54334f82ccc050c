"""Fast layers against the Transformers layers they stand for: values and gradients."""

import copy
from typing import Any

import pytest
import torch
from torch.autograd import gradcheck
from torch.nn import functional
from torch.testing import assert_close
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.llama.modeling_llama import LlamaRMSNorm

from tests.models import FAMILIES, tiny_model, tiny_model_dir
from tests.workers.support import LAYOUTS, has_fast_layers, make_engine, ragged_batch
from verl.utils.cpu_kernels import FeedForward, Heads, Linear, Norm
from verl.workers.engine.fsdp import kernels
from verl.workers.engine.fsdp.fast_layers import use_fast_layers
from verl.workers.engine.fsdp.kernels import attention_inputs, feed_forward, linear, rms_norm
from verl.workers.engine.fsdp.sharding import full_tensor
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


@pytest.fixture(params=["compiled", "PyTorch"])
def each_way(request, monkeypatch):
    """The compiled kernels, and the operations that stand in for them, with a feed-forward layer in several chunks."""
    if request.param == "PyTorch":
        monkeypatch.setattr(kernels, "cpu_kernels", lambda: None)
    monkeypatch.setattr(kernels, "_FEW_ROWS", 0)
    monkeypatch.setattr(kernels, "_CHUNK_ELEMENTS", 1000)


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
    use_fast_layers(fast)
    return plain, fast


@pytest.mark.parametrize(("family", "overrides"), CASES, ids=str)
def test_equals_transformers(family, overrides, each_way):
    plain, fast = pair(family, **overrides)
    ids = torch.randint(2, 104, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    (expected, expected_grads), (found, found_grads) = run(plain, ids, mask), run(fast, ids, mask)
    assert_close(found, expected, rtol=1e-5, atol=1e-5)
    for name, expected_grad in expected_grads.items():
        difference = (found_grads[name] - expected_grad).norm() / expected_grad.norm()
        assert difference < 3e-6, (name, difference)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_gradients_are_as_exact_as_those_of_transformers(family, each_way):
    """The two differ in fp32 because they sum in another order: from fp64 both are as far away."""
    plain, fast = pair(family)
    _, exact = pair(family, torch.float64)  # inside too, where Transformers' layers round to fp32
    ids = torch.randint(2, 104, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.arange(9) < torch.tensor([[9], [4], [7]])
    grads = [run(model, ids, mask)[1] for model in (plain, fast, exact)]
    errors = []
    for name, truth in grads[2].items():
        errors.append([float((found[name].double() - truth).norm() / truth.norm()) for found in grads[:2]])
    transformers, own = (sum(column) for column in zip(*errors, strict=True))
    assert own < 1.5 * transformers


def test_fp64_to_its_last_digits():
    plain, fast = pair("qwen3", torch.float64)
    ids = torch.randint(2, 104, (2, 7), generator=torch.Generator().manual_seed(1))
    logits = [model(input_ids=ids, use_cache=False).logits for model in (plain, fast)]
    # Transformers norms and rotates in fp32 whatever the model is; so the two agree to fp32's digits only.
    assert_close(logits[1], logits[0], rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("family", ["qwen3", "gemma2"])
def test_bf16_is_as_near_to_fp32_as_transformers_is(family):
    exact, _ = pair(family)
    plain, fast = pair(family, torch.bfloat16)
    ids = torch.randint(2, 104, (3, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids, dtype=torch.bool)
    truth, _ = run(exact, ids, mask)
    errors = [(run(model, ids, mask)[0].float() - truth).norm() / truth.norm() for model in (plain, fast)]
    assert errors[1] < 1.25 * errors[0] < 0.1


def test_every_layer_is_fast_and_can_go_back():
    model = tiny_model("qwen3")
    before = {name: type(module) for name, module in model.named_modules()}
    names = list(model.state_dict())
    undo = use_fast_layers(model)
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
    use_fast_layers(model)
    assert (type(first.mlp), type(second.self_attn)) == kinds
    model(input_ids=torch.tensor([[5, 6, 7]]), use_cache=False)
    assert seen == ["up"]


def test_generation_with_a_cache():
    plain, fast = pair("qwen3")
    ids = torch.tensor([[5, 6, 7, 8]])
    found = [model.generate(ids, max_new_tokens=12, do_sample=False, eos_token_id=None) for model in (plain, fast)]
    assert found[0].tolist() == found[1].tolist()


# ---- the functions -------------------------------------------------------------------------------


def test_rms_norm_by_hand(each_way):
    # mean of squares of (3, 4) = 12.5; with eps 0: (3, 4)/sqrt(12.5) = (0.848528, 1.131371); times (2, 0.5)
    y = rms_norm(torch.tensor([[3.0, 4.0]]), Norm(torch.tensor([2.0, 0.5]), 0.0))
    assert_close(y, torch.tensor([[1.697056, 0.565685]]))
    y = rms_norm(torch.tensor([[3.0, 4.0]]), Norm(torch.tensor([1.0, -0.5]), 0.0, 1.0))
    assert_close(y, torch.tensor([[1.697056, 0.565685]]))


@pytest.mark.parametrize(("kind", "offset"), [(LlamaRMSNorm, 0.0), (GemmaRMSNorm, 1.0)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_equals_transformers(kind, offset, dtype):
    layer = kind(16, eps=1e-5).to(dtype)
    layer.weight.data = noise(16, dtype=dtype)
    x = noise(3, 5, 16, seed=1, dtype=dtype)
    # The square of a root of a sum, against the sum: the last bit of fp32 may differ, and then one rounding to bf16.
    relative = 1e-2 if dtype == torch.bfloat16 else 1e-6
    assert_close(rms_norm(x, Norm(layer.weight, 1e-5, offset)), layer(x), rtol=relative, atol=relative / 10)


def leaves_of(*shapes, dtype=torch.float64, trained=None):
    trained = trained or (True,) * len(shapes)
    return [
        noise(*shape, seed=seed, dtype=dtype).requires_grad_(on)
        for seed, (shape, on) in enumerate(zip(shapes, trained, strict=True))
    ]


def agree(function, leaves):
    """In fp32, which the compiled kernels take, as in fp64, whose gradients finite differences confirm."""
    assert gradcheck(function, leaves)
    found = []
    for dtype in (torch.float64, torch.float32):
        given = [leaf.detach().to(dtype).requires_grad_(leaf.requires_grad) for leaf in leaves]
        outputs = function(*given)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        loss = sum((output.double() * noise(*output.shape, seed=i)).sum() for i, output in enumerate(outputs))
        assert isinstance(loss, torch.Tensor)
        grads = torch.autograd.grad(loss, [leaf for leaf in given if leaf.requires_grad])
        found.append([x.detach().double() for x in (*outputs, *grads)])
    for exact, single in zip(*found, strict=True):
        assert_close(single, exact, rtol=2e-5, atol=1e-5)


@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm_gradients(offset, each_way):
    agree(lambda x, w: rms_norm(x, Norm(w, 1e-3, offset)), leaves_of((2, 3, 6), (6,)))


@pytest.mark.parametrize("activation", ["silu", "gelu"])
@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("trained", [(True,) * 4, (True, False, False, False), (False, False, True, True)])
def test_feed_forward_gradients(activation, whole, trained, monkeypatch, each_way):
    """Alone, and between a norm and what it is added to."""
    monkeypatch.setattr(kernels, "_CHUNK_ELEMENTS", 24)  # 2 rows of 2 x 6

    def layer(x, gate, up, down, weight):
        return feed_forward(x, FeedForward(gate, up, down, Norm(weight, 1e-3) if whole else None, activation, whole))

    shapes = (5, 4), (6, 4), (6, 4), (4, 6), (4,)
    agree(layer, leaves_of(*shapes, trained=(*trained, whole)))


def test_feed_forward_by_its_formula(each_way):
    x, g, u, w = noise(3, 4, seed=1), noise(6, 4, seed=2), noise(6, 4, seed=3), noise(4, 6, seed=4)
    expected = (functional.silu(x @ g.t()) * (x @ u.t())) @ w.t()
    assert_close(feed_forward(x, FeedForward(g, u, w)), expected)
    assert_close(feed_forward(x, FeedForward(g, u, w, adds=True)), x + expected)


@pytest.mark.parametrize("with_norms", [False, True])
@pytest.mark.parametrize("with_biases", [False, True])
def test_attention_inputs_gradients(with_norms, with_biases, each_way):
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

    agree(heads, leaves_of(*shapes))


def test_rotation_by_hand(each_way):
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
def test_linear(bias, other, each_way):
    shapes = [(3, 5, 16), (24, 16)] + [(24,)] * bias + [(3, 5, 24)] * other

    def layer(x, weight, *rest):
        return linear(x, weight, rest[0] if bias else None, rest[-1] if other else None)

    leaves = leaves_of(*shapes)
    agree(layer, leaves)
    given = [*leaves[2:], 0.0]
    expected = functional.linear(leaves[0], leaves[1], leaves[2] if bias else None) + given[-2 if other else -1]
    assert_close(layer(*leaves), expected)


def test_fp32_is_what_the_compiled_kernels_take(each_way, request):
    x, w = noise(3, 16).requires_grad_(), noise(16)
    name = type(rms_norm(x, Norm(w, 1e-6)).grad_fn).__name__
    assert ("Compiled" in name) == ("compiled" in request.node.callspec.id)
    assert "Compiled" not in type(rms_norm(x.double(), Norm(w.double(), 1e-6)).grad_fn).__name__


MODELS = {"language_model": "causal_lm", "value_model": "token_classification", "reward_model": "token_classification"}


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
@pytest.mark.parametrize("model_type", MODELS)
def test_every_kind_of_model_has_them(model_type, dtype, tmp_path):
    engine = make_engine(tiny_model_dir(tmp_path, task=MODELS[model_type]), model_type, dtype=dtype)
    assert has_fast_layers(engine)
    assert engine.compute_dtype == (torch.float32 if dtype == "fp32" else torch.bfloat16)
    found = engine.arithmetic()
    assert found.counter is not None
    assert found.counter.outputs == (104 if model_type == "language_model" else 1)
    assert (found.peak_flops or 0) > 1e8


def test_a_training_step_in_bf16_is_as_near_to_fp32_as_with_layers_of_transformers(tmp_path):
    path, batch = tiny_model_dir(tmp_path), ragged_batch()
    gradients = []
    for dtype, with_fast_layers in (("fp32", True), ("bf16", True), ("bf16", False)):
        engine = make_engine(path, dtype=dtype)
        for module in engine.model.modules():
            if "Fast" in type(module).__mro__[1].__name__ and not with_fast_layers:
                module.__class__ = next(kind for kind in type(module).__mro__[2:] if "Fast" not in kind.__name__)
        assert has_fast_layers(engine) == with_fast_layers
        with engine.train_mode():
            engine.forward_backward_batch(batch, sft_loss, LAYOUTS["three"])
        grads = [full_tensor(p.grad, engine.device) for p in engine.model.parameters() if p.grad is not None]
        gradients.append(torch.cat([grad.flatten().float() for grad in grads]))
    exact, fast, plain = gradients
    assert (fast - exact).norm() < 1.25 * (plain - exact).norm() < 0.5 * exact.norm()


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
