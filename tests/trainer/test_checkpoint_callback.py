"""A user's code that runs after each saved checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.trainer.test_run import train  # noqa: F401
from verl.errors import ConfigError, UserCodeError
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback, build_checkpoint_callback

KEY = "trainer.checkpoint_callback_class"
CODE = """
from verl.trainer.ppo.checkpoint_callback import CheckpointCallback

class Recorder(CheckpointCallback):
    calls = []

    def on_save(self, trainer, global_step, checkpoint_dir, async_save=False, **kwargs):
        assert (trainer.global_steps, async_save, kwargs) == (global_step, False, {})
        assert self.config.trainer.save_freq == 1
        self.calls.append((global_step, checkpoint_dir))
        if global_step == 2:
            raise OSError("no room in the registry")

class Other:
    pass
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    name = f"callbacks_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(CODE)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def test_it_is_called_with_each_complete_checkpoint_and_its_errors_end_the_run(train, module, tmp_path):  # noqa: F811
    folder = tmp_path / "saved"
    settings = {"trainer__checkpoint_callback_class": f"{module}.Recorder", "trainer__save_freq": 1}
    settings |= {
        "trainer__total_training_steps": 3,
        "trainer__default_local_dir": folder,
        "trainer__controller": "local",
    }
    with pytest.raises(UserCodeError, match=rf"{KEY}: on_save of step 2 failed.*\n.*\n.*OSError: no room"):
        train(**settings)
    calls = __import__(module).Recorder.calls
    assert calls == [(step, str(folder / f"global_step_{step}")) for step in (1, 2)]
    assert all((Path(path) / "actor").is_dir() for _, path in calls)


def test_a_class_that_cannot_be_used_is_refused(module):
    def build(address: str | None) -> CheckpointCallback:
        return build_checkpoint_callback({"trainer": {"checkpoint_callback_class": address}})

    assert type(build(None)) is CheckpointCallback
    for address, message in {
        "Recorder": "must be package.module.Class or file.py:Class",
        f"{module}.Recordr": "='Recordr': callbacks_.* has no such name. Did you mean 'Recorder'",
        f"{module}.Other": "this is no class with a method on_save",
        "no_such_package.Recorder": "='no_such_package': there is no module 'no_such_package'",
    }.items():
        with pytest.raises(ConfigError, match=f"^{KEY}.*{message}"):
            build(address)
