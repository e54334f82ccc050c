"""Tensor-parallel ranks under FSDP over gloo: the same numbers as one rank, and as plain PyTorch."""

import pytest
import torch
from torch.testing import assert_close

from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    make_engine,
    naive_outputs,
    naive_update,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
    with_kept_ids,
    with_log_probs,
)
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig
from verl.workers.losses import PolicyLoss

CONFIG = ActorConfig(entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1, loss_agg_mode="seq-mean-token-mean")
FAMILIES = {
    "qwen3": ("qwen3", {"vocab_size": 105, "tie_word_embeddings": True}),
    "qwen2": ("qwen2", {}),
    "llama": ("llama", {"vocab_size": 105}),
}


def two_ranks(rank, world_size, folder, paths):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    for family, path in paths.items():
        engine = make_engine(path, tensor_parallel_size=2)
        with engine.eval_mode():
            outputs = engine.infer_batch(batch, {"log_probs", "entropy", "sum_pi_squared"}, LAYOUTS["three"], 0.7)
        with engine.train_mode():
            metrics = engine.train_batch(batch, PolicyLoss(CONFIG), LAYOUTS["three"])
            engine.train_batch(batch, PolicyLoss(CONFIG), WHOLE)
        torch.save((outputs, metrics, weights_of(engine)), folder / f"{family}_{rank}.pt")


def test_two_ranks_equal_one(tmp_path):
    paths = {name: tiny_model_dir(tmp_path / name, family, **c) for name, (family, c) in FAMILIES.items()}
    batch = ragged_batch()
    one = make_engine(paths["qwen2"])
    batch = with_log_probs(batch, one.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"])
    torch.save(batch, tmp_path / "batch.pt")
    run_ranks(two_ranks, 2, tmp_path, paths)
    for family, path in paths.items():
        one = make_engine(path)
        expected = one.infer_batch(batch, {"log_probs", "entropy", "sum_pi_squared"}, WHOLE, 0.7)
        with one.train_mode():
            metrics = one.train_batch(batch, PolicyLoss(CONFIG), WHOLE)
            one.train_batch(batch, PolicyLoss(CONFIG), WHOLE)
        weights = weights_of(one)
        for rank in range(2):
            outputs, found, moved = torch.load(tmp_path / f"{family}_{rank}.pt", weights_only=True)
            for name, values in expected.items():
                print(family, name, float((outputs[name] - values).abs().max()))
                assert_close(outputs[name], values, atol=1e-5, rtol=0)
            assert found == pytest.approx(metrics, rel=1e-5, abs=1e-5)
            assert moved.keys() == weights.keys()
            for name, weight in weights.items():
                assert_close(moved[name], weight, atol=2e-6, rtol=1e-5, msg=lambda m, n=name, f=family: f"{f} {n}: {m}")
