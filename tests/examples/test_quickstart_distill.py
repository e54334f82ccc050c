from pathlib import Path

import pytest

from examples.quickstart.settings import Settings, command
from examples.quickstart_distill.make_sft_data import conversations
from examples.quickstart_distill.settings import (
    distillation_settings,
    equal_steps,
    samples_settings,
    supervised_settings,
    validation_settings,
)
from verl.trainer.config import GenerationConfig, PPOConfig, SFTConfig
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config

TASK, MODEL, OUT = Path("/task"), Path("/model"), Path("/out")


def test_steps_of_equal_compute_by_hand():
    # GRPO: 20 steps · 1024 responses · 5 passes = 102,400. A teacher of three times the student's weights:
    # distillation 256 · (1 + 3 + 9) = 3328 a step; samples 8000 · 2 · 3 = 48,000, and 128 · 3 = 384 a supervised step.
    assert equal_steps(3.0) == (round(102_400 / 3328), round(54_400 / 384))


def test_each_sample_is_a_conversation():
    prompt = [{"role": "user", "content": "make 3 from 1 2"}]
    rows = conversations([{"prompt": prompt, "responses": ["1 + 2", "2 + 1"]}])
    assert [row["messages"][-1] for row in rows] == [
        {"role": "assistant", "content": "1 + 2"},
        {"role": "assistant", "content": "2 + 1"},
    ]
    assert all(row["messages"][:-1] == prompt for row in rows)


@pytest.mark.parametrize(
    ("settings", "name", "section"),
    [
        (distillation_settings(TASK, MODEL, Path("/teacher"), OUT, 1, 25), "ppo_trainer", PPOConfig),
        (validation_settings(TASK, MODEL, OUT, 1), "ppo_trainer", PPOConfig),
        (supervised_settings(TASK, MODEL, Path("/rows"), OUT, 1, 2), "sft_trainer", SFTConfig),
        (samples_settings(TASK, Path("/teacher"), Path("/out.parquet")), "generation", GenerationConfig),
    ],
)
def test_each_command_has_only_known_settings(settings: Settings, name: str, section: type):
    arguments = command("module", settings)[3:]
    loaded = load_config(compose(arguments, name), section, with_rules=False)
    assert isinstance(loaded, section)
