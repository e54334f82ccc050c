import signal
import subprocess
import sys
import time
from pathlib import Path

import pandas as pd
import psutil
import pytest

from examples.quickstart.quickstart import Outcome
from examples.quickstart.settings import command, megatron_settings, rl_settings, sft_settings
from tests.forks import run
from verl.scorers.countdown import compute_score
from verl.trainer.config import PPOConfig, SFTConfig
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    sizes = ["--sft_size=40", "--train_size=40", "--test_size=20"]
    script = ROOT / "examples" / "quickstart" / "make_task.py"
    run([script, f"--output_dir={folder}", *sizes]).check_returncode()
    return folder


def problems(rows: pd.DataFrame) -> set[tuple]:
    truths = [row["ground_truth"] for row in rows["reward_model"]]
    return {(*sorted(truth["numbers"]), truth["target"]) for truth in truths}


def test_no_problem_is_both_trained_on_and_tested(task):
    train, test = (pd.read_parquet(task / f"rl_{split}.parquet") for split in ("train", "test"))
    assert len(problems(train)) == 40
    assert len(problems(test)) == 20
    assert not problems(train) & problems(test)
    asked = {
        " ".join(sorted(row[0]["content"].split())) for row in pd.read_parquet(task / "sft_train.parquet").messages
    }
    held_out = {" ".join(sorted(prompt[0]["content"].split())) for prompt in test["prompt"]}
    assert not asked & held_out


def test_every_demonstration_is_right(task):
    for question, answer in pd.read_parquet(task / "sft_train.parquet").messages:
        words = question["content"].split()
        numbers = [int(word) for word in words[3:]]
        truth = {"target": int(words[1]), "numbers": numbers}
        assert compute_score(answer["content"], truth) == 1.0, (question, answer)


def test_the_settings_are_accepted(task, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sft = command("verl.trainer.sft_trainer", sft_settings(task, tmp_path / "sft", seed=1))[3:]
    assert load_config(compose(sft, "sft_trainer"), SFTConfig).data.train_batch_size == 128
    for algorithm, estimator in (("grpo", "grpo"), ("ppo", "gae")):
        settings = rl_settings(algorithm, task, task / "model", tmp_path / "rl", seed=1)
        rl = command("verl.trainer.main_ppo", settings)[3:]
        assert load_config(compose(rl), PPOConfig).algorithm.adv_estimator == estimator
        megatron = command("verl.trainer.main_ppo", settings | megatron_settings(2))[3:]
        assert load_config(compose(megatron), PPOConfig).actor_rollout_ref.actor.shared_by == 2


def test_standard_error_by_hand():
    # 10 prompts, 5 gained, 1 lost: the differences are 5 of +1, 1 of -1, 4 of 0. Their sum of squares about the
    # mean is 6 - 4²/10 = 4.4, and the error of the mean sqrt(4.4) / 10.
    outcome = Outcome("grpo", 1, prompts=10, before=0.2, after=0.6, gained=5, lost=1, seconds=1.0)
    assert outcome.standard_error == pytest.approx(4.4**0.5 / 10)


STAGE = """
import sys
from pathlib import Path
from examples.quickstart.quickstart import run_stage

child = "import os, time; print(os.getpid(), flush=True); time.sleep(60)"
run_stage("waits", [sys.executable, "-c", child], Path(sys.argv[1]))
"""


def test_sigterm_ends_the_stage_too(tmp_path):
    log = tmp_path / "log.txt"
    quickstart = subprocess.Popen([sys.executable, "-c", STAGE, str(log)], stdout=subprocess.DEVNULL)
    while not (log.exists() and log.read_text().endswith("\n")):
        assert quickstart.poll() is None
        time.sleep(0.05)
    quickstart.send_signal(signal.SIGTERM)
    assert quickstart.wait(timeout=60) == 143
    assert not psutil.pid_exists(int(log.read_text()))
