"""Every command of benchmarks, of docs.generate and of the generator of YAML files explains itself and does no more."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def commands() -> list[str]:
    """Modules that are run by ``python -m``."""
    files = [*ROOT.glob("benchmarks/*.py"), *ROOT.glob("docs/generate/*.py"), ROOT / "verl/trainer/config/generate.py"]
    runnable = [file.with_suffix("") for file in files if '__name__ == "__main__"' in file.read_text()]
    packages = [file.parent for file in ROOT.glob("benchmarks/*/__main__.py")]
    return sorted(".".join(path.relative_to(ROOT).parts) for path in [*runnable, *packages])


@pytest.mark.parametrize("command", commands())
def test_help_is_printed_and_nothing_is_run(command, monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(sys, "argv", [command, "--help"])
    monkeypatch.setattr(os, "environ", os.environ.copy())
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, command, raising=False)

    with pytest.raises(SystemExit) as ended:
        runpy.run_module(command, run_name="__main__")

    assert ended.value.code == 0
    usage, _, explained = capsys.readouterr().out.partition("\n\n")
    assert usage.startswith("usage: ")
    assert len(explained.split("options:")[0].split()) >= 8, "say what the command does, and what it writes"
    assert not list(tmp_path.iterdir())


AT_ONCE = (
    "verl.model_merger.__main__",
    *(f"verl.trainer.{name}" for name in ("main_ppo", "sft_trainer", "rm_trainer", "dpo_trainer")),
    *(f"verl.trainer.{name}" for name in ("main_generation", "main_eval", "main_serve", "inspect_data")),
    *(f"examples.data_preprocess.{name}" for name in ("countdown", "gsm8k", "math", "smollm2")),
    *(f"examples.data_preprocess.gsm8k_multiturn_w_{name}" for name in ("tool", "interaction")),
)
HELP = """
import importlib, sys
sys.modules.update(torch=None, transformers=None, ray=None)
for command in sys.argv.pop().split():
    sys.argv[1:] = ["--help"]
    try:
        importlib.import_module(command).main()
    except SystemExit as end:  # of argparse
        assert end.code == 0
    print(f"===== {command}")
"""


def test_commands_explain_themselves_without_the_libraries_that_take_seconds_to_import():
    command = [sys.executable, "-c", HELP, " ".join(AT_ONCE)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    answers = done.stdout.split("=====")
    assert len(answers) == len(AT_ONCE) + 1
    assert all("--" in answer for answer in answers[:-1])
