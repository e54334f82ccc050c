"""The loop over mini-batches and epochs."""

import math

import pytest
import torch

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.utils.metric import extreme
from verl.workers.engine import MicroBatchConfig
from verl.workers.engine.non_finite import NonFinite
from verl.workers.losses import sft_loss
from verl.workers.update import OptimizerSteps, UpdatePlan, mini_batch_size_per_rank


def batch(**columns):
    return DataProto.from_dict(tensors={name: torch.as_tensor(value) for name, value in columns.items()})


class Recorder:
    """Stands where an engine does, and writes down which rows it is given."""

    def __init__(self, skip=()):
        self.seen, self.skip, self.weight_version, self.lr = [], skip, 0, 0.5
        self.non_finite = ()

    def train_batch(self, part, loss_fn, micro, temperature):
        step = len(self.seen)
        self.seen.append(part.batch["row"].tolist())
        skipped = step in self.skip
        problem = NonFinite(kind="output", name="log_probs", value="nan", rank=0, row=1, token=3)
        self.non_finite = [problem] if skipped else []
        self.weight_version += not skipped
        return {"loss": step, "x_max": -step, "x_min": step, "grad_norm": math.nan if skipped else 1.0 + step,
                "skipped_steps": float(skipped)}  # fmt: skip

    def lr_scheduler_step(self):
        return self.lr


def run(engine, rows=6, **plan):
    plan = UpdatePlan(**{"mini_batch_size": 2, "micro": MicroBatchConfig()} | plan)
    data, steps = batch(row=list(range(rows))), OptimizerSteps()
    for part in plan.mini_batches(rows, engine.weight_version):
        report = engine.train_batch(data.select_idxs(part), sft_loss, plan.micro, plan.temperature)
        steps.add(report, engine.non_finite, part)
    engine.problems = steps.problems
    return steps.metrics("actor", engine.lr_scheduler_step())


def test_mini_batches_are_contiguous_and_metrics_are_means():
    engine = Recorder()
    metrics = run(engine, epochs=2)
    assert engine.seen == [[0, 1], [2, 3], [4, 5]] * 2
    assert metrics == {
        "loss": 2.5, "x_max": 0, "x_min": 0, "actor/grad_norm": 3.5, "actor/skipped_steps": 0.0, "actor/lr": 0.5
    }  # fmt: skip


def test_skipped_steps_are_counted_and_leave_the_mean():
    engine = Recorder(skip=(1,))
    metrics = run(engine)
    assert metrics["actor/skipped_steps"] == 1.0
    # Row 1 of the mini-batch with rows 2 and 3 is row 3 of the batch.
    assert [str(one) for one in engine.problems] == ["the model's log_probs is nan in sample 3, response token 3"]
    assert metrics["actor/grad_norm"] == 2.0  # of 1 and 3
    assert math.isnan(run(Recorder(skip=(0, 1, 2)))["actor/grad_norm"])


@pytest.mark.parametrize("values", [[math.nan, 1.0, 2.0], [2.0, 1.0, math.nan]])
def test_an_extreme_does_not_hide_what_is_not_a_number(values):
    assert math.isnan(extreme("x_max", values))
    assert math.isnan(extreme("x_min", values))
    assert (extreme("x_max", [2.0, 1.0]), extreme("x_min", [2.0, 1.0])) == (2.0, 1.0)


def test_shuffling_moves_whole_mini_batches_and_is_seeded():
    orders = []
    for version in (0, 0, 1):
        engine = Recorder()
        engine.weight_version = version
        run(engine, rows=40, shuffle_seed=7, epochs=2)
        assert sorted(engine.seen[:20]) == sorted(engine.seen[20:]) == [[i, i + 1] for i in range(0, 40, 2)]
        assert engine.seen[:20] != engine.seen[20:]
        orders.append(engine.seen)
    assert orders[0] == orders[1]
    assert orders[0] != orders[2]


def test_mini_batches_of_other_sizes_are_contiguous_parts():
    plan = UpdatePlan(mini_batch_size=2, micro=MicroBatchConfig(), epochs=2)
    assert list(plan.mini_batches(6, 0, [1, 3, 2])) == [[0], [1, 2, 3], [4, 5]] * 2
    with pytest.raises(ConfigError, match=r"mini-batches of \[1, 3\] sequences are not the 6 sequences"):
        list(plan.mini_batches(6, 0, [1, 3]))


def test_sizes_that_do_not_divide_are_refused():
    assert mini_batch_size_per_rank("actor.ppo_mini_batch_size", 6, 4, 8) == 3
    with pytest.raises(ConfigError, match=r"actor.ppo_mini_batch_size=6 with n=1 .* 6 responses.* over 4 ranks"):
        mini_batch_size_per_rank("actor.ppo_mini_batch_size", 6, 1, 4)
    with pytest.raises(ConfigError, match="6 sequences of this rank do not divide into mini-batches of 4"):
        run(Recorder(), mini_batch_size=4)
