"""Secrets: how they are found, and every place where a configuration is shown or written."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.config.support import Run
from verl.base.redact import MASK, is_secret, redacted, secrets_in, without_secrets
from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.problems import Problem
from verl.errors import ConfigError
from verl.tracking import TRACKERS, Tracker, Tracking
from verl.trainer.config import PPOConfig, command_line, load_config

MARK = "s3cret-Marked-0451"


@pytest.mark.parametrize(
    "name",
    ["api_key", "apiKey", "API_KEY", "openai-api-key", "env_vars.WANDB_API_KEY", "hf_token", "hfToken", "HF_TOKEN",
     "Authorization", "authorization", "x-api-key", "password", "DB_PASSWORD", "client_secret", "clientSecret",
     "cookie", "Set-Cookie", "access_token", "auth_tokens", "api_keys", "credentials", "ssh_key", "secrets"],
)  # fmt: skip
def test_names_of_secrets(name: str):
    assert is_secret(name, MARK)
    assert not is_secret(name, "")
    assert not is_secret(name, None)
    assert not is_secret(name, "${oc.env:HF_TOKEN}")  # says where it comes from, and nothing else
    assert is_secret(name, f"${{oc.env:HF_TOKEN,{MARK}}}")


@pytest.mark.parametrize(
    "name, value",
    [("max_tokens", 512), ("ppo_max_token_len_per_gpu", 16384), ("tokenizer_path", "/models/qwen-7b-instruct"),
     ("prompt_key", "prompt"), ("pad_token", "<|endoftext|>"), ("eos_token", "</s>"), ("api_key_env", "OPENAI_API_KEY"),
     ("token_level_scores", "x"), ("trust_remote_code", True), ("skip_tokenizer_init", "x"), ("keys", "abc"),
     ("experiment_name", "secretary"), ("monkey", "a1b2c3d4e5f6a7b8c9d0"), ("cookie_path", "/x")],
)  # fmt: skip
def test_names_of_other_things(name: str, value: Any):
    assert not is_secret(name, value)
    assert without_secrets({name: value}) == {name: value}


@pytest.mark.parametrize(
    "text, shown",
    [
        ("http://me:hunter2@host:80/x", "http://***@host:80/x"),
        ("Authorization: Bearer abc.def-123", "Authorization: Bearer ***"),
        ("Basic dXNlcjpwYXNz", "Basic ***"),
        ("http://h/p?api_key=abc&n=1", "http://h/p?api_key=***&n=1"),
        ("https://h/p?n=1&X-Amz-Signature=abc#f", "https://h/p?n=1&X-Amz-Signature=***#f"),
        ("key sk-abcdefghijklmnop0123 is bad", "key *** is bad"),
        ("hf_ABCDEFGHIJKLMNOPqrst", "***"),
        ("AKIAIOSFODNN7EXAMPLE", "***"),
        ("the tokens of a user@host are 12, basic training, bearer of news", None),
        ("hf_rollout sk-learn max_tokens=512 pad_token: <pad>", None),
    ],
)
def test_secrets_by_their_looks(text: str, shown: str | None):
    assert redacted(text) == (text if shown is None else shown)


def test_secrets_of_the_environment_are_known(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SOME_SERVICE_API_KEY", MARK)
    monkeypatch.setenv("SHORT_TOKEN", "abc")  # would be found in every other word
    assert redacted(f"<{MARK}> abc") == "<***> abc"
    assert without_secrets({"note": f"it is {MARK}"}) == {"note": "it is ***"}


def test_a_secret_is_masked_wherever_the_configuration_repeats_it():
    settings = {"headers": {"X-Api-Key": MARK}, "notes": [f"uses {MARK}"], "longer": f"{MARK}{MARK[:3]}"}
    assert without_secrets(settings) == {
        "headers": {"X-Api-Key": MASK}, "notes": [f"uses {MASK}"], "longer": f"{MASK}{MARK[:3]}",
    }  # fmt: skip
    assert secrets_in(settings) == [MARK]
    assert settings["headers"]["X-Api-Key"] == MARK


def test_the_longer_of_two_secrets_is_masked_whole():
    assert redacted("abcdef-ghi", ["abcdef", "abcdef-ghi"]) == MASK


# ---- where configurations are shown --------------------------------------------------------------


@section
class Inner(BaseConfig):
    """A section."""

    api_key: str = setting("")
    """A key."""
    options: dict[str, Any] = setting(factory=dict)
    """Anything."""


@section
class Outer(BaseConfig):
    """A section."""

    inner: Inner = subsection(Inner)
    """A section."""
    lr: float = setting(0.5)
    """A number."""


def test_the_representation_of_a_configuration():
    config = Outer(inner=Inner(api_key=MARK, options={"headers": {"Authorization": f"Bearer {MARK}"}, "n": 2}))
    assert repr(config) == (
        "Outer(inner=Inner(api_key='***', options={'headers': {'Authorization': '***'}, 'n': 2}), lr=0.5)"
    )
    assert MARK not in f"{config} {config.inner}"
    assert config.inner.api_key == MARK


def test_a_problem_shows_no_secret():
    assert str(Problem("a.api_key", MARK, "is wrong")) == "a.api_key=***: is wrong."
    assert str(Problem("a", {"hf_token": MARK, "n": 1}, "is wrong")) == "a={hf_token: '***', n: 1}: is wrong."


@pytest.mark.parametrize(
    "key, value",
    [
        ("trainer.api_key", MARK),  # no such key
        ("reward_model.api_key", MARK),
        ("trainer.total_epochs", {"password": MARK}),  # of another type
        ("trainer", {"password": MARK}),
        ("data.train_files", f"http://me:{MARK}@host/x.parquet"),
        ("actor_rollout_ref.rollout.name", f"Bearer {MARK}"),
    ],
)
def test_an_error_of_the_configuration_shows_no_secret(tmp_path: Path, key: str, value: Any):
    tree: dict[str, Any] = {}
    for path, item in {**Run(tmp_path).ppo, key: value}.items():
        node = tree
        for part in path.split(".")[:-1]:
            node = node.setdefault(part, {}) if isinstance(node.get(part, {}), dict) else {}
        node[path.rpartition(".")[2]] = item
    with pytest.raises(ConfigError) as caught:
        load_config(tree)
    assert MARK not in str(caught.value)
    assert key.split(".")[0] in str(caught.value)


class Command:
    """Runs the command line in this process."""

    def __init__(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        self.run, self.monkeypatch = run, monkeypatch
        self.outputs = run.folder / "outputs"

    def __call__(self, main: Any, *arguments: str) -> None:
        settings = [f"{key}={value}" for key, value in self.run.ppo.items()]
        self.monkeypatch.chdir(self.run.folder)
        self.monkeypatch.setattr(sys, "argv", ["main.py", *settings, *arguments, f"hydra.run.dir={self.outputs}"])
        root = logging.getLogger()
        level, handlers = root.level, list(root.handlers)
        try:
            command_line.command(main, config_name="ppo_trainer", root=PPOConfig)()
        finally:
            root.setLevel(level)
            root.handlers[:] = handlers


@pytest.fixture
def command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Command:
    return Command(Run(tmp_path), monkeypatch)


SECRETS = (
    f"custom_reward_function.reward_kwargs.api_key={MARK}",
    f"reward_model.reward_kwargs.headers={{Authorization: 'Bearer {MARK}', n: 1}}",
    f"ray_kwargs.ray_init.runtime_env.env_vars.WANDB_API_KEY={MARK}",
)


def test_what_hydra_writes_has_no_secret_and_nothing_else_is_changed(command: Command):
    got: list[PPOConfig] = []
    command(lambda config: got.append(config), *SECRETS, "actor_rollout_ref.actor.optim.lr=1e-3")
    assert got[0].custom_reward_function.reward_kwargs["api_key"] == MARK  # the run has it
    written = {file.name: file.read_text() for file in (command.outputs / ".hydra").iterdir()}
    assert set(written) == {"config.yaml", "overrides.yaml", "hydra.yaml"}
    assert MARK not in "".join(written.values())
    assert "api_key: '***'" in written["config.yaml"]
    assert "++custom_reward_function.reward_kwargs.api_key=***" in written["overrides.yaml"]
    assert "lr: 0.001" in written["config.yaml"]  # still a number
    assert "${oc.select:" in written["config.yaml"]  # still to be filled in


def test_an_error_on_the_command_line_shows_no_secret(command: Command, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit):
        command(lambda config: None, *SECRETS, f"trainer.password={MARK}", "trainer.total_epochs=-1")
    said = capsys.readouterr().err
    assert "1 problem" in said  # names that there are not are told before values
    assert "trainer.password=***" in said
    assert MARK not in said


def test_an_error_of_the_run_shows_no_secret(command: Command, capsys: pytest.CaptureFixture[str]):
    def fail(config: PPOConfig) -> None:
        raise ConfigError(f"the service refused {config.custom_reward_function.reward_kwargs['api_key']}")

    with pytest.raises(SystemExit):
        command(fail, *SECRETS)
    assert "the service refused ***" in capsys.readouterr().err


def test_trackers_see_a_command_line_without_secrets(monkeypatch: pytest.MonkeyPatch):
    seen: list[Any] = []

    @TRACKERS.register("nosy")
    class Nosy(Tracker):
        def __init__(self, project_name: str, experiment_name: str, config: Mapping[str, Any]) -> None:
            seen.extend([sys.argv, config])

        def log(self, metrics: Mapping[str, float], step: int) -> None:
            pass

    arguments = ["main.py", f"a.note={MARK}", "lr=1"]
    monkeypatch.setattr(sys, "argv", arguments)
    Tracking("p", "e", "nosy", {"a": {"api_key": MARK, "note": MARK}})
    assert seen == [["main.py", "a.note=***", "lr=1"], {"a": {"api_key": MASK, "note": MASK}}]
    assert sys.argv is arguments
