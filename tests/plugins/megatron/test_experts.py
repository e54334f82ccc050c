"""Mixtures of experts under strategy=megatron: the numbers of plain PyTorch, whoever holds the experts."""

from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import AutoModelForCausalLM

from tests.plugins.megatron.support import CONFIG, TP, megatron_engine
from tests.support.tiny_run import same
from tests.workers.engine.test_experts import (
    BALANCED,
    CONFIGS,
    assert_same_update,
    balanced_by,
    balanced_update,
    expected,
    expected_counts,
)
from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    make_engine,
    naive_outputs,
    naive_update,
    ppo_batch,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
)
from verl.errors import ConfigError
from verl.testing.models import tiny_tokenizer
from verl.workers.config import CriticConfig
from verl.workers.losses import PolicyLoss, ValueLoss, sft_loss

pytest.importorskip("verl.plugins.megatron.library")

EP = {"expert_model_parallel_size": 2}
CASES = {
    "experts": (EP, "three"),
    "experts, padded, whole optimizer": (
        EP | {"use_distributed_optimizer": False, "use_remove_padding": False},
        "whole",
    ),
    "tensor, whole experts": (TP | EP | {"expert_tensor_parallel_size": 1}, "three"),
    "tensor, each with all experts": (TP | {"expert_tensor_parallel_size": 1}, "three"),
    "experts by columns": ({"expert_tensor_parallel_size": 2}, "by tokens"),
    "context": ({"context_parallel_size": 2}, "by tokens"),
    "interleaved pipeline": (
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        "three",
    ),
}
ALL = CASES | {"tensor": (TP, "by tokens"), "data": ({}, "three")}


def save(folder, name, **changes):
    torch.manual_seed(0)
    config = CONFIGS[name].__class__(**(CONFIGS[name].to_dict() | changes))
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return str(folder)


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {
        "mixtral": save(folder / "mixtral", "mixtral"),
        "qwen3": save(folder / "qwen3", "qwen3", norm_topk_prob=True, num_hidden_layers=4),
        # Weights of a token's experts that do not add up to 1, and a dense layer.
        "qwen3, dense layer": save(folder / "dense", "qwen3", norm_topk_prob=False, mlp_only_layers=[0]),
    }


def loads(metrics):
    return {name.removeprefix("moe/"): value for name, value in metrics.items() if name.startswith("moe/")}


@pytest.mark.parametrize("name", ["mixtral", "qwen3", "qwen3, dense layer"])
def test_outputs_and_updates_are_those_of_plain_pytorch(paths, name, tmp_path):
    path = paths[name]
    batch = ppo_batch(path)
    with torch.no_grad():
        log_probs, entropy = naive_outputs(AutoModelForCausalLM.from_pretrained(path), batch, temperature=0.7)
    engine = megatron_engine(path)
    assert same(weights_of(engine), dict(AutoModelForCausalLM.from_pretrained(path).named_parameters()))
    with engine.eval_mode():
        found = engine.infer_batch(batch, {"log_probs", "entropy"}, LAYOUTS["three"], temperature=0.7)
    assert_close(found["log_probs"], log_probs, atol=1e-5, rtol=0)
    assert_close(found["entropy"], entropy, atol=1e-5, rtol=0)
    weights, norm = naive_update(path, batch, CONFIG)
    with engine.train_mode():
        metrics = engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["by tokens"])
        counts = engine.expert_counts
        engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["one by one"])
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    if name != "qwen3, dense layer":
        assert loads(metrics) == pytest.approx(expected(path), rel=1e-6)
        assert torch.equal(counts, expected_counts(path))
    for weight, value in weights_of(engine).items():
        assert_close(value, weights[weight], atol=1e-5, rtol=0, msg=lambda text, weight=weight: f"{weight}: {text}")
    engine.save_checkpoint(str(tmp_path / "saved"), 1, ("model", "optimizer", "extra", "hf_model"))
    exported = AutoModelForCausalLM.from_pretrained(tmp_path / "saved" / "huggingface")
    assert same(dict(exported.named_parameters()), weights_of(engine))
    again = megatron_engine(str(tmp_path / "saved" / "huggingface"))
    assert same(weights_of(again), weights_of(engine))


@pytest.mark.parametrize(
    ("name", "layout"), [("mixtral", "whole"), ("qwen3", "three"), ("qwen3, dense layer", "three")]
)
def test_the_balance_loss_is_that_of_all_tokens_at_once(paths, name, layout):
    engine = megatron_engine(
        paths[name], override_config=BALANCED, enable_gradient_checkpointing=layout == "three", use_remove_padding=False
    )
    assert_same_update(balanced_by(engine, ragged_batch(), layout), balanced_update(paths[name]))


def balance(path, settings, layout, checkpointing):
    engine = megatron_engine(path, override_config=BALANCED, enable_gradient_checkpointing=checkpointing, **settings)
    mine = share(ragged_batch(), engine.get_data_parallel_rank(), engine.get_data_parallel_size())
    return balanced_by(engine, mine, layout)


def on_two_ranks(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    found = {}
    for case, (settings, layout) in CASES.items():
        engine = megatron_engine(path, **settings)
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.train_mode():
            metrics = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
            engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS[layout])
        found[case] = metrics, weights_of(engine)
        if case == "experts":
            gathers_in_few_messages(engine)
    balanced = balance(path, *CASES["interleaved pipeline"], checkpointing=True)
    torch.save((found, balanced), folder / f"rank_{rank}.pt")


def gathers_in_few_messages(engine):
    """One of each rank and format for a bucket of weights, and not one for each matrix of each expert."""
    sizes, broadcast = [], dist.broadcast
    with patch.object(dist, "broadcast", lambda packet, src: sizes.append(packet.nbytes) or broadcast(packet, src)):
        total = sum(weight.nbytes for _, weight in engine.get_per_tensor_param())
    assert len(sizes) <= 2 * 2, len(sizes)
    assert sum(sizes) == total
    assert len(engine.weights._mine) > 20


def two_updates(actor, critic, batch):
    """Two updates of both in turn, as in PPO, with the rows of this rank; gradient norms, values and weights."""
    mine = share(batch, actor.get_data_parallel_rank(), actor.get_data_parallel_size())
    norms = []
    for engine, loss in 2 * ((critic, ValueLoss(CriticConfig(cliprange_value=10.0))), (actor, PolicyLoss(CONFIG))):
        with engine.train_mode():
            norms.append(engine.train_batch(mine, loss, LAYOUTS["three"])["grad_norm"])
    with critic.eval_mode():
        values = critic.infer_batch(mine, {"values"}, LAYOUTS["whole"])["values"]
    return torch.tensor(norms), values, weights_of(actor), weights_of(critic)


def with_a_critic(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    found = two_updates(megatron_engine(path, **EP), megatron_engine(path, "value_model", **EP), batch)
    torch.save(found, folder / f"rank_{rank}.pt")


def reshard(rank, world_size, folder, path, writer):
    """A layout saves after a step and makes another one; so does every layout from what it saved."""
    batch = torch.load(folder / "batch.pt", weights_only=False)

    def step(engine):
        mine = share(batch, engine.get_data_parallel_rank(), engine.get_data_parallel_size())
        with engine.train_mode():
            return engine.train_batch(mine, sft_loss, WHOLE)

    engine = megatron_engine(path, **ALL[writer][0])
    step(engine)
    engine.save_checkpoint(str(folder / "saved"), 1)
    metrics, weights = step(engine), weights_of(engine)
    for reader, (settings, _) in ALL.items():
        engine = megatron_engine(path, **settings)
        engine.load_checkpoint(str(folder / "saved"))
        found = step(engine)
        if reader == writer:
            assert same((found, weights_of(engine)), (metrics, weights))
        for name, weight in weights_of(engine).items():
            assert_close(weight, weights[name], atol=2e-5, rtol=0)


@pytest.mark.slow
@pytest.mark.parametrize("writer", ALL)
def test_every_layout_goes_on_from_every_other(paths, tmp_path, writer):
    torch.save(ppo_batch(paths["qwen3"]), tmp_path / "batch.pt")
    run_ranks(reshard, 2, tmp_path, paths["qwen3"], writer)


@pytest.fixture(scope="module")
def folder(paths, tmp_path_factory):
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(ppo_batch(paths["qwen3"]), folder / "batch.pt")
    run_ranks(on_two_ranks, 2, folder, paths["qwen3"])
    return folder


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_are_plain_pytorch(paths, folder, case):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    expected_weights, norm = naive_update(paths["qwen3"], batch, CONFIG)
    ranks = [torch.load(folder / f"rank_{rank}.pt", weights_only=False)[0][case] for rank in range(2)]
    assert same(ranks[0], ranks[1])
    metrics, weights = ranks[0]
    assert metrics["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert loads(metrics) == pytest.approx(expected(paths["qwen3"]), rel=1e-6)
    assert weights.keys() == expected_weights.keys()
    for name, weight in weights.items():
        assert_close(weight, expected_weights[name], atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.slow
def test_actor_and_critic_share_their_experts_over_two_ranks(paths, tmp_path):
    path = paths["qwen3"]
    batch = ppo_batch(path)
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(with_a_critic, 2, tmp_path, path)
    norms, values, *weights = two_updates(make_engine(path), make_engine(path, "value_model"), batch)
    assert values.abs().max() > 1e-3
    for rank in range(2):
        found_norms, found_values, *found = torch.load(tmp_path / f"rank_{rank}.pt", weights_only=False)
        assert_close(found_norms, norms, rtol=1e-5, atol=0)
        assert_close(found_values, values[rank::2], rtol=0, atol=1e-5)
        assert_close(found, weights, rtol=0, atol=1e-5)


def test_stages_of_a_pipeline_balance_together(paths, folder):
    for rank in range(2):
        found = torch.load(folder / f"rank_{rank}.pt", weights_only=False)[1]
        assert_same_update(found, balanced_update(paths["qwen3"]))


def balance_in(rank, world_size, folder, path, case):
    expected_update = torch.load(folder / "expected.pt", weights_only=False)
    for checkpointing in (False, True):
        assert_same_update(balance(path, *ALL[case], checkpointing), expected_update)


@pytest.mark.slow
@pytest.mark.parametrize("case", ALL)
def test_every_layout_balances_alike(paths, tmp_path, case):
    torch.save(balanced_update(paths["qwen3"]), tmp_path / "expected.pt")
    run_ranks(balance_in, 2, tmp_path, paths["qwen3"], case)


def test_what_cannot_be_computed_is_refused(paths, tmp_path):
    with pytest.raises(ConfigError, match="2 ranks share the experts, which does not divide the 1 ranks"):
        megatron_engine(paths["qwen3"], **EP)
    noisy = save(tmp_path / "noisy", "mixtral", router_jitter_noise=0.1)
    with pytest.raises(ConfigError, match="router_jitter_noise"):
        megatron_engine(noisy)
