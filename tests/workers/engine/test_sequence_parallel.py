"""Ranks that share sequences (Ulysses) over gloo: the same numbers as one rank, and as plain PyTorch."""

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close

from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    check_group_timeouts,
    has_fast_layers,
    make_engine,
    naive_update,
    ppo_batch,
    run_ranks,
    share,
    weights_of,
)
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.utils.ulysses import get_ulysses_sequence_parallel_group, get_ulysses_sequence_parallel_world_size
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.engine.model.divergence import DivergenceStatistics
from verl.workers.engine.model.head import NO_TOP, TokenStatistics
from verl.workers.engine.model.outputs import language_outputs
from verl.workers.losses import PolicyLoss, ValueLoss, sft_loss

STATE = ("model", "optimizer", "extra")
CONFIG = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode="seq-mean-token-mean")
FAMILIES = {
    "2 kv heads": ("qwen3", {}),
    "1 kv head": ("llama", {"num_key_value_heads": 1}),
    "windows": ("mistral", {"sliding_window": 4}),
    "soft caps": ("gemma2", {"sliding_window": 4}),
}
CASES = {
    "packed": ({}, "three"),
    "padded": ({"use_remove_padding": False}, "whole"),
    "kept activations": ({"enable_gradient_checkpointing": False}, "by tokens"),
    "hybrid": ({"fsdp_size": 1}, "one by one"),
}


def shared(path, sp=2, **settings):
    return make_engine(path, ulysses_sequence_parallel_size=sp, **settings)


def gradients(engine):
    return {name: p.grad.full_tensor().clone() for name, p in engine.model.named_parameters()}


def on_two_ranks(rank, world_size, folder, paths):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    found = {}
    for family, path in paths.items():
        for case in CASES if family == "2 kv heads" else ["packed", "padded"]:
            settings, layout = CASES[case]
            engine = shared(path, **settings)
            assert engine.is_packed == (case != "padded")
            assert has_fast_layers(engine) or family == "soft caps"
            assert (engine.get_data_parallel_size(), engine.get_data_parallel_rank()) == (1, 0)
            assert engine.is_mp_src_rank_with_outputs() == (rank == 0)
            with engine.eval_mode():
                assert get_ulysses_sequence_parallel_world_size() == 2
                outputs = engine.infer_batch(
                    batch, {"log_probs", "entropy", "sum_pi_squared"}, LAYOUTS[layout], temperature=0.7
                )
            assert get_ulysses_sequence_parallel_group() is None
            with engine.train_mode():
                metrics = engine.forward_backward_batch(batch, PolicyLoss(CONFIG), LAYOUTS[layout])
                first = gradients(engine)
                engine.optimizer_step()
                engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS[layout])
            found[f"{family}, {case}"] = outputs, metrics, first, weights_of(engine)
    check_group_timeouts()
    torch.save(found, folder / f"rank_{rank}.pt")
    scalar_models(rank, folder, batch)
    one_token(paths["2 kv heads"], batch)
    checkpoints(rank, folder, paths["2 kv heads"], batch)
    refusals(folder, paths["2 kv heads"])


def scalar_models(rank, folder, batch):
    path = str(folder / "values")
    found = {}
    for packed in (True, False):
        engine = shared(path, model_type="value_model", use_remove_padding=packed)
        values = engine.infer_batch(batch, {"values"}, WHOLE)["values"]
        metrics = engine.forward_backward_batch(batch, ValueLoss(CriticConfig()), LAYOUTS["three"])
        scores = shared(path, model_type="reward_model", trained=False, use_remove_padding=packed)
        found[packed] = values, metrics, gradients(engine), scores.infer_batch(batch, {"scores"}, WHOLE)["scores"]
    torch.save(found, folder / f"scalars_{rank}.pt")


def one_token(path, batch):
    """A pass in which one rank has no response token at all."""
    columns = dict(batch.select_idxs([1]).batch.items())
    columns["response_mask"] = torch.zeros_like(columns["response_mask"])
    columns["response_mask"][0, -1] = 1
    only = batch.select_idxs([1]).from_dict(tensors=columns)
    engine = shared(path)
    found = engine.infer_batch(only, {"log_probs"}, WHOLE)["log_probs"]
    whole = engine.infer_batch(batch.select_idxs([1]), {"log_probs"}, WHOLE)["log_probs"]
    assert found[0, -1] == pytest.approx(float(whole[0, -1]), abs=1e-5)
    assert found.count_nonzero() == 1
    with engine.train_mode():
        assert engine.train_batch(only, sft_loss, WHOLE)["grad_norm"] > 0


def checkpoints(rank, folder, path, batch):
    """One step on one rank, which the test saved; one on two that share sequences; one on two with their own rows."""
    engine = shared(path)
    engine.load_checkpoint(str(folder / "from_one"), STATE)
    with engine.train_mode():
        engine.train_batch(batch, sft_loss, WHOLE)
    engine.save_checkpoint(str(folder / "from_shared"), 2, STATE)
    apart = make_engine(path)
    apart.load_checkpoint(str(folder / "from_shared"), STATE)
    with apart.train_mode():
        apart.train_batch(share(batch, rank, 2), sft_loss, WHOLE)
    apart.save_checkpoint(str(folder / "from_apart"), 3, STATE)


def refusals(folder, path):
    with pytest.raises(ConfigError, match="does not divide the 2 ranks"):
        shared(path, sp=3)
    with pytest.raises(ConfigError, match=r"does not divide the model's 3 attention heads.*Use one of 1, 3"):
        shared(str(folder / "three heads"))
    with pytest.raises(ConfigError, match=r"rotary embedding \(dynamic\)"):
        shared(str(folder / "dynamic"))
    budget = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=5)  # for each of both ranks
    batch = torch.load(folder / "batch.pt", weights_only=False)
    with pytest.raises(ConfigError, match="does not fit into a micro-batch of 10"):
        shared(path).infer_batch(batch, {"log_probs"}, budget)
    dist.barrier()


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {name: tiny_model_dir(folder / name, family, **changes) for name, (family, changes) in FAMILIES.items()}


@pytest.fixture(scope="module")
def batch(paths):
    return ppo_batch(paths["2 kv heads"])


@pytest.fixture(scope="module")
def folder(paths, batch, tmp_path_factory):
    """What two ranks left behind."""
    folder = tmp_path_factory.mktemp("ranks")
    torch.save(batch, folder / "batch.pt")
    tiny_model_dir(folder / "values", "qwen3", task="token_classification")
    odd = {"num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 10, "hidden_size": 30}
    tiny_model_dir(folder / "three heads", "qwen3", **odd)
    scaled = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    tiny_model_dir(folder / "dynamic", "llama", rope_parameters=scaled)
    one = make_engine(paths["2 kv heads"])
    with one.train_mode():
        one.train_batch(batch, sft_loss, WHOLE)
    one.save_checkpoint(str(folder / "from_one"), 1, STATE)
    run_ranks(on_two_ranks, 2, folder, paths)
    return folder


def load(folder, name):
    return torch.load(folder / name, weights_only=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_equal_one(folder, paths, batch, family):
    ranks = [load(folder, f"rank_{rank}.pt") for rank in range(2)]
    one = make_engine(paths[family])
    expected = one.infer_batch(batch, {"log_probs", "entropy", "sum_pi_squared"}, WHOLE, temperature=0.7)
    with one.train_mode():
        metrics = one.forward_backward_batch(batch, PolicyLoss(CONFIG), WHOLE)
    first = {name: p.grad.clone() for name, p in one.model.named_parameters()}
    cases = [case for case in ranks[0] if case.startswith(f"{family},")]
    assert len(cases) >= 2
    for case in cases:
        outputs, found, gradient, weights = ranks[0][case]
        for name, values in expected.items():
            assert_close(outputs[name], values, atol=1e-5, rtol=0, msg=lambda m, n=name, c=case: f"{n}, {c}: {m}")
            assert torch.equal(outputs[name], ranks[1][case][0][name])
        assert found == ranks[1][case][1] == pytest.approx(metrics, rel=1e-5, abs=1e-5)
        for name, grad in first.items():
            assert_close(gradient[name], grad, atol=1e-5, rtol=1e-5, msg=lambda m, n=name, c=case: f"{n}, {c}: {m}")
        assert all(torch.equal(weight, ranks[1][case][3][name]) for name, weight in weights.items())


def test_two_ppo_steps_equal_plain_pytorch(folder, paths, batch):
    expected, _ = naive_update(paths["2 kv heads"], batch, CONFIG)
    found = load(folder, "rank_0.pt")
    for case in CASES:
        for name, weight in found[f"2 kv heads, {case}"][3].items():
            assert_close(weight, expected[name], atol=2e-6, rtol=1e-5)


def test_value_and_reward_models(folder, batch):
    path = str(folder / "values")
    one = make_engine(path, model_type="value_model")
    values = one.infer_batch(batch, {"values"}, WHOLE)["values"]
    metrics = one.forward_backward_batch(batch, ValueLoss(CriticConfig()), WHOLE)
    scores = make_engine(path, model_type="reward_model", trained=False).infer_batch(batch, {"scores"}, WHOLE)["scores"]
    assert values.abs().max() > 0.1
    for rank in range(2):
        for found in load(folder, f"scalars_{rank}.pt").values():
            assert_close(found[0], values, atol=1e-5, rtol=0)
            assert found[1] == pytest.approx(metrics, rel=1e-5, abs=1e-5)
            for name, parameter in one.model.named_parameters():
                assert_close(found[2][name], parameter.grad, atol=1e-5, rtol=1e-5)
            assert_close(found[3], scores, atol=1e-5, rtol=0)


def test_checkpoints_go_from_one_layout_to_another(folder, paths, batch):
    straight, resumed = make_engine(paths["2 kv heads"]), make_engine(paths["2 kv heads"])
    with straight.train_mode():
        for _ in range(3):
            straight.train_batch(batch, sft_loss, WHOLE)
    resumed.load_checkpoint(str(folder / "from_apart"), STATE)
    assert resumed.weight_version == 3
    for name, weight in weights_of(straight).items():
        assert_close(weights_of(resumed)[name], weight, atol=2e-6, rtol=1e-5)


def test_heads_are_checked_before_the_model_is_loaded(tmp_path, paths):
    with pytest.raises(ConfigError, match="does not divide the 1 ranks"):
        shared(paths["2 kv heads"])


def test_ranks_collect_outputs_in_one_order():
    """The order of a set of names differs between processes, so that one rank's entropies were another's log-probs."""
    names = frozenset({"log_probs", "entropy", "sum_pi_squared", "divergence", "teacher_entropy", "agreement"})
    values = torch.zeros(1)
    statistics = TokenStatistics(log_probs=values, entropy=values, sum_pi_squared=values)
    divergence = DivergenceStatistics(values, values, values)
    columns = language_outputs(names, values, lambda **_: statistics, None, NO_TOP, lambda: divergence)
    assert [*columns] == sorted(names)
