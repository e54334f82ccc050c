"""The preference example: its data follows its rule, and its commands run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
import pytest

from tests.forks import run

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "preference"


def has_vowel(text: str) -> bool:
    return bool(set(text) & set("aeiou"))


def test_the_better_response_has_a_vowel(tmp_path):
    arguments = [f"--output_dir={tmp_path}", "--pairs=50"]
    run([FOLDER / "make_task.py", *arguments]).check_returncode()
    pairs = pd.read_parquet(tmp_path / "pairs_train.parquet")
    assert len(pairs) == 50
    assert pairs.chosen.map(has_vowel).all()
    assert not pairs.rejected.map(has_vowel).any()
    assert (tmp_path / "model" / "config.json").exists()


@pytest.mark.slow
def test_from_preferences_to_a_policy(tmp_path):
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["bash", FOLDER / "run.sh", tmp_path], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    assert (tmp_path / "dpo" / "global_step_64" / "huggingface" / "model.safetensors").exists()
