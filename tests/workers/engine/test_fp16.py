"""Training in fp16: the loss is scaled, and a mini-batch whose gradients overflow is computed again."""

import pytest
import torch
from torch.testing import assert_close

from tests.workers.support import WHOLE, make_engine, ragged_batch, weights_of
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.workers.config import FSDPEngineConfig, MixedPrecisionConfig
from verl.workers.engine.fsdp.sharding import mixed_precision
from verl.workers.engine.loss_scale import FIRST_SCALE, GROWTH_INTERVAL, MAX_SCALE, LossScale
from verl.workers.losses import sft_loss


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "qwen3")


def smaller(factor):
    def loss(outputs, micro_batch, totals):
        value, metrics = sft_loss(outputs, micro_batch, totals)
        return value * factor, metrics

    return loss


def in_fp16(path, scale=FIRST_SCALE):
    engine = make_engine(path, dtype="float16")
    engine.loss_scale = LossScale(scale)
    return engine


def gradients(engine, factor):
    with engine.train_mode():
        engine.forward_backward_batch(ragged_batch(), smaller(factor), WHOLE)
    scale = engine.loss_scale.value if engine.loss_scale else 1
    return torch.cat([p.grad.to_local().flatten() if hasattr(p.grad, "to_local") else p.grad.flatten()
                      for p in engine.model.parameters()]) / scale  # fmt: skip


def test_small_gradients_are_kept_by_the_scale_alone(path):
    exact = gradients(make_engine(path), 1e-6)
    scaled = gradients(in_fp16(path), 1e-6)
    assert (scaled - exact).norm() < 0.01 * exact.norm()
    lost = gradients(in_fp16(path, scale=1), 1e-6)
    assert (lost - exact).norm() > 0.5 * exact.norm()


def test_an_overflow_loses_no_update(path):
    weights = []
    for scale in (FIRST_SCALE, MAX_SCALE):
        engine = in_fp16(path, scale)
        with engine.train_mode():
            metrics = engine.train_batch(ragged_batch(), sft_loss, WHOLE)
        assert metrics["skipped_steps"] == 0
        assert metrics["loss_scale"] == engine.loss_scale.value
        assert (engine.weight_version, engine.loss_scale.updates, list(engine.non_finite)) == (1, 1, [])
        weights.append(weights_of(engine))
    assert engine.loss_scale.value < MAX_SCALE
    for name, weight in weights[0].items():
        assert torch.equal(weight, weights[1][name])  # a power of two rounds nothing


def test_what_overflows_without_a_scale_is_reported(path):
    engine = in_fp16(path, scale=4)
    before = weights_of(engine)
    with engine.train_mode():
        metrics = engine.train_batch(ragged_batch(), smaller(1e9), WHOLE)
    assert (metrics["skipped_steps"], metrics["loss_scale"], engine.weight_version) == (1, 1, 0)
    assert {problem.kind for problem in engine.non_finite} == {"gradient"}
    assert all(torch.equal(weight, before[name]) for name, weight in weights_of(engine).items())


def test_a_loss_that_is_not_finite_leaves_the_scale(path):
    engine = in_fp16(path)
    with engine.train_mode():
        metrics = engine.train_batch(ragged_batch(), smaller(float("nan")), WHOLE)
    assert (metrics["skipped_steps"], engine.loss_scale.value) == (1, FIRST_SCALE)


def test_the_scale_grows_and_falls():
    scale = LossScale(FIRST_SCALE, GROWTH_INTERVAL - 1)
    scale.updated()
    assert (scale.value, scale.updates) == (2 * FIRST_SCALE, 0)
    scale.updated()
    scale.overflowed()
    assert (scale.value, scale.updates) == (FIRST_SCALE, 0)
    largest = LossScale(MAX_SCALE, GROWTH_INTERVAL - 1)
    largest.updated()
    assert largest.value == MAX_SCALE


def test_a_checkpoint_has_the_scale(path, tmp_path):
    engine = in_fp16(path)
    engine.loss_scale = LossScale(512, 7)
    engine.save_checkpoint(str(tmp_path / "state"))
    other = in_fp16(path)
    other.load_checkpoint(str(tmp_path / "state"), ("model",))
    assert other.loss_scale == LossScale(FIRST_SCALE, 0)
    other.load_checkpoint(str(tmp_path / "state"))
    assert other.loss_scale == LossScale(512, 7)
    plain = make_engine(path)
    plain.save_checkpoint(str(tmp_path / "plain"))
    other.load_checkpoint(str(tmp_path / "plain"))
    assert other.loss_scale == LossScale()
    plain.load_checkpoint(str(tmp_path / "state"))
    assert plain.loss_scale is None
    for name, weight in weights_of(plain).items():
        assert_close(weight, weights_of(engine)[name], atol=0, rtol=0)


@pytest.mark.parametrize(
    "settings", [{"model_dtype": "fp16"}, {"mixed_precision": MixedPrecisionConfig(reduce_dtype="fp16")}]
)
def test_weights_and_sums_of_gradients_are_not_in_fp16(settings):
    with pytest.raises(ConfigError, match="dtype=fp16 only computes in it"):
        mixed_precision(FSDPEngineConfig(**settings))
