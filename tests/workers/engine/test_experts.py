"""The load of experts and the loss that balances it: those of the whole mini-batch, whatever the passes and ranks."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, MixtralConfig, Qwen3MoeConfig

from tests.workers.support import (
    EPS,
    LAYOUTS,
    LR,
    make_engine,
    naive_outputs,
    ragged_batch,
    run_ranks,
    weights_of,
)
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir, tiny_tokenizer
from verl.workers.config import HFModelConfig
from verl.workers.engine.model.headed import pretrained_weights
from verl.workers.losses import sft_loss

COMMON = {"vocab_size": 104, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "pad_token_id": 0}
COMMON |= {"num_key_value_heads": 2, "num_experts_per_tok": 2, "initializer_range": 0.2, "bos_token_id": None}
CONFIGS = {
    "qwen3": Qwen3MoeConfig(**COMMON, head_dim=8, num_experts=8, moe_intermediate_size=16),
    "mixtral": MixtralConfig(**COMMON, num_local_experts=4, intermediate_size=16),
}


@pytest.fixture(scope="module", params=CONFIGS)
def path(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(CONFIGS[request.param]).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


def expected_counts(path):
    """(layers, experts) by the router logits of Transformers, one sequence at a time."""
    model, columns = AutoModelForCausalLM.from_pretrained(path), ragged_batch().batch
    counts = None
    for ids, seen in zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True):
        with torch.no_grad():
            logits = model(ids[seen][None], output_router_logits=True).router_logits
        chosen = torch.stack([layer.topk(2).indices.flatten() for layer in logits])
        found = torch.nn.functional.one_hot(chosen, logits[0].shape[-1]).sum(1)
        counts = found if counts is None else counts + found
    return counts


def expected(path):
    """The metrics of the load of all tokens at once."""
    layers = expected_counts(path).tolist()
    loads = [tokens * len(layer) / sum(layer) for layer in layers for tokens in layer]
    found = {"load_max": max(loads), "load_min": min(loads), "unused_experts": loads.count(0)}
    for number, layer in enumerate(layers):
        found |= {
            f"layer_{number}/share_max": max(layer) / sum(layer),
            f"layer_{number}/unused_experts": layer.count(0),
        }
    return found


def loads(engine, batch, layout):
    with engine.train_mode():
        metrics = engine.train_batch(batch, sft_loss, LAYOUTS[layout])
    return {name.removeprefix("moe/"): value for name, value in metrics.items() if name.startswith("moe/")}


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
@pytest.mark.parametrize("layout", ["one by one", "three"])
def test_each_token_counts_once_and_padding_does_not(path, packed, layout):
    engine = make_engine(path, use_remove_padding=packed)
    assert engine.is_packed == packed
    assert loads(engine, ragged_batch(), layout) == pytest.approx(expected(path), rel=1e-6)
    assert torch.equal(engine.expert_counts, expected_counts(path))


def test_transformers_grouped_products_compute_the_experts_and_the_log_says_so(path, caplog):
    with caplog.at_level("INFO", "verl.workers.engine.fsdp.sharded_model"):
        engine = make_engine(path)
    assert "ForCausalLM are computed by grouped_mm" in caplog.text
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen, engine.train_mode():
        engine.train_batch(ragged_batch(), sft_loss, LAYOUTS["whole"])
    calls = {event.key: event.count for event in seen.key_averages()}
    assert calls["aten::_grouped_mm"] >= 2 * 2  # two products in each of two layers, not two for each expert


# ---- the balance loss

WEIGHT = 0.5
BALANCED = {"router_aux_loss_coef": WEIGHT}


def balanced_update(path):
    """Weights after one AdamW step, and the balance loss, by plain Transformers on the whole batch at once."""
    model = AutoModelForCausalLM.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    batch = ragged_batch()
    columns, mask = batch.batch, batch.batch["response_mask"]
    of_all = model(
        columns["input_ids"],
        attention_mask=columns["attention_mask"],
        position_ids=columns["position_ids"],
        output_router_logits=True,
    ).aux_loss
    loss = -(naive_outputs(model, batch)[0] * mask).sum() / mask.sum() + WEIGHT * of_all
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {name: p.detach() for name, p in model.named_parameters()}, of_all.item()


def balanced_by(engine, batch, layout):
    with engine.train_mode():
        metrics = engine.train_batch(batch, sft_loss, LAYOUTS[layout])
    return weights_of(engine), metrics["moe/aux_loss"]


def assert_same_update(found, expected):
    (weights, loss), (plain, of_all) = found, expected
    assert loss == pytest.approx(of_all, rel=1e-5)
    for name, weight in plain.items():
        assert (weights[name] - weight).abs().max() < 1e-5, name


@pytest.mark.parametrize(
    ("packed", "layout", "checkpointing"),
    [(True, "whole", False), (True, "three", True), (False, "one by one", False), (False, "by tokens", True)],
)
def test_the_balance_loss_is_that_of_all_tokens_at_once(path, packed, layout, checkpointing):
    settings = {"use_remove_padding": packed, "enable_gradient_checkpointing": checkpointing}
    engine = make_engine(path, override_config=BALANCED, **settings)
    assert_same_update(balanced_by(engine, ragged_batch(), layout), balanced_update(path))


def on_each_rank(rank, world_size, folder, path):
    # Five rows and three: the ranks have different numbers of passes, and one of them computes a filler.
    rows = [[0, 1, 2, 3, 4], [5, 6, 7]][rank]
    engine = make_engine(path, override_config=BALANCED)
    with engine.train_mode():
        metrics = engine.train_batch(ragged_batch().select_idxs(rows), sft_loss, LAYOUTS["three"])
    counts = [engine.expert_counts]
    for packed in (True, False):  # the two ranks share all sequences, whose length is odd
        settings = {"use_remove_padding": packed, "ulysses_sequence_parallel_size": 2}
        shared = make_engine(path, override_config=BALANCED, **settings)
        found = balanced_by(shared, ragged_batch(), "three" if packed else "whole")
        assert_same_update(found, balanced_update(path))
        counts.append(shared.expert_counts)
    torch.save((weights_of(engine), metrics, counts), folder / f"{rank}.pt")


@pytest.mark.parametrize(
    "path",
    ["qwen3", *(pytest.param(name, marks=pytest.mark.slow) for name in CONFIGS if name != "qwen3")],
    indirect=True,
)
def test_two_ranks_count_and_balance_together(path, tmp_path):
    run_ranks(on_each_rank, 2, tmp_path, path)
    for rank in (0, 1):
        weights, metrics, counts = torch.load(tmp_path / f"{rank}.pt")
        assert all(torch.equal(found, expected_counts(path)) for found in counts)
        assert {name: metrics[f"moe/{name}"] for name in expected(path)} == pytest.approx(expected(path), rel=1e-6)
        assert_same_update((weights, metrics["moe/aux_loss"]), balanced_update(path))


def test_without_a_request_there_is_no_balance_loss(path):
    with pytest.raises(KeyError, match="moe/aux_loss"):
        balanced_by(make_engine(path), ragged_batch(), "three")


def test_output_router_logits_takes_the_weight_of_the_models_config(path):
    engine = make_engine(path, override_config={"output_router_logits": True})
    assert engine.balance_weight == AutoConfig.from_pretrained(path).router_aux_loss_coef > 0
    assert not engine.model.hf.config.output_router_logits  # or the rollout engines would compute it too


def test_a_negative_weight_is_refused(path):
    with pytest.raises(ConfigError, match=r"router_aux_loss_coef=-0.1: a negative weight drives all tokens to a few"):
        make_engine(path, override_config={"router_aux_loss_coef": -0.1})


def test_a_model_without_experts_has_no_such_metrics(tmp_path):
    assert loads(make_engine(tiny_model_dir(tmp_path)), ragged_batch(), "three") == {}


def test_biases_of_routers_reach_rollouts_and_exports(tmp_path):
    """They are buffers, without gradients: exports and engines that lack them would choose other experts."""
    path = tiny_model_dir(tmp_path / "model", "deepseek_v3")
    model, bias = AutoModelForCausalLM.from_pretrained(path), "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(bias).fill_(0.5)
    model.save_pretrained(path)
    assert torch.equal(dict(pretrained_weights(HFModelConfig(path=path), torch.float32))[bias], model.get_buffer(bias))
    for settings in ({}, {"lora_rank": 2}):
        engine = make_engine(path, **settings)
        for weights in (engine.get_per_tensor_param(), engine.weights_for_rollout(torch.bfloat16)):
            assert torch.equal(dict(weights)[bias], model.get_buffer(bias))
        engine.save_checkpoint(str(tmp_path / "saved"), 0, ("hf_model",))
        exported = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
        assert torch.equal(exported.get_buffer(bias), model.get_buffer(bias))
