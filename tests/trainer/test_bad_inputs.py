"""What a user sees when something is wrong: one named error, before the run wastes time."""

from __future__ import annotations

import pytest

from tests.support.bad_inputs import BAD_INPUTS, BadInput
from verl.errors import VerlError
from verl.trainer.config import load_config
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo


@pytest.mark.parametrize("case", BAD_INPUTS, ids=lambda case: case.title.replace(" ", "-"))
def test_bad_input_is_named(case: BadInput, tmp_path, monkeypatch, request):
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    arguments = case.make(tmp_path)
    if "trainer.controller=ray" in arguments:
        request.getfixturevalue("ray_cluster")
    with pytest.raises(VerlError) as caught:
        run_ppo(load_config(compose(arguments)))  # as the command does; a program's own keys would be kept
    for words in case.says:
        assert words in str(caught.value)
