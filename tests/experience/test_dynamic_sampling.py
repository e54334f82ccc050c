"""Only prompts that can teach: which they are, how many draws it takes, and a run that does it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.tiny_run import make_tiny_run, overrides
from verl.errors import ConfigError, RewardError, RolloutError
from verl.experience.dynamic_sampling import Draw, fill_batch, informative_rows, values_of
from verl.protocol import DataProto
from verl.trainer.config import FilterGroupsConfig
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo


@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 2), st.booleans()), max_size=30))
def test_a_prompt_is_kept_if_and_only_if_two_scored_responses_differ(rows):
    prompts, values, scored = ([row[k] for row in rows] for k in range(3))
    expected = [
        i
        for i, prompt in enumerate(prompts)
        if len({v for p, v, ok in zip(prompts, values, scored, strict=True) if p == prompt and ok}) > 1
    ]
    found = informative_rows(np.array(values, float), np.array(prompts), np.array(scored, bool))
    assert found.tolist() == expected


def draw_of(scores: list[list[float]], failed: set[tuple[int, int]] = frozenset(), number: int = 0) -> Draw:
    """A prompt for each inner list, named by draw and row."""
    n = len(scores[0])
    flat = torch.tensor(scores).flatten()
    names = np.array([f"p{number}.{row}" for row in range(len(scores)) for _ in range(n)], dtype=object)
    batch = DataProto.from_dict(
        tensors={"token_level_scores": torch.stack([torch.zeros_like(flat), flat], dim=-1)},
        non_tensors={"name": names, "score": np.array(flat.tolist(), dtype=object)},
    )
    takes_part = np.array([(row, k) not in failed for row in range(len(scores)) for k in range(n)])
    return Draw(batch, names, takes_part)


def config(metric: str = "seq_reward", limit: int = 0) -> FilterGroupsConfig:
    return FilterGroupsConfig(enable=True, metric=metric, max_num_gen_batches=limit)


def test_batches_are_drawn_until_enough_prompts_differ():
    draws = [
        draw_of([[1, 1], [0, 1], [0, 0]], number=0),  # one differs
        draw_of([[0, 0], [0, 0], [1, 1]], number=1),  # none
        draw_of([[1, 0], [0, 1], [2, 1]], number=2),  # three: one more than are needed
    ]
    batch, metrics = fill_batch(iter(draws), config(), num_prompts=3, n=2)
    assert batch.non_tensor_batch["name"].tolist() == ["p0.1", "p0.1", "p2.0", "p2.0", "p2.1", "p2.1"]
    assert metrics == {
        "training/filter_groups/num_gen_batches": 3,
        "training/filter_groups/kept_ratio": pytest.approx(4 / 9),
        "training/filter_groups/surplus": 1,
        # 3 + 2 + 5 over 18 responses
        "training/filter_groups/seq_reward/mean": pytest.approx(10 / 18),
    }


def test_a_failed_response_neither_makes_a_prompt_differ_nor_leaves_it():
    # The 0 of the first prompt is a failure: what was scored is equal. The second prompt differs without its failure.
    one = draw_of([[1, 1, 0], [1, 0, 0]], failed={(0, 2), (1, 2)})
    batch, _ = fill_batch(iter([one]), config(), num_prompts=1, n=3)
    assert batch.non_tensor_batch["name"].tolist() == ["p0.1"] * 3


def test_giving_up_says_what_was_found():
    with pytest.raises(
        RolloutError, match=r"found 0 prompts whose responses differ in 'score' among 4.*needs 2.*=2 is"
    ):
        fill_batch(iter([draw_of([[1, 1], [1, 1]])] * 3), config("score", limit=2), num_prompts=2, n=2)


def test_rounding_and_missing_values_are_no_difference():
    tokens = torch.zeros(6, 20)
    tokens[0] = 0.7  # 20 times 0.7 is 14
    tokens[1:, -1] = torch.tensor([14.0, 11.000001, 11.0, 1.0, 0.0])
    prompts, scored = np.array(["a", "a", "b", "b", "c", "c"]), np.ones(6, dtype=bool)
    accs = np.array([1.0, None, 0.5, 0.1 + 0.4, float("nan"), 1.0], dtype=object)
    batch = DataProto.from_dict(tensors={"token_level_scores": tokens}, non_tensors={"acc": accs})
    values, rounding = values_of(batch, "seq_reward")
    assert informative_rows(values, prompts, scored, rounding).tolist() == [4, 5]
    values, rounding = values_of(batch, "acc")
    assert informative_rows(values, prompts, scored, rounding).tolist() == []
    accs[1] = accs[4] = 0.0
    assert informative_rows(values_of(batch, "acc")[0], prompts, scored).tolist() == [0, 1, 4, 5]


def test_values_come_from_scores_or_from_the_reward_function():
    batch = draw_of([[1, 0.5]]).batch
    assert values_of(batch, "seq_reward")[0].tolist() == values_of(batch, "reward")[0].tolist() == [1, 0.5]
    assert values_of(batch, "score")[0].tolist() == [1, 0.5]
    with pytest.raises(RewardError, match=r"metric=acc, but the reward function returned no 'acc'"):
        values_of(batch, "acc")
    with pytest.raises(RewardError, match=r"metric=name must be a number, got 'p0\.0'"):
        values_of(batch, "name")


def test_a_reward_component_that_some_batches_lack_is_none_there():
    first, second = draw_of([[1, 0]], number=0), draw_of([[1, 0]], number=1)
    extended = second.batch | DataProto.from_dict(non_tensors={"style": np.array(["a", "b"], dtype=object)})
    draws = [first, Draw(extended, second.prompts, second.takes_part)]
    batch, _ = fill_batch(iter(draws), config(), num_prompts=2, n=2)
    assert batch.non_tensor_batch["style"].tolist() == [None, None, "a", "b"]


REWARD = (
    "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
    "    solved = extra_info['index'] % 2 == 0\n"  # every other prompt is always solved: nothing to learn
    "    return 1.0 if solved else sum(c.isdigit() for c in solution_str) / 8\n"
)


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {
            "custom_reward_function__path": tmp_path / "reward.py",
            "algorithm__filter_groups__enable": "true",
            "algorithm__filter_groups__metric": "score",
            "trainer__rollout_data_dir": tmp_path / "rollouts",
        } | changes
        run_ppo(compose(overrides(paths, tmp_path, **settings)))
        return {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}

    return run


@pytest.mark.slow
def test_a_run_trains_on_prompts_that_differ_and_resumes_exactly(train, tmp_path):
    straight = train(trainer__total_training_steps=4, trainer__default_local_dir=tmp_path / "a")
    assert list(straight) == [1, 2, 3, 4]
    assert all(metrics["critic/score/max"] < 1 for metrics in straight.values())
    # Half of the 16 prompts are always solved: the 16 that 4 steps need take two epochs of 4 batches, but for the last.
    assert sum(metrics["training/filter_groups/num_gen_batches"] for metrics in straight.values()) >= 7
    assert straight[4]["training/epoch"] >= 1
    other = {"trainer__default_local_dir": tmp_path / "b"}
    train(trainer__total_training_steps=3, trainer__save_freq=3, **other)
    rest = train(trainer__total_training_steps=4, **other)
    for name, value in rest[4].items():
        if not name.startswith(("timing", "perf/")):
            assert value == pytest.approx(straight[4][name], rel=0, abs=0, nan_ok=True), name


def test_more_prompts_can_be_drawn_at_once(train):
    steps = train(data__gen_batch_size=8, trainer__total_training_steps=1)
    metrics = {name.split("/")[-1]: value for name, value in steps[1].items() if "filter_groups" in name}
    prompts = 8 * metrics["num_gen_batches"]
    assert prompts * metrics["kept_ratio"] == pytest.approx(4 + metrics["surplus"])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm__filter_groups__metric": "null"}, "must know what has to differ"),
        ({"actor_rollout_ref__rollout__n": 1}, "there is one"),
        (
            {"algorithm__filter_groups__metric": "seq_final_reward", "algorithm__use_kl_in_reward": "true"},
            "all final rewards differ",
        ),
        ({"algorithm__filter_groups__enable": "false", "data__gen_batch_size": 8}, "only sampled with dynamic"),
    ],
)
def test_settings_that_cannot_work_are_refused(train, changes, message):
    with pytest.raises(ConfigError, match=message):
        train(**changes)
