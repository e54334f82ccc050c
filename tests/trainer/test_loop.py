"""The loop: when what is due."""

import json

import pytest

from verl.config import BaseTrainerConfig
from verl.trainer.loop import RunSettings, Schedule


def test_events_come_by_frequency_and_at_the_last_step():
    schedule = Schedule(10, {"save": 4, "test": -1})
    assert [step for step in range(1, 11) if schedule.due("save", step)] == [4, 8, 10]
    assert not any(schedule.due("test", step) for step in range(1, 11))


@pytest.mark.parametrize(("frequency", "saved"), [(0, [10]), (-1, []), (4, [4, 8, 10])])
def test_a_run_saves_at_its_end_unless_that_is_turned_off(frequency: int, saved: list[int]):
    schedule = Schedule.from_config(BaseTrainerConfig(save_freq=frequency), 10)
    assert [step for step in range(1, 11) if schedule.due("save", step)] == saved


def test_settings_that_a_checkpoint_was_made_without_are_shown(caplog: pytest.LogCaptureFixture):
    before = {"optim": {"lr": 1e-3, "betas": (0.9, 0.99)}, "trainer": {"resume_mode": "auto"}, "model": {"path": "a"}}
    now = {"optim": {"lr": 1e-4, "betas": [0.9, 0.99]}, "trainer": {"resume_mode": "disable"}, "model": {"path": "b"}}
    saved = json.loads(json.dumps(RunSettings(before).state_dict()))
    RunSettings(before).load_state_dict(saved)
    RunSettings(now).load_state_dict({})  # saved before they were kept
    assert caplog.text == ""
    RunSettings(now).load_state_dict(saved)
    assert caplog.records[0].getMessage().splitlines()[1:] == [
        "  model.path: a in the checkpoint, b now (the weights that are trained are the checkpoint's all the same)",
        "  optim.lr: 0.001 in the checkpoint, 0.0001 now",
    ]


def test_no_secret_is_kept():
    assert RunSettings({"judge": {"api_key": "abcdefgh12345678"}}).state_dict() == {"judge.api_key": "***"}
