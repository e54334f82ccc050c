"""Curriculum, growing data, mixed sources and rewards beside the other stages: what the step tells and waits for."""

from __future__ import annotations

import importlib
import json
import re
from pathlib import Path

import pytest

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from tests.trainer.test_run import assert_same_steps
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

# It names columns of the rows.
REWARD = (
    "def compute_score(solution_str, ability, prompt, extra_info, nothing=None):\n"
    "    assert (ability, prompt[0]['role'], nothing) == ('math', 'user', None)\n"
    "    return sum(c.isdigit() for c in solution_str) / 8\n"
)
# Remembers in a file what it was told: a sampler of a user, with the public base class.
SAMPLER = """
import json
from verl.experimental.dataset.sampler import AbstractCurriculumSampler

class Diary(AbstractCurriculumSampler):
    def __init__(self, data_source, data_config):
        self.length = len(data_source)
    def __len__(self):
        return self.length
    def __iter__(self):
        return iter(range(self.length))
    def update(self, batch):
        rows = [int(row) for row in batch.non_tensor_batch["row_index"]]
        with open("DIARY", "a") as file:
            file.write(json.dumps(rows) + "\\n")
"""
GENERATOR = """
from verl.datasets.dynamicgen_dataset import AbstractDataGenerator

class Harder(AbstractDataGenerator):
    def generate(self, dataset):
        assert dataset.last_batch is not None
        row = dict(dataset.source_row(0))
        row["prompt"] = [{"role": "user", "content": f"make {len(dataset)} of it"}]
        return [row]
"""


def of_the_guide(name: str) -> str:
    """The example of docs/extending.md that holds the class ``name``."""
    guide = (Path(__file__).parents[2] / "docs" / "extending.md").read_text()
    [code] = [block for block in re.findall(r"```python\n(.*?)```", guide, re.DOTALL) if f"class {name}(" in block]
    return code


@pytest.fixture
def train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(REWARD)
    (tmp_path / "sampler.py").write_text(SAMPLER.replace("DIARY", str(tmp_path / "diary.jsonl")))
    (tmp_path / "my_data.py").write_text(of_the_guide("MyDataset"))
    (tmp_path / "my_manager.py").write_text(of_the_guide("Digits"))
    (tmp_path / "generator.py").write_text(GENERATOR)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))

    def run(**changes: object) -> dict[int, dict[str, float]]:
        log.unlink(missing_ok=True)
        settings = {"custom_reward_function__path": tmp_path / "reward.py"} | changes
        run_ppo(compose(overrides(paths, tmp_path, **settings)))
        return {r["step"]: r["data"] for r in map(json.loads, log.read_text().splitlines())}

    return run


def diary(folder: Path) -> list[list[int]]:
    return [json.loads(line) for line in (folder / "diary.jsonl").read_text().splitlines()]


def test_a_run_with_data_set_sampler_and_reward_manager_of_a_user(train, tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    importlib.import_module("my_manager")  # as VERL_USE_EXTERNAL_MODULES=my_manager does
    steps = train(
        data__custom_cls__path=tmp_path / "my_data.py",
        data__custom_cls__name="MyDataset",
        data__sampler__class_path=tmp_path / "sampler.py",
        data__sampler__class_name="Diary",
        reward_model__reward_manager="digits",
        **{"+reward_model__reward_kwargs__bonus": 0.5},
    )
    assert all(0.5 <= steps[step]["critic/score/mean"] <= 8.5 for step in (1, 2))
    assert all(0 <= steps[step]["reward/digits/max"] <= 8 for step in (1, 2))
    assert all(0 <= steps[step]["reward/equal_group_rate"] <= 1 for step in (1, 2))
    assert diary(tmp_path) == [[row for row in batch for _ in range(4)] for batch in ([0, 1, 2, 3], [4, 5, 6, 7])]


def test_a_sampler_is_told_of_the_prompts_that_dynamic_sampling_dropped(train, tmp_path):
    (tmp_path / "reward.py").write_text(REWARD.replace("return", "return 1.0 if extra_info['index'] < 4 else"))
    train(
        data__sampler__class_path=tmp_path / "sampler.py",
        data__sampler__class_name="Diary",
        algorithm__filter_groups__enable="true",
        algorithm__filter_groups__metric="score",
        trainer__total_training_steps=1,
    )
    told = diary(tmp_path)
    assert told[0] == [row for row in range(4) for _ in range(4)]  # all solved: none of them is trained on
    assert len(told) >= 2


@pytest.mark.slow
def test_the_built_in_curriculum_trains_and_resumes_exactly(train, tmp_path):
    changes = {"data__sampler__class_name": "DifficultyCurriculum"}
    straight = train(trainer__total_training_steps=4, trainer__default_local_dir=tmp_path / "a", **changes)
    other = {"trainer__default_local_dir": tmp_path / "b", **changes}
    train(trainer__total_training_steps=3, trainer__save_freq=3, **other)
    assert_same_steps({4: straight[4]}, train(trainer__total_training_steps=4, **other), rel=0)


def test_generated_rows_are_trained_on_and_resume_exactly(train, tmp_path):
    # 16 rows and 1 more after each of 4 steps: the second epoch has 20 rows, 5 steps.
    changes = {"data__datagen__path": tmp_path / "generator.py", "data__datagen__name": "Harder"}
    straight = train(trainer__total_training_steps=9, trainer__default_local_dir=tmp_path / "a", **changes)
    assert [straight[step]["training/epoch"] for step in (4, 5, 9)] == [0, 1, 1]
    other = {"trainer__default_local_dir": tmp_path / "b", **changes}
    train(trainer__total_training_steps=6, trainer__save_freq=6, **other)
    rest = train(trainer__total_training_steps=9, **other)
    assert_same_steps({step: straight[step] for step in (7, 8, 9)}, rest, rel=0)


def test_sources_are_mixed_by_weight_and_reported_apart(train, tmp_path):
    rows = countdown_rows(16)
    for row in rows[::2]:
        row["data_source"] = "gsm8k"
    files = write_jsonl(tmp_path / "mixed.jsonl", rows)
    steps = train(data__train_files=files, **{"+data__source_weights": "{countdown:3,gsm8k:1}"})
    for metrics in steps.values():
        assert metrics["train-source/countdown/count"] == 3 * 4
        assert metrics["train-source/gsm8k/count"] == 1 * 4
        assert 0 <= metrics["train-source/gsm8k/score/mean"] <= 1


@pytest.mark.slow
def test_scoring_beside_the_log_probs_changes_nothing(train):
    beside = train(reward_model__launch_reward_fn_async="true")
    assert_same_steps(train(), beside, rel=0)


def test_scoring_beside_other_stages_and_dynamic_sampling_exclude_each_other(train):
    with pytest.raises(ConfigError, match="needs the scores before it goes on"):
        train(
            reward_model__launch_reward_fn_async="true",
            algorithm__filter_groups__enable="true",
            algorithm__filter_groups__metric="score",
        )
