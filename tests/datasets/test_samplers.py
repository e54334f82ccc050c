"""Samplers: shares of sources, the curriculum, resuming at every position, and what is refused."""

import collections
import dataclasses
import io
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.config import CurriculumConfig, SamplerConfig
from verl.datasets import create_rl_sampler
from verl.datasets.curriculum import DifficultyCurriculum
from verl.datasets.mixing import WeightedSources, round_shares
from verl.datasets.sampler import InOrder, SeededShuffle
from verl.errors import CheckpointError, ConfigError, SchemaError
from verl.experimental.dataset.sampler import AbstractCurriculumSampler, AbstractSampler
from verl.protocol import DataProto
from verl.trainer.config import DataConfig

CONFIG = DataConfig(train_batch_size=4, seed=5, dataloader_num_workers=0)


class Rows(list):
    """A data set whose rows are their sources; an item is its number."""

    def __getitem__(self, item):
        return item

    def sources(self):
        return list(self)


def config(**changes):
    return dataclasses.replace(CONFIG, **changes)


def take(sampler, count):
    """The next ``count`` rows over as many epochs as it takes."""
    return list(itertools.islice(itertools.chain.from_iterable(iter(sampler) for _ in itertools.count()), count))


def scored(rows, scores, **extra):
    columns = {"row_index": np.array(rows, dtype=object)} | {k: np.array(v, dtype=object) for k, v in extra.items()}
    return DataProto.from_dict(
        tensors={"token_level_scores": torch.tensor(scores)[:, None] * torch.tensor([[0.0, 1.0]])}, non_tensors=columns
    )


# ---- shares of sources ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "uniform, counts",
    [
        # shares of 10: 5.0, 3.3, 1.7; running sums 5, 8.3, 10; a source rounds up where u passes an integer
        (0.0, [5, 3, 2]),
        (0.69, [5, 3, 2]),
        (0.71, [5, 4, 1]),
        (0.99, [5, 4, 1]),
    ],
)
def test_round_shares_by_hand(uniform, counts):
    assert round_shares([0.5, 0.33, 0.17], 10, uniform) == counts


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(0, 1e3), min_size=1, max_size=8).filter(lambda weights: sum(weights) > 1e-3),
    st.integers(1, 600),
    st.floats(0, 1, exclude_max=True),
)
def test_every_share_is_rounded_to_a_neighbour(weights, size, uniform):
    shares = [weight / sum(weights) for weight in weights]
    counts = round_shares(shares, size, uniform)
    assert sum(counts) == size
    assert all(abs(count - share * size) < 1 + 1e-6 for count, share in zip(counts, shares, strict=True))
    assert all(count == 0 for count, share in zip(counts, shares, strict=True) if share == 0)


def test_shares_are_exact_on_average():
    # Over the midpoints of [0, 1) the mean is the integral, up to half a step at each jump.
    shares, steps = [0.61, 0.02, 0.37], 1000
    counts = np.array([round_shares(shares, 7, (step + 0.5) / steps) for step in range(steps)])
    np.testing.assert_allclose(counts.mean(0), np.array(shares) * 7, atol=2 / steps)


def test_a_batch_holds_each_source_by_its_weight():
    data = Rows("a" * 30 + "b" * 10 + "c" * 5)
    sampler = create_rl_sampler(config(train_batch_size=9, source_weights={"a": 1, "b": 2, "c": 0}), data)
    assert isinstance(sampler, WeightedSources)
    assert len(sampler) == 45
    rows = take(sampler, 90)
    for start in range(0, 90, 9):
        assert collections.Counter(data.sources()[row] for row in rows[start : start + 9]) == {"a": 3, "b": 6}


def test_a_source_repeats_no_row_before_it_is_through():
    data = Rows("a" * 7 + "b" * 20 + "a" * 3)
    rows = take(WeightedSources(data, config(source_weights={"a": 3, "b": 1})), 120)
    for name, members in {"a": [*range(7), 27, 28, 29], "b": list(range(7, 27))}.items():
        stream = [row for row in rows if data.sources()[row] == name]
        size = len(members)
        whole = [stream[start : start + size] for start in range(0, len(stream) - size + 1, size)]
        assert len(whole) >= 1
        assert all(sorted(epoch) == members for epoch in whole)
        assert len(whole) == 1 or whole[0] != whole[1]


def test_without_shuffle_a_source_comes_as_it_stands():
    data = Rows("aabab")
    rows = take(WeightedSources(data, config(shuffle=False, source_weights={"a": 1, "b": 1})), 8)
    assert [row for row in rows if row in (0, 1, 3)] == [0, 1, 3, 0]
    assert [row for row in rows if row in (2, 4)] == [2, 4, 2, 4]


@pytest.mark.parametrize(
    "weights, says",
    [
        ({"a": 1, "bb": 1}, "names 'bb', and no training row has that source"),
        ({"a": 1}, r"has no weight for b\. Give every source a weight; 0 leaves it out"),
        ({"a": 0, "b": 0}, "at least one weight must be positive"),
    ],
)
def test_weights_that_do_not_fit_the_data(weights, says):
    with pytest.raises(ConfigError, match=says):
        WeightedSources(Rows("aabb"), config(source_weights=weights))


def test_weights_need_a_data_set_that_knows_its_sources():
    with pytest.raises(ConfigError, match=r"a method sources\(\), and range has none"):
        create_rl_sampler(config(source_weights={"a": 1}), range(9))


# ---- the curriculum ------------------------------------------------------------------------------


def curriculum(rows, batch=2, **settings):
    return DifficultyCurriculum(range(rows), config(train_batch_size=batch, curriculum=CurriculumConfig(**settings)))


def test_weights_by_hand():
    sampler = curriculum(3, sharpness=2.0)
    sampler.update(scored([1, 1, 1, 2, 2, 2], [1.0, 0.0, 0.2, 1.0, 0.5, 3.0]))
    # row 0: (0 + 0.5) / (0 + 1) = 0.5       row 1: (1 + 0.5) / (3 + 1) = 0.375      row 2: 3.5 / 4 = 0.875
    np.testing.assert_allclose(sampler.success_rates, [0.5, 0.375, 0.875])
    # 4 p (1 - p): 1; 4 · 0.375 · 0.625 = 0.9375; 4 · 0.875 · 0.125 = 0.4375
    np.testing.assert_allclose(sampler.weights, [1, 0.9375, 0.4375])
    # A second visit: successes 0.5 · 1 + 0, trials 0.5 · 3 + 1 → (0.5 + 0.5) / (2.5 + 1)
    sampler.update(scored([1], [0.0]))
    assert sampler.success_rates[1] == pytest.approx(1 / 3.5)


def test_a_target_other_than_one_half():
    sampler = curriculum(1, sharpness=3.0, target_success=0.25)
    assert sampler.weights.tolist() == [1.0]
    sampler.update(scored([0, 0], [1.0, 1.0]))
    # p = (2 + 0.25) / 3 = 0.75: (0.75 / 0.25)^0.75 · (0.25 / 0.75)^2.25 = 3^-1.5
    assert sampler.weights[0] == pytest.approx(3**-1.5)


@pytest.mark.filterwarnings("error")
def test_any_sharpness_draws_what_is_nearest_to_the_target():
    sampler = curriculum(20, sharpness=1e5)
    sampler.update(scored(range(19), [0.0] * 19))
    # 19 rows: p = 0.5 / 2 = 0.25, weight 0.75^50000, which no float holds; row 19 was never drawn: weight 1
    assert sampler.weights[0] == 0.0
    assert sampler.draw()[0] == 19


def test_samples_that_could_not_be_scored_are_not_counted():
    sampler = curriculum(2)
    sampler.update(scored([0, 0], [0.0, 1.0], reward_status=["error", "ok"]))
    assert (sampler.successes[0], sampler.trials[0]) == (1.0, 1.0)


def test_rows_near_the_target_are_drawn_more_often():
    sampler = curriculum(40, batch=4, revisit_epochs=1000)
    for row in range(40):
        outcome = [1.0, 1.0] if row < 15 else [0.0, 0.0] if row < 30 else [0.0, 1.0]
        sampler.update(scored([row, row], outcome))
    drawn = collections.Counter(take(sampler, 2000))
    often = np.mean([drawn[row] for row in range(30, 40)])
    seldom = np.mean([drawn[row] for row in range(30)])
    # p = 2.5/3 or 0.5/3: weight (4 · 5/6 · 1/6)^2 = 0.31; without replacement within a batch of 4 the
    # ratio is a little smaller.
    assert seldom / often == pytest.approx(0.31, abs=0.06)


def test_no_row_starves():
    sampler = curriculum(24, batch=4, revisit_epochs=3, sharpness=16)
    last, longest, iterator = dict.fromkeys(range(24), 0), 0, iter(sampler)
    for batch in range(1, 200):
        rows = []
        while len(rows) < 4:
            for row in itertools.islice(iterator, 4 - len(rows)):
                rows.append(row)
            iterator = iterator if len(rows) == 4 else iter(sampler)
        assert len(set(rows)) == 4
        for row in rows:
            longest = max(longest, batch - last[row])
            last[row] = batch
        # Only the last eight rows are worth drawing.
        sampler.update(scored(rows, [float(row >= 16 and batch % 2) for row in rows]))
    # An epoch is 6 batches. After 3 epochs a row is due; at most 24 rows wait for 4 places a batch.
    assert longest <= 3 * 6 + 6
    assert longest > 12  # and until then the others come first


def learner(sampler, seed, update, steps=200, batch=16, n=8):
    """Share of groups with both outcomes when success follows skill minus difficulty and mixed groups teach."""
    rng = np.random.default_rng(seed)
    difficulty, skill, mixed = rng.normal(0, 3, len(sampler)), -2.0, []
    rows = take(sampler, 0)
    stream = itertools.chain.from_iterable(iter(sampler) for _ in itertools.count())
    for _ in range(steps):
        rows = list(itertools.islice(stream, batch))
        outcomes = rng.random((batch, n)) < 1 / (1 + np.exp(difficulty[rows] - skill))[:, None]
        is_mixed = outcomes.any(1) & ~outcomes.all(1)
        mixed.append(is_mixed.mean())
        skill += 0.0015 * is_mixed.sum()
        update(scored(np.repeat(rows, n).tolist(), outcomes.astype(np.float32).ravel().tolist()))
    return float(np.mean(mixed)), skill


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_curriculum_gives_more_signal_than_a_shuffle(seed):
    sampler = DifficultyCurriculum(range(400), config(train_batch_size=16, seed=seed))
    signal, skill = learner(sampler, seed, sampler.update)
    plain, plain_skill = learner(SeededShuffle(range(400), seed), seed, lambda batch: None)
    assert signal > 1.2 * plain
    assert skill > plain_skill + 0.3


def test_update_names_the_column_that_it_lacks():
    batch = DataProto.from_dict(tensors={"token_level_scores": torch.zeros(1, 2)})
    with pytest.raises(SchemaError, match=r"'row_index'.*batch has: token_level_scores"):
        curriculum(2).update(batch)


def test_the_built_in_is_chosen_by_its_name():
    chosen = config(sampler=SamplerConfig(class_name="DifficultyCurriculum"))
    sampler = create_rl_sampler(chosen, range(9))
    assert isinstance(sampler, DifficultyCurriculum)
    assert isinstance(sampler, AbstractCurriculumSampler)
    by_path = SamplerConfig(class_path="pkg://verl.datasets.curriculum", class_name="DifficultyCurriculum")
    assert type(create_rl_sampler(config(sampler=by_path), range(9))) is DifficultyCurriculum
    with pytest.raises(ConfigError, match=r"Set dataloader_num_workers=0"):
        create_rl_sampler(dataclasses.replace(chosen, dataloader_num_workers=2), range(9))
    with pytest.raises(ConfigError, match=r"no such sampler.*DifficultyCurriculum"):
        create_rl_sampler(config(sampler=SamplerConfig(class_name="DifficultCurriculum")), range(9))
    absent = SamplerConfig(class_path="no_such_package", class_name="Mine")
    with pytest.raises(ConfigError, match=r"^sampler\.class_path='no_such_package': there is no module"):
        create_rl_sampler(config(sampler=absent), range(9))


def test_the_bases_are_abstract():
    with pytest.raises(TypeError):
        AbstractSampler(range(3), CONFIG)

    class NoUpdate(AbstractCurriculumSampler):
        def __init__(self, data_source, data_config): ...

    with pytest.raises(TypeError, match="update"):
        NoUpdate(range(3), CONFIG)


# ---- resuming ------------------------------------------------------------------------------------

DATA = Rows("aaabbaacbbaacabba")
MAKERS = {
    "shuffle": lambda: SeededShuffle(DATA, seed=3),
    "order": lambda: InOrder(DATA),
    "mix": lambda: WeightedSources(DATA, config(source_weights={"a": 2, "b": 1.5, "c": 1})),
    "curriculum": lambda: DifficultyCurriculum(DATA, config(curriculum=CurriculumConfig(revisit_epochs=2))),
}


def train(loader, sampler, count, rng_step=0):
    """The next ``count`` batches; outcomes depend on the row and the number of the batch."""
    seen = []
    while len(seen) < count:
        for rows in loader:
            seen.append(rows)
            step = rng_step + len(seen)
            if hasattr(sampler, "update"):
                sampler.update(scored(rows * 2, [float((row * 7 + step * k) % 3 == 0) for k in (1, 2) for row in rows]))
            if len(seen) == count:
                break
    return seen


def make_loader(kind):
    sampler = MAKERS[kind]()
    return StatefulDataLoader(DATA, batch_size=4, sampler=sampler, drop_last=True, collate_fn=list), sampler


def through_a_file(state):
    file = io.BytesIO()
    torch.save(state, file)
    return torch.load(io.BytesIO(file.getvalue()), weights_only=True)


@pytest.mark.parametrize("kind", MAKERS)
def test_resuming_is_exact_at_every_position(kind):
    expected = train(*make_loader(kind), 14)
    assert len({tuple(batch) for batch in expected}) > 4 or kind == "order"
    for stop in range(1, 13):
        first, first_sampler = make_loader(kind)
        assert train(first, first_sampler, stop) == expected[:stop]
        second, sampler = make_loader(kind)
        second.load_state_dict(through_a_file(first.state_dict()))
        assert train(second, sampler, 14 - stop, rng_step=stop) == expected[stop:], stop


@pytest.mark.parametrize("kind", ["shuffle", "mix", "curriculum"])
def test_a_data_set_that_has_shrunk_since(kind, monkeypatch):
    loader, sampler = make_loader(kind)
    train(loader, sampler, 2)
    state = loader.state_dict()
    monkeypatch.setitem(globals(), "DATA", Rows("aabbc"))
    loader, sampler = make_loader(kind)
    loader.load_state_dict(state)
    with pytest.raises(CheckpointError, match="training rows, and there are"):
        train(loader, sampler, 1)


def test_other_sources_than_the_checkpoint():
    sampler = MAKERS["mix"]()
    with pytest.raises(ConfigError, match="checkpoint was made with a, z"):
        sampler.restore({"a": {}, "z": {}})


@pytest.mark.parametrize("kind", ["shuffle", "order", "mix", "curriculum"])
def test_rows_that_the_data_set_gains_are_drawn(kind, monkeypatch):
    data = Rows(DATA)
    monkeypatch.setitem(globals(), "DATA", data)
    loader, sampler = make_loader(kind)
    train(loader, sampler, 1)
    data += ["a", "b", "c"]
    seen = {row for batch in train(loader, sampler, 30) for row in batch}
    assert {17, 18, 19} <= seen


@pytest.mark.parametrize("kind", MAKERS)
def test_an_iterator_goes_on_in_the_middle_of_a_batch(kind):
    expected = list(iter(MAKERS[kind]()))
    for stop in range(1, len(expected)):
        first = iter(MAKERS[kind]())
        assert list(itertools.islice(first, stop)) == expected[:stop]
        second = iter(MAKERS[kind]())
        second.load_state_dict(first.state_dict())
        assert list(second) == expected[stop:], stop
