"""VeOmni's models train as Transformers' own do; needs the extra ``veomni``, which wants Transformers before 5.23."""

import pytest
import torch
from torch.testing import assert_close

from tests.workers.support import WHOLE, make_engine, ragged_batch, run_ranks, share, weights_of, with_log_probs
from verl.config.model import VEOMNI_FAMILIES
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig, CriticConfig
from verl.workers.losses import PolicyLoss, ValueLoss, sft_loss

pytest.importorskip("veomni")
PPO = PolicyLoss(ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1))
STATE = ("model", "optimizer", "extra")


def trained(engine, batch, losses):
    with engine.train_mode():
        metrics = [engine.train_batch(batch, loss, WHOLE) for loss in losses]
    return metrics, weights_of(engine)


def equal_steps(path, batch, folder):
    """Log-probs, three steps of PPO, one of SFT, values; checkpoints of either are read by the other."""
    fsdp, veomni = make_engine(path), make_engine(path, strategy="veomni")
    assert any(kind.__module__.startswith("veomni.") for kind in type(veomni.model.hf.base_model).__mro__)
    one, other = (engine.infer_batch(batch, {"log_probs", "entropy"}, WHOLE) for engine in (fsdp, veomni))
    assert_close(other, one, atol=1e-5, rtol=0)
    (metrics, weights), (actual, found) = (
        trained(engine, batch, [PPO, PPO, PPO, sft_loss]) for engine in (fsdp, veomni)
    )
    assert_close(actual, metrics, atol=1e-5, rtol=1e-5)
    assert_close(found, weights, atol=1e-5, rtol=0)
    veomni.save_checkpoint(str(folder / "checkpoint"), 4, (*STATE, "hf_model"))
    for strategy in ("veomni", "fsdp2"):
        resumed = make_engine(path, strategy=strategy)
        resumed.load_checkpoint(str(folder / "checkpoint"), STATE)
        assert_close(weights_of(resumed), found, atol=0, rtol=0)
    exported = weights_of(make_engine(str(folder / "checkpoint" / "huggingface"), trained=False))
    assert_close(exported, found, atol=0, rtol=0)
    values = [
        trained(make_engine(path, "value_model", strategy=strategy), batch, [ValueLoss(CriticConfig())] * 2)
        for strategy in ("fsdp2", "veomni")
    ]
    assert_close(values[1], values[0], atol=1e-5, rtol=1e-5)


def a_batch(path):
    batch = ragged_batch()
    return with_log_probs(batch, make_engine(path, trained=False).infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"])


@pytest.mark.parametrize("family", VEOMNI_FAMILIES)
def test_veomni_trains_as_fsdp2_does(family, tmp_path):
    path = tiny_model_dir(tmp_path / "model", family)
    equal_steps(path, a_batch(path), tmp_path)


def on_each_rank(rank, world_size, folder, path):
    equal_steps(path, share(torch.load(folder / "batch.pt", weights_only=False), rank, world_size), folder)


def test_two_ranks(tmp_path):
    path = tiny_model_dir(tmp_path / "model", "qwen3_moe")
    torch.save(a_batch(path), tmp_path / "batch.pt")
    run_ranks(on_each_rank, 2, tmp_path, path)


def test_models_and_kernels_that_veomni_lacks(tmp_path):
    with pytest.raises(ConfigError, match="VeOmni cannot build a mistral"):
        make_engine(tiny_model_dir(tmp_path / "mistral", "mistral"), strategy="veomni")
    path = tiny_model_dir(tmp_path / "qwen3_moe", "qwen3_moe")
    with pytest.raises(ConfigError, match="with moe_implementation=fused_triton here"):
        make_engine(path, strategy="veomni", moe_implementation="fused_triton")
