"""The engine on one rank, against plain PyTorch that sees one sequence at a time."""

import copy
import dataclasses
import math

import pytest
import torch
from torch.testing import assert_close
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    P,
    R,
    make_engine,
    naive_outputs,
    naive_update,
    ppo_batch,
    ragged_batch,
    weights_of,
)
from verl.algorithms import LOSS_AGG_MODES
from verl.errors import ConfigError, SchemaError
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig, CriticConfig, FSDPEngineConfig, FSDPOptimizerConfig
from verl.workers.engine import EngineRegistry, FunctionLoss, MicroBatchConfig, PartialSum
from verl.workers.engine.base import _load_backend
from verl.workers.engine.loss import as_loss_function
from verl.workers.engine.optimizer import build_optimizer, build_scheduler
from verl.workers.losses import PolicyLoss, ValueLoss, sft_loss

FAMILIES = {
    "qwen3": {},
    "qwen2": {"tie_word_embeddings": True},
    "llama": {"num_key_value_heads": 1},
    "mistral": {"sliding_window": 4},
    "gemma2": {"sliding_window": 4},
}


@pytest.fixture(scope="module", params=FAMILIES)
def family_path(request, tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp(request.param), request.param, **FAMILIES[request.param])


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3")


@pytest.fixture(scope="module")
def batch(path):
    return ppo_batch(path)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probs_and_entropy_are_those_of_full_logits(family_path, packed):
    batch = ragged_batch()
    with torch.no_grad():
        log_probs, entropy = naive_outputs(AutoModelForCausalLM.from_pretrained(family_path), batch, temperature=0.7)
    engine = make_engine(family_path, trained=False, use_remove_padding=packed)
    assert engine.is_packed == packed
    for micro in LAYOUTS.values():
        with engine.eval_mode():
            found = engine.infer_batch(batch, {"log_probs", "entropy"}, micro, temperature=0.7)
        assert_close(found["log_probs"], log_probs, atol=1e-5, rtol=0)
        assert_close(found["entropy"], entropy, atol=1e-5, rtol=0)


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_the_sum_of_squares_is_that_of_full_logits(path, packed):
    batch = ragged_batch()
    model, columns = AutoModelForCausalLM.from_pretrained(path), batch.batch
    expected = torch.zeros(columns["response_mask"].shape)
    for row, (ids, seen) in enumerate(zip(columns["input_ids"], columns["attention_mask"].bool(), strict=True)):
        with torch.no_grad():
            p = (model(input_ids=ids[seen][None]).logits[0].float() / 0.7).softmax(-1)
        start = int(seen[:P].sum())
        for t in columns["response_mask"][row].nonzero().flatten().tolist():
            expected[row, t] = p[start + t - 1].square().sum()
    engine = make_engine(path, trained=False, use_remove_padding=packed)
    for micro in LAYOUTS.values():
        with engine.eval_mode():
            found = engine.infer_batch(batch, {"log_probs", "sum_pi_squared"}, micro, temperature=0.7)
        assert found.keys() == {"log_probs", "sum_pi_squared"}
        assert_close(found["sum_pi_squared"], expected, atol=1e-6, rtol=1e-5)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_two_ppo_steps_equal_plain_pytorch(path, batch, mode):
    config = ActorConfig(
        loss_agg_mode=mode, entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_scale_factor=50.0
    )
    expected, norm = naive_update(path, batch, config)
    for packed, name in [(True, "whole"), (True, "three"), (True, "by tokens"), (False, "one by one")]:
        engine = make_engine(path, use_remove_padding=packed)
        with engine.train_mode():
            first = engine.train_batch(batch, PolicyLoss(config), LAYOUTS[name])
            engine.train_batch(batch, PolicyLoss(config), LAYOUTS[name])
        assert first["grad_norm"] == pytest.approx(norm, rel=1e-4)
        assert engine.weight_version == 2
        assert all(p.grad is None for p in engine.model.parameters())  # their memory is the rollout engine's meanwhile
        for key, weight in weights_of(engine).items():
            assert_close(weight, expected[key], atol=2e-6, rtol=1e-5, msg=lambda m, key=key: f"{key} ({mode}): {m}")


def test_all_layers_are_in_training_mode_during_an_update_alone(path):
    engine = make_engine(path)

    def modes() -> set[bool]:
        return {module.training for module in engine.model.modules()}

    assert modes() == {False}
    with engine.train_mode():
        assert modes() == {True}
    assert modes() == {False}


def test_gradient_checkpointing_changes_no_number(path, batch):
    results = []
    for checkpointing in (False, True):
        engine = make_engine(path, enable_gradient_checkpointing=checkpointing)
        with engine.train_mode():
            engine.forward_backward_batch(batch, PolicyLoss(ActorConfig()), WHOLE)
        results.append({name: p.grad for name, p in engine.model.named_parameters()})
    assert results[0].keys() == results[1].keys()
    for name in results[0]:
        assert_close(results[0][name], results[1][name])


def test_metrics_do_not_depend_on_the_layout(path, batch):
    config = ActorConfig(calculate_entropy=True, use_kl_loss=True, loss_agg_mode="seq-mean-token-mean")
    engine = make_engine(path)
    found = {}
    for name, micro in LAYOUTS.items():
        engine.optimizer_zero_grad()
        found[name] = engine.forward_backward_batch(batch, PolicyLoss(config), micro)
    expected_names = {
        "pg_loss",
        "pg_clipfrac",
        "pg_clipfrac_lower",
        "ppo_kl",
        "entropy_loss",
        "entropy_coeff",
        "kl_loss",
        "kl_coef",
        "loss",
    }
    assert {f"actor/{name}" for name in expected_names} == found["whole"].keys()
    assert 0 < found["whole"]["actor/pg_clipfrac"] < 1
    assert found["whole"]["actor/kl_coef"] == pytest.approx(0.001)
    # ppo_kl is the mean of old - new over the 29 or so valid tokens, whatever the passes hold
    mask = batch.batch["response_mask"]
    assert found["whole"]["actor/ppo_kl"] == pytest.approx(float(batch.batch["noise"].sum() / mask.sum()), rel=1e-4)
    for metrics in found.values():
        assert metrics == pytest.approx(found["whole"], rel=1e-4, abs=1e-6)


def test_metric_kinds(path):
    batch = ragged_batch()
    lengths = batch.batch["response_mask"].sum(-1)

    def loss(outputs, data, totals):
        mine = data.batch["response_mask"].sum()
        metrics = {
            "mean": mine,
            "sum": PartialSum(mine),
            "size_max": mine,
            "size_min": mine,
            "tokens": totals.batch_num_tokens,
        }
        return outputs["log_probs"].sum() * 0, metrics

    engine = make_engine(path)
    found = engine.forward_backward_batch(batch, loss, LAYOUTS["one by one"])
    total = float(lengths.sum())
    assert (
        found
        == {
            "mean": pytest.approx(float((lengths * lengths).sum()) / total),  # each weighs by its own tokens
            "sum": total,
            "size_max": R,
            "size_min": float(lengths[1:].min()),  # the empty response has no mean
            "tokens": pytest.approx(total),
        }
    )


def test_value_model_on_a_language_model_starts_at_zero_and_learns(path, batch):
    engine = make_engine(path, "value_model")
    with engine.eval_mode():
        assert engine.infer_batch(batch, {"values"}, WHOLE)["values"].eq(0).all()
    loss = ValueLoss(CriticConfig(cliprange_value=100.0))
    with engine.train_mode():
        losses = [engine.train_batch(batch, loss, LAYOUTS["three"])["critic/vf_loss"] for _ in range(30)]
    mask = batch.batch["response_mask"]
    # from V = 0: half the mean square of the returns
    assert losses[0] == pytest.approx(float((batch.batch["returns"] ** 2 * mask).sum() / mask.sum() / 2), rel=1e-4)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_values_are_read_before_each_token(tmp_path, packed):
    path = tiny_model_dir(tmp_path, "qwen3", task="token_classification")
    batch = ragged_batch()
    engine = make_engine(path, "value_model", use_remove_padding=packed)
    with engine.eval_mode():
        found = engine.infer_batch(batch, {"values"}, LAYOUTS["three"])["values"]
    model = AutoModelForTokenClassification.from_pretrained(path).eval()
    for row in range(len(batch)):
        seen = batch.batch["attention_mask"][row].bool()
        with torch.no_grad():
            values = model(input_ids=batch.batch["input_ids"][row][seen][None]).logits[0, :, 0]
        start = int(seen[:P].sum())
        for t in range(R):
            expected = values[start + t - 1] if batch.batch["response_mask"][row, t] else torch.tensor(0.0)
            assert_close(found[row, t], expected, atol=1e-5, rtol=0)


def test_reward_model_scores_the_token_itself(tmp_path):
    path = tiny_model_dir(tmp_path, "llama", task="sequence_classification")
    batch = ragged_batch(bsz=4)
    columns = dict(batch.batch.items())
    lengths = columns["attention_mask"][:, P:].sum(-1)
    last = (torch.arange(R) == (lengths - 1)[:, None]).long()
    engine = make_engine(path, "reward_model", trained=False)
    scores = engine.infer_batch(type(batch).from_dict(columns | {"response_mask": last}), {"scores"}, WHOLE)["scores"]
    model = AutoModelForSequenceClassification.from_pretrained(path).eval()
    for row in range(1, 4):
        seen = columns["attention_mask"][row].bool()
        with torch.no_grad():
            expected = model(input_ids=columns["input_ids"][row][seen][None]).logits[0, 0]
        assert_close(scores[row].sum(), expected, atol=1e-5, rtol=0)
    assert scores[0].eq(0).all()


def test_a_plain_function_is_a_loss():
    def loss(outputs, data, totals):
        return outputs["log_probs"].sum(), {}

    def of_pairs(outputs, data, totals):
        return outputs["entropy"].sum(), {}

    assert as_loss_function(loss) == FunctionLoss(loss, frozenset({"log_probs"}), 1)
    of_pairs.outputs, of_pairs.rows_per_unit = {"entropy"}, 2
    found = as_loss_function(of_pairs)
    assert (found.outputs, found.rows_per_unit) == ({"entropy"}, 2)
    assert as_loss_function(sft_loss) is sft_loss


def test_a_gradient_that_is_not_finite_changes_nothing(path, batch):
    def broken(outputs, data, totals):
        return outputs["log_probs"].sum() * math.inf, {}

    engine = make_engine(path)
    before = weights_of(engine)
    with engine.train_mode():
        metrics = engine.train_batch(batch, broken, WHOLE)
        assert metrics["skipped_steps"] == 1.0
        assert not math.isfinite(metrics["grad_norm"])
        assert engine.weight_version == 0
        assert all(torch.equal(before[name], weight) for name, weight in weights_of(engine).items())
        metrics = engine.train_batch(batch, sft_loss, WHOLE)
    assert metrics["skipped_steps"] == 0.0
    assert engine.weight_version == 1


def test_a_loss_without_tokens_runs(path):
    batch = ragged_batch()
    columns = dict(batch.batch.items())
    nothing = type(batch).from_dict(columns | {"response_mask": torch.zeros_like(columns["response_mask"])})
    engine = make_engine(path)
    with engine.train_mode():
        metrics = engine.train_batch(nothing, sft_loss, LAYOUTS["by tokens"])
    assert metrics == {"loss": 0.0, "grad_norm": 0.0, "skipped_steps": 0.0}
    assert engine.infer_batch(nothing, {"log_probs"}, WHOLE)["log_probs"].eq(0).all()


def test_dropout_is_off_in_updates_unless_a_setting_asks_for_it(tmp_path, batch):
    path = tiny_model_dir(tmp_path, attention_dropout=0.3)
    for override, is_off in (({}, True), ({"attention_dropout": 0.3}, False)):
        engine = make_engine(path, override_config=override)
        before = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
        with engine.train_mode():
            in_update = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
        assert torch.equal(in_update, before) == is_off


def test_half_precision_stays_close_and_learns(path, batch):
    exact = make_engine(path, trained=False).infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
    engine = make_engine(path, dtype="bfloat16")
    found = engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"]
    assert found.dtype == torch.float32
    mask = batch.batch["response_mask"].bool()
    gap = (found - exact)[mask].abs()
    assert 0 < gap.max() < 0.3
    with engine.train_mode():
        losses = [engine.train_batch(batch, sft_loss, WHOLE)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    assert all(weight.dtype == torch.float32 for weight in weights_of(engine).values())


@pytest.mark.parametrize(
    "settings",
    [
        ({}, {"offload_policy": True, "forward_prefetch": True}),
        ({"dtype": "bfloat16"}, {"dtype": "bfloat16", "wrap_policy": {"min_num_params": 3000}}),
    ],
    ids=["offload", "units_by_size"],
)
def test_sharding_on_one_rank_changes_no_bit(settings, path, batch):
    results = []
    for each in settings:
        engine = make_engine(path, **each)
        with engine.train_mode():
            engine.train_batch(batch, sft_loss, WHOLE)
            engine.train_batch(batch, sft_loss, WHOLE)
        results.append(weights_of(engine))
    assert_close(*results, atol=0, rtol=0)


def test_optimizer_settings_and_schedule(path):
    engine = make_engine(path)
    config = engine.optimizer_config
    settings = dataclasses.replace(
        config, optimizer="SGD", override_optimizer_config={"momentum": 0.9}, lr=0.1, lr_warmup_steps=3
    )
    engine = EngineRegistry.new(
        "language_model", "fsdp", model_config=engine.model_config, engine_config=engine.engine_config,
        optimizer_config=settings, device_name="cpu",
    )  # fmt: skip
    engine.initialize()
    assert isinstance(engine.optimizer, torch.optim.SGD)
    assert engine.optimizer.param_groups[0]["momentum"] == 0.9
    engine.optimizer_step()
    assert [engine.lr_scheduler_step() for _ in range(5)] == pytest.approx([0.025, 0.05, 0.075, 0.1, 0.1])


@pytest.mark.parametrize(
    "change, problem",
    [
        ({"optimizer": "AdamWW"}, "Did you mean 'AdamW'"),
        ({"optimizer_impl": "torch.optimizers"}, "cannot be imported"),
        ({"override_optimizer_config": {"momentun": 1}}, "refuses its settings: .*momentun"),
        ({"lr_scheduler_type": "cosine"}, "set optim.total_training_steps"),
        ({"lr_warmup_steps_ratio": 0.1}, "set optim.total_training_steps"),
    ],
)
def test_wrong_optimizer_settings_are_refused(change, problem):
    config = FSDPOptimizerConfig(**change)
    with pytest.raises(ConfigError, match=problem):
        build_scheduler(build_optimizer(torch.nn.Linear(2, 2).parameters(), config), config)


def test_wrong_models_and_calls_are_refused(path, tmp_path, batch):
    with pytest.raises(ConfigError, match="does not exist"):
        make_engine(str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="has no trained score"):
        make_engine(path, "reward_model", trained=False)
    two = tiny_model_dir(tmp_path / "two", task="sequence_classification", num_labels=2)
    with pytest.raises(ConfigError, match="2 labels"):
        make_engine(two, "value_model")
    with pytest.raises(ConfigError, match="fp16"):
        make_engine(path, model_dtype="fp16")
    engine = make_engine(path, trained=False)
    with pytest.raises(ConfigError, match="no output values; it has agreement, divergence, entropy, hidden, log_probs"):
        engine.infer_batch(batch, {"values"}, WHOLE)
    with pytest.raises(ConfigError, match="temperature=0"):
        engine.infer_batch(batch, {"log_probs"}, WHOLE, temperature=0)
    with pytest.raises(ConfigError, match="frozen"):
        engine.train_batch(batch, sft_loss, WHOLE)
    with pytest.raises(ConfigError, match="does not fit into a micro-batch of 8"):
        engine.infer_batch(batch, {"log_probs"}, MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=8))
    with pytest.raises(ConfigError, match="needs a token budget"):
        MicroBatchConfig(use_dynamic_bsz=True)
    with pytest.raises(ConfigError, match="language_model/fsdp"):
        EngineRegistry.new("language_model", "fsdp3")


def test_a_token_without_an_embedding_is_an_error_of_ours(path, batch):
    changed = copy.deepcopy(batch)
    changed.batch["input_ids"][3, P] = 104
    with pytest.raises(SchemaError, match="row 3 of the batch has the token id 104, and the model's embedding has 104"):
        make_engine(path).infer_batch(changed, {"log_probs"}, WHOLE)


def test_texts_that_longrope_rotates_in_two_ways_do_not_share_a_pass(tmp_path):
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    rope |= {"factor": 8.0, "original_max_position_embeddings": 8}
    path = tiny_model_dir(tmp_path, "llama", head_dim=8, rope_parameters=rope)
    engine = make_engine(path, trained=False)
    batch = ragged_batch()
    lengths = batch.batch["attention_mask"].sum(-1)
    is_long = lengths > 8
    assert {True, False} == set(is_long.tolist())  # the threshold lies between them
    with pytest.raises(ConfigError, match=r"longrope rotates all texts .* more than 8: .*micro-batch sizes of 1"):
        engine.infer_batch(batch, {"log_probs"}, WHOLE)
    expected, _ = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch)  # one text at a time
    found = engine.infer_batch(batch, {"log_probs"}, MicroBatchConfig(micro_batch_size_per_gpu=1))["log_probs"]
    assert_close(found, expected, atol=1e-5, rtol=1e-5)
    for of_one_kind in (is_long, ~is_long):
        rows = of_one_kind.nonzero().flatten().tolist()
        found = engine.infer_batch(batch.select_idxs(rows), {"log_probs"}, WHOLE)["log_probs"]
        assert_close(found, expected[rows], atol=1e-5, rtol=1e-5)


def test_a_frozen_model_stored_as_it_is_computed_gives_the_same_log_probs(path):
    """So a reference in bfloat16 by default takes half of the memory, and changes no number."""
    batch = ragged_batch()
    engines = [make_engine(path, trained=False, dtype="bf16", **more) for more in ({}, {"model_dtype": "fp32"})]
    assert [next(engine.model.parameters()).dtype for engine in engines] == [torch.bfloat16, torch.float32]
    half, whole = (engine.infer_batch(batch, {"log_probs", "entropy"}, WHOLE) for engine in engines)
    assert_close(half, whole, atol=0, rtol=0)
    assert FSDPEngineConfig(dtype="bf16").model_dtype == "fp32"  # to be trained
    mixed = {"param_dtype": "fp16"}
    assert FSDPEngineConfig(forward_only=True, dtype="bf16", mixed_precision=mixed).model_dtype == "fp16"


@pytest.mark.parametrize(
    ("code", "said"),
    [
        ("import no_such_package", "needs the package no_such_package, which is not installed"),
        ("from torch import no_such_name", "cannot be imported: cannot import name 'no_such_name'"),
        ("raise OSError('libcudart.so: cannot open')", "cannot be imported: libcudart.so"),
    ],
)
def test_a_back_end_whose_packages_do_not_load_says_so(tmp_path, monkeypatch, code, said):
    (tmp_path / "broken_back_end.py").write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=said):
        _load_backend("veomni", "broken_back_end")
