"""The partition law: no cut of a mini-batch into ranks and micro-batches changes loss, gradient or metrics."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.testing import assert_close

from tests.support.losses import PAIRS, actor, batch, groups
from verl.algorithms import prepare_update
from verl.protocol import DataProto
from verl.workers.config import ActorConfig
from verl.workers.engine import BatchTotals, PartialSum
from verl.workers.losses import PolicyLoss

ROWS = 8


def mini_batch(seed: int, config: ActorConfig, with_weights: bool) -> tuple[DataProto, dict[str, Tensor]]:
    """The columns of an update, with those that are prepared; and what the model says."""
    data = batch(seed, rows=ROWS)
    outputs = {"log_probs": data.pop("log_probs"), "entropy": data["entropys"] + 0.1}
    if with_weights:
        data["rollout_is_weights"] = torch.rand(data["advantages"].shape, dtype=torch.float64)
    made = prepare_update({**data, "index": groups(ROWS)}, config, seed)
    return DataProto.from_dict(tensors=data | made), outputs


def gradient(
    config: ActorConfig, data: DataProto, outputs: dict[str, Tensor], ranks: list[list[list[int]]]
) -> tuple[Tensor, Tensor, dict[str, float]]:
    """Loss, gradient and metrics as the engine makes them: summed over passes, averaged over ranks."""
    loss_fn = PolicyLoss(config)
    assert loss_fn.outputs == {"log_probs", "entropy"}
    tokens = int(data.batch["response_mask"].sum())
    totals = BatchTotals(dp_size=len(ranks), batch_num_tokens=max(tokens, 1), global_batch_size=ROWS)
    leaves = {name: value.clone().requires_grad_() for name, value in outputs.items()}
    total, metrics = torch.zeros((), dtype=torch.float64), {}
    for passes in ranks:
        for rows in passes:
            part = data.select_idxs(rows)
            loss, found = loss_fn({name: value[rows] for name, value in leaves.items()}, part, totals)
            total = total + loss / len(ranks)
            share = int(part.batch["response_mask"].sum()) / max(tokens, 1)
            for name, value in found.items():
                number = float(value.value) if isinstance(value, PartialSum) else float(value) * share
                if not name.endswith(("_max", "_min")):
                    metrics[name] = metrics.get(name, 0.0) + number
    total.backward()
    return total.detach(), torch.stack([leaf.grad for leaf in leaves.values()]), metrics


@st.composite
def layouts(draw: st.DrawFn) -> list[list[list[int]]]:
    """Rows dealt to ranks, the rows of each rank cut into passes."""
    order = draw(st.permutations(range(ROWS)))
    dp_size = draw(st.sampled_from([1, 2, 4]))
    share = ROWS // dp_size
    ranks = []
    for rank in range(dp_size):
        rows = order[rank * share : (rank + 1) * share]
        size = draw(st.integers(1, share))
        ranks.append([rows[start : start + size] for start in range(0, share, size)])
    return ranks


@pytest.mark.proof("partition", param="name")
@pytest.mark.proof("partition", param="mode")
@pytest.mark.parametrize(("name", "mode"), PAIRS)
@settings(max_examples=15, deadline=None)
@given(seed=st.integers(0, 2**31), layout=layouts(), quantile=st.sampled_from([1.0, 0.4]), with_weights=st.booleans())
def test_partition_law(
    name: str, mode: str, seed: int, layout: list[list[list[int]]], quantile: float, with_weights: bool
):
    config = actor(
        name,
        {"top_entropy_quantile": quantile},
        loss_agg_mode=mode,
        entropy_coeff=0.3,
        use_kl_loss=True,
        kl_loss_coef=0.2,
    )
    data, outputs = mini_batch(seed, config, with_weights)
    whole = gradient(config, data, outputs, [[list(range(ROWS))]])
    split = gradient(config, data, outputs, layout)
    assert_close(split[0], whole[0], rtol=1e-9, atol=1e-9)
    assert_close(split[1], whole[1], rtol=1e-9, atol=1e-9)
    if data.batch["response_mask"].any():
        # Metrics are averaged in float32.
        assert split[2] == pytest.approx(whole[2], rel=1e-5, abs=1e-6)


def test_the_law_needs_the_prepared_columns():
    """Selected per pass instead of per mini-batch, kl_cov is another loss."""
    config = actor("kl_cov", entropy_coeff=0.3)
    data, outputs = mini_batch(0, config, with_weights=False)
    by_row = [
        prepare_update({k: v[row : row + 1] for k, v in data.batch.items()}, config, 0)["cov_selected"]
        for row in range(ROWS)
    ]
    other = data.select(batch_keys=[key for key in data.batch.keys() if key != "cov_selected"]) | DataProto.from_dict(
        tensors={"cov_selected": torch.cat(by_row)}
    )
    whole, split = (gradient(config, columns, outputs, [[list(range(ROWS))]])[0] for columns in (data, other))
    assert abs(float(whole - split)) > 1e-3
