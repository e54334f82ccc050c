"""Commands, YAML and Python that published descriptions of verl print run as printed, on files and a model of ours.

Calls of rewards, algorithms and parts of the trainer have their own tests, beside those of their modules.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from tests.trainer.config.support import Run
from verl import DataProto
from verl.algorithms import register_adv_est, register_policy_loss
from verl.base.nested import flat
from verl.testing.models import tiny_tokenizer
from verl.trainer.config import PPOConfig
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import create_rl_dataset, run_ppo
from verl.utils.dataset import collate_fn

MODEL = "actor_rollout_ref.model.path"

# The blocks of the configuration, one YAML document for each, as they are printed.
INFERENCE = """
actor_rollout_ref:
  rollout:
    name: sglang
    mode: async
    n: 5
    temperature: 1.0
    top_p: 0.9
    max_response_length: 1024
    log_prob_micro_batch_size_per_gpu: 32
    tensor_model_parallel_size: 2
"""
TRAINING = """
actor_rollout_ref:
  actor:
    strategy: fsdp
    optim:
      lr: 1e-6
      beta1: 0.9
      beta2: 0.999
    use_kl_loss: True
    kl_loss_coef: 0.001
    kl_loss_type: low_var_kl
    entropy_coeff: 0
    ppo_mini_batch_size: 256
    ppo_micro_batch_size_per_gpu: 32
"""
FILES = """
data:
  train_files: $HOME/data/gsm8k/train.parquet
  val_files: $HOME/data/gsm8k/test.parquet
  train_batch_size: 1024
  max_prompt_length: 512
  max_response_length: 1024
"""
ENVIRONMENT = f"""{FILES}
  custom_cls:
    path: null
    name: null
"""
ALGORITHM = """
algorithm:
  adv_estimator: grpo
  policy_loss_fn: ppo
  use_kl_in_reward: False
  kl_ctl:
    type: fixed
    init_kl_coef: 0.001

reward_model:
  enable: False
  reward_manager: naive
  reward_format: null
  custom_reward_function:
    path: null
    name: null
  sandbox_fusion:
    url: null
    max_concurrent: 64
"""
DATA = f"""{FILES}
  truncation: 'error'
  shuffle: true
  seed: 42
  reward_fn_key: 'reward'
  chat_template: null
"""
CUSTOM_REWARD = """
reward_model:
  custom_reward_function:
    path: my_reward.py
    name: compute_reward
    reward_kwargs: {}
"""
MY_REWARD = """
import torch
from verl import DataProto

def compute_reward(data: DataProto, **kwargs) -> torch.Tensor:
    batch_size = len(data.batch)
    rewards = torch.zeros(batch_size)
    for i in range(batch_size):
        response = data.responses[i]
        ground_truth = data.ground_truth_answers[i]
        if is_correct(response, ground_truth):
            rewards[i] = 1.0
        else:
            rewards[i] = 0.0
    return rewards

def is_correct(response, ground_truth):
    return ground_truth["target"] % 2 == 0
"""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    """A run whose files lie where the snippets look for them."""
    run = Run(tmp_path)
    folder = run.folder / "data" / "gsm8k"
    folder.mkdir(parents=True)
    for name in ("train.parquet", "test.parquet"):
        (folder / name).touch()
    monkeypatch.setenv("HOME", str(run.folder))
    monkeypatch.chdir(run.folder)
    run.ppo["data.train_batch_size"], run.ppo["actor_rollout_ref.actor.ppo_mini_batch_size"] = 1024, 256
    return run


def load(run: Run, *blocks: str, **more: Any) -> PPOConfig:
    """The checked configuration of YAML blocks over the settings of the run."""
    settings = {key: value for block in blocks for key, value in flat(yaml.safe_load(block))}
    settings = {key: float(value) if value == "1e-6" else value for key, value in settings.items()}  # YAML 1.1
    return run.load(settings | more)


def test_the_block_of_inference(home: Run, caplog: pytest.LogCaptureFixture):
    elsewhere = {"actor_rollout_ref.rollout.engine_kwargs": {"sglang": {"python": sys.executable}}}
    config = load(home, INFERENCE, **elsewhere)
    rollout = config.actor_rollout_ref.rollout
    assert (rollout.name, rollout.mode, rollout.n, rollout.top_p) == ("sglang", "async", 5, 0.9)
    assert rollout.response_length == config.data.max_response_length == 1024
    assert config.algorithm.rollout_correction.rollout_is == "token"
    assert "rollout.top_p=0.9 samples from a truncated distribution" in caplog.text


def test_the_block_of_training(home: Run):
    actor = load(home, TRAINING).actor_rollout_ref.actor
    assert (actor.optim.lr, actor.optim.betas) == (1e-6, (0.9, 0.999))
    assert (actor.ppo_mini_batch_size, actor.ppo_micro_batch_size_per_gpu) == (256, 32)


@pytest.mark.parametrize("block", [ENVIRONMENT, DATA])
def test_the_blocks_of_data(home: Run, block: str):
    data = load(home, block).data
    assert data.train_files == (f"{home.folder}/data/gsm8k/train.parquet",)
    assert (data.max_response_length, data.custom_cls.path) == (1024, None)
    assert data.reward_fn_key == ("reward" if block is DATA else "data_source")


def test_the_block_of_the_algorithm(home: Run):
    config = load(home, ALGORITHM)
    assert config.algorithm.kl_ctrl.kl_coef == 0.001
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "vanilla"
    assert config.custom_reward_function.path is None


def test_all_blocks_together(home: Run):
    elsewhere = {"actor_rollout_ref.rollout.engine_kwargs": {"sglang": {"python": sys.executable}}}
    assert load(home, INFERENCE, TRAINING, ENVIRONMENT, ALGORITHM, DATA, **elsewhere)


@pytest.mark.parametrize(
    "line",
    [
        "actor_rollout_ref.rollout.name=hf",
        "algorithm.adv_estimator=grpo",
        "algorithm.adv_estimator=reinforce_plus_plus",
        "algorithm.adv_estimator=rloo",
        "algorithm.adv_estimator=opo",
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.actor.optim.lr=1e-6",
        "actor_rollout_ref.actor.optim.beta1=0.9 actor_rollout_ref.actor.optim.beta2=0.99",
        "reward_model.reward_format=gsm8k",
        "reward_model.reward_format=math",
        "reward_model.reward_manager=naive",
        "reward_model.reward_manager=batch",
        "reward_model.reward_manager=dapo",
        "reward_model.reward_manager=prime",
        "reward_model.reward_manager=limited",
        "reward_model.sandbox_fusion.url=http://127.0.0.1:8080/run_code",
        "data.train_files=$HOME/data/gsm8k/train.parquet",
        "actor_rollout_ref.rollout.interactions=null actor_rollout_ref.rollout.tools=[] tools=null",
        "trainer.logger=['console'] trainer.project_name=MyProject",
        "data.train_batch_size=256 actor_rollout_ref.actor.optim.lr=1e-6 trainer.project_name=MyExperiment",
    ],
)
def test_lines_of_commands(home: Run, line: str):
    settings = " ".join(f"{key}={value}" for key, value in home.ppo.items())
    assert isinstance(home.script(f"{settings} {line}".replace("$HOME", str(home.folder))), PPOConfig)


def my_advantage(token_level_rewards, response_mask):
    return token_level_rewards, token_level_rewards


def my_loss(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    return log_prob.mean(), {}


def test_own_estimators_and_losses_by_the_names_of_the_configuration(home: Run):
    register_adv_est("my_advantage")(my_advantage)
    register_policy_loss("my_loss")(my_loss)
    config = home.load({"algorithm.adv_estimator": "my_advantage", "algorithm.policy_loss_fn": "my_loss"})
    assert config.algorithm.adv_estimator == "my_advantage"
    assert config.actor_rollout_ref.actor.policy_loss.loss_mode == "my_loss"


def test_a_data_set_as_main_ppo_creates_it(home: Run):
    (home.folder / "my_module.py").write_text(
        "from verl.utils.dataset import RLHFDataset\nclass MyDataset(RLHFDataset): ...\n"
    )
    file = write_jsonl(home.folder / "rows.jsonl", countdown_rows(3))
    config = home.load({"data.custom_cls.path": "my_module.py", "data.custom_cls.name": "MyDataset"})
    dataset = create_rl_dataset(data_paths=file, data_config=config.data, tokenizer=tiny_tokenizer(), processor=None)
    assert (type(dataset).__name__, len(dataset)) == ("MyDataset", 3)  # type: ignore[arg-type]
    batch_dict = collate_fn([dataset[item] for item in range(3)])
    assert len(DataProto.from_single_dict(batch_dict)) == 3


@pytest.mark.slow
def test_a_run_with_ones_own_reward_function_from_yaml_and_from_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """The printed function gets responses and true answers as attributes of the batch, and gives one number each."""
    paths = make_tiny_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_reward.py").write_text(MY_REWARD)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    lines = [
        "reward_model.custom_reward_function.path=my_reward.py",
        "reward_model.custom_reward_function.name=compute_reward",
        "reward_model.custom_reward_function.reward_kwargs={}",
    ]
    assert [f"{key}={value}" for key, value in flat(yaml.safe_load(CUSTOM_REWARD))] == lines
    arguments = overrides(paths, tmp_path, trainer__total_training_steps=1, data__shuffle="false")
    run_ppo(compose([*arguments, *lines]))
    (step,) = [entry["data"] for entry in map(json.loads, log.read_text().splitlines()) if entry["step"] == 1]
    targets = [row["reward_model"]["ground_truth"]["target"] for row in countdown_rows(16)[:4]]
    assert step["critic/score/mean"] == pytest.approx(sum(target % 2 == 0 for target in targets) / 4)
