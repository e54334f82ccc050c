"""verl's own environment variables."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from verl.base import env
from verl.errors import ConfigError


@pytest.mark.parametrize("text, level", [("INFO", logging.INFO), ("debug", logging.DEBUG), ("WARN", logging.WARNING)])
def test_logging_level(monkeypatch: pytest.MonkeyPatch, text: str, level: int):
    monkeypatch.setenv("VERL_LOGGING_LEVEL", text)
    assert env.logging_level() == level


def test_logging_level_by_default_and_when_wrong(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VERL_LOGGING_LEVEL", raising=False)
    assert env.logging_level() == logging.WARNING
    monkeypatch.setenv("VERL_LOGGING_LEVEL", "LOUD")
    with pytest.raises(ConfigError, match=r"VERL_LOGGING_LEVEL='LOUD' is no logging level. Use one of .*INFO"):
        env.logging_level()


@pytest.mark.parametrize("text, padding", [("1", True), ("TRUE", True), ("0", False), ("", False)])
def test_auto_padding(monkeypatch: pytest.MonkeyPatch, text: str, padding: bool):
    monkeypatch.setenv("VERL_AUTO_PADDING", text)
    assert env.auto_padding() is padding


def test_a_flag_that_is_neither(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("VERL_AUTO_PADDING", "perhaps")
    with pytest.raises(ConfigError, match="VERL_AUTO_PADDING='perhaps' is neither true nor false"):
        env.auto_padding()


def test_external_modules(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VERL_USE_EXTERNAL_MODULES", raising=False)
    assert env.external_modules() == []
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "a.b, c,")
    assert env.external_modules() == ["a.b", "c"]


def test_file_of_the_file_tracker(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VERL_FILE_LOGGER_PATH", raising=False)
    monkeypatch.setenv("VERL_FILE_LOGGER_ROOT", "/logs")
    assert env.file_logger_path("project", "run") == Path("/logs/project/run.jsonl")
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", "~/x.jsonl")
    assert env.file_logger_path("project", "run") == Path.home() / "x.jsonl"


def test_folder_of_tensorboard(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("TENSORBOARD_DIR", raising=False)
    assert env.tensorboard_dir() == Path("tensorboard_log")
    monkeypatch.setenv("TENSORBOARD_DIR", "/tb")
    assert env.tensorboard_dir() == Path("/tb")


def test_the_seed_of_the_environment(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("VERL_SEED", raising=False)
    assert env.seed() is None
    monkeypatch.setenv("VERL_SEED", "7")
    assert env.seed() == 7
    monkeypatch.setenv("VERL_SEED", "-1")
    with pytest.raises(ConfigError, match="VERL_SEED='-1' is no seed"):
        env.seed()


@pytest.mark.parametrize(
    "name, value, said",
    [
        ("VERL_USE_MODELSCOPE", "1", "models of ModelScope are not in this version"),
        ("VERL_DATAPROTO_SERIALIZATION_METHOD", "arrow", "Use numpy or torch"),
    ],
)
def test_what_no_run_can_do_is_refused(monkeypatch: pytest.MonkeyPatch, name: str, value: str, said: str):
    env.refuse_unusable()
    for harmless in ("VERL_USE_MODELSCOPE", "0"), ("VERL_DATAPROTO_SERIALIZATION_METHOD", "torch"):
        monkeypatch.setenv(*harmless)
    env.refuse_unusable()
    monkeypatch.setenv(name, value)
    with pytest.raises(ConfigError, match=said):
        env.refuse_unusable()


def test_other_processes_do_not_see_what_torchrun_set(monkeypatch: pytest.MonkeyPatch):
    set_by_torchrun = {"RANK": "0", "MASTER_PORT": "29500", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    for name, value in (set_by_torchrun | {"OMP_NUM_THREADS": "1"}).items():
        monkeypatch.setenv(name, value)
    before = dict(os.environ)
    with env.without_launcher():
        assert before.items() - os.environ.items() >= set_by_torchrun.items()
        assert os.environ["OMP_NUM_THREADS"] == "1"
    assert dict(os.environ) == before
