"""A loss or a gradient that is NaN or infinite, on one rank or all: the optimizer step is skipped on **all** ranks.

Weights, moments and the weight version do not change; the learning-rate schedule goes on, because it counts steps of
the run. The warning names the column of the batch, the model's output, the term of the loss or the parameter, with
sample, ``uid``, token and the number of values. An infinite ``old_log_probs`` alone does not reach a loss that clamps
the log-ratio.
"""

from __future__ import annotations

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.workers.support import (
    LAYOUTS,
    WHOLE,
    make_engine,
    ragged_batch,
    run_ranks,
    share,
    weights_of,
    with_log_probs,
)
from verl.protocol import DataProto
from verl.testing.models import tiny_model_dir
from verl.workers.config import ActorConfig
from verl.workers.engine import FSDPEngine, FunctionLoss, PartialSum
from verl.workers.losses import PolicyLoss, sft_loss


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_model_dir(tmp_path_factory.mktemp("model"), "llama")


def with_value(batch: DataProto, column: str, row: int, token: int, value: float) -> DataProto:
    changed = copy.deepcopy(batch)
    changed.batch[column][row, token] = value
    return changed


def policy_batch(engine: FSDPEngine) -> DataProto:
    batch = ragged_batch()
    return with_log_probs(batch, engine.infer_batch(batch, {"log_probs"}, WHOLE)["log_probs"])


def state_of(engine: FSDPEngine) -> list[torch.Tensor]:
    """Weights and the optimizer's moments and counters."""
    assert engine.optimizer is not None
    moments = [value for state in engine.optimizer.state.values() for _, value in sorted(state.items())]
    return [tensor.detach().clone() for tensor in (*weights_of(engine).values(), *moments)]


@FunctionLoss
def nan_beside(outputs: dict, data: DataProto, totals: Any) -> tuple[torch.Tensor, dict]:
    """A loss that is NaN although its gradient is finite."""
    loss, _ = sft_loss(outputs, data, totals)
    return loss + math.nan, {"a": PartialSum(loss.detach()), "b": PartialSum(loss.detach() + math.nan)}


@FunctionLoss
def infinite_slope(outputs: dict, data: DataProto, totals: Any) -> tuple[torch.Tensor, dict]:
    """√0: a finite loss, whose gradient is infinite (and times 0 NaN)."""
    return (outputs["log_probs"].sum() * 0.0).sqrt(), {}


@FunctionLoss
def steep(outputs: dict, data: DataProto, totals: Any) -> tuple[torch.Tensor, dict]:
    """Finite gradients, the squares of which are not: 1e30² is above the largest float32, 3.4e38."""
    return sft_loss(outputs, data, totals)[0] * 1e30, {}


@pytest.mark.parametrize("layout", ["whole", "one by one"])
@pytest.mark.parametrize(("column", "value"), [("advantages", math.nan), ("old_log_probs", math.nan)])
def test_a_bad_column_is_named_with_its_sample_and_token(path, layout, column, value):
    engine = make_engine(path)
    batch, loss = policy_batch(engine), PolicyLoss(ActorConfig(entropy_coeff=0.0))
    with engine.train_mode():
        engine.train_batch(batch, loss, WHOLE)  # so that the optimizer has moments
        before = state_of(engine)
        metrics = engine.train_batch(with_value(batch, column, 4, 0, value), loss, LAYOUTS[layout])
        assert metrics["skipped_steps"] == 1.0
        assert math.isnan(metrics["grad_norm"])
        assert engine.weight_version == 1
        assert all(map(torch.equal, before, state_of(engine)))
        first, *terms = map(str, engine.non_finite)
        assert first.startswith(f"column '{column}' of the batch is {value} in sample 4, response token 0 (1 of ")
        assert "the term 'actor/pg_loss' of the loss is nan" in terms or "inf" in terms[0]
        # What lies outside of the mask is nobody's business.
        outside = engine.train_batch(with_value(batch, column, 0, 3, value), loss, LAYOUTS[layout])
    assert outside["skipped_steps"] == 0.0
    assert engine.non_finite == []
    assert engine.weight_version == 2


def test_a_loss_that_is_not_finite_is_not_followed_even_where_its_gradient_is(path):
    engine = make_engine(path)
    before = state_of(engine)
    with engine.train_mode():
        metrics = engine.train_batch(ragged_batch(), nan_beside, WHOLE)
    assert metrics["skipped_steps"] == 1.0
    assert [str(one) for one in engine.non_finite] == ["the term 'b' of the loss is nan"]
    assert all(map(torch.equal, before, state_of(engine)))
    assert all(parameter.grad is None for parameter in engine.model.parameters())


def test_a_norm_that_overflows_is_not_followed(path):
    engine = make_engine(path)
    with engine.train_mode():
        engine.train_batch(ragged_batch(), sft_loss, WHOLE)
        before = state_of(engine)
        metrics = engine.train_batch(ragged_batch(), steep, WHOLE)
    assert (metrics["skipped_steps"], metrics["grad_norm"]) == (1.0, math.inf)
    assert all(map(torch.equal, before, state_of(engine)))


def test_a_gradient_is_named_by_its_parameters(path):
    engine = make_engine(path)
    with engine.train_mode():
        engine.train_batch(ragged_batch(), infinite_slope, WHOLE)
    assert len(engine.non_finite) == 3  # and no more, of all that there are
    assert str(engine.non_finite[0]).startswith("the gradient of ")


def test_weights_that_are_not_finite_show_in_the_models_output(path):
    engine = make_engine(path)
    with torch.no_grad():
        next(engine.model.parameters()).fill_(math.nan)
    batch = ragged_batch()
    with engine.train_mode():
        engine.train_batch(batch, sft_loss, WHOLE)
    tokens = int(batch.batch["response_mask"].sum())
    assert str(engine.non_finite[0]) == (
        f"the model's log_probs is nan in sample 1, response token 0 ({tokens} of {tokens} values are not finite)"
    )


def _two_ranks(rank: int, world_size: int, folder: Path, path: str) -> None:
    engine = make_engine(path)
    batch, loss = policy_batch(engine), PolicyLoss(ActorConfig(entropy_coeff=0.0))
    bad = with_value(batch, "advantages", 3, 0, math.nan)  # row 1 of rank 1
    before = weights_of(engine)
    with engine.train_mode():
        metrics = engine.train_batch(share(bad, rank, world_size), loss, LAYOUTS["one by one"])
        assert metrics["skipped_steps"] == 1.0
        texts = [(one.rank, str(one).split(" (")[0]) for one in engine.non_finite]
        assert texts[0] == (1, "column 'advantages' of the batch is nan in sample 1, response token 0")
        after = weights_of(engine)
        assert all(torch.equal(before[name], after[name]) for name in before)
        slope = infinite_slope if rank == 1 else sft_loss
        assert engine.train_batch(share(batch, rank, world_size), slope, WHOLE)["skipped_steps"] == 1.0
        assert {one.kind for one in engine.non_finite} == {"gradient"}
        assert engine.train_batch(share(batch, rank, world_size), loss, WHOLE)["skipped_steps"] == 0.0
    torch.save(texts, folder / f"{rank}.pt")


def test_one_ranks_bad_sample_stops_the_update_of_all(path, tmp_path):
    run_ranks(_two_ranks, 2, tmp_path, path)
    assert torch.load(tmp_path / "0.pt") == torch.load(tmp_path / "1.pt")
