"""Mistakes of people who begin: the cause is named, first and alone, with what to do about it."""

from __future__ import annotations

import shlex
from typing import Any

import pytest
import yaml

from tests.trainer.config.support import Run
from verl.config import PPOConfig
from verl.config.problems import report
from verl.errors import ConfigError
from verl.trainer.config import load_config
from verl.trainer.config.flags import read_words
from verl.trainer.config.keys import put
from verl.trainer.config.omegaconf_private import yaml_loader
from verl.trainer.config.overrides import keys_set

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
MODEL, LR = "actor_rollout_ref.model.path", f"{ACTOR}.optim.lr"
RUN = "$RUN"  # the folder of the files

MISTAKES: list[tuple[str, str, str]] = [
    # how settings are written
    ("--config x.yaml", "--config: a YAML file is named by", "write --config-dir . --config-name x"),
    ("conf/mine.yml", "conf/mine.yml: a YAML file is named by", "write --config-dir conf --config-name mine"),
    ("--config-name", "--config-name: its value is missing", "write --config-name VALUE"),
    ("--cfg jobs", "--cfg jobs: it shows one of three", "job, hydra, all"),
    ("--algorithm.adv_estimator grpo", "--algorithm.adv_estimator grpo: settings are", "algorithm.adv_estimator=grpo"),
    ("--algorithm.adv_estimator=grpo", "--algorithm.adv_estimator=grpo: settings", "algorithm.adv_estimator=grpo"),
    ("--lr 1e-5", "--lr 1e-5: settings are written KEY=VALUE", f"{LR}=1e-5"),
    ("--learning_rate 1e-5", "--learning_rate 1e-5: settings are", f"learning_rate of TRL: set {LR}=1e-05"),
    ("--num-generations 8", "--num-generations 8: settings are", f"num_generations of TRL: set {ROLLOUT}.n=8"),
    ("--verbosity", "--verbosity: there is no such flag", "--help lists flags and settings"),
    ("trainer.seed = 3", "trainer.seed = 3: a setting is written without spaces", "write trainer.seed=3"),
    ("trainer.seed =3", "trainer.seed =3: a setting is written without", "write trainer.seed=3"),
    ("trainer.seed= 3", "trainer.seed= 3: a setting is written without", "write trainer.seed=3"),
    ("trainer.seed: 3", "trainer.seed: 3: a setting is written without", "write trainer.seed=3"),
    ("trainer.seed", "trainer.seed: a setting is written KEY=VALUE", "join key, equals sign and value"),
    ("trainer.logger=[console", "trainer.logger=[console: brackets and quotes do not match", "quote it twice"),
    ("trainer.project_name='a", "trainer.project_name='a: brackets and quotes", "quote it twice"),
    ("~critic", "~critic: a section cannot be deleted", "leave this out"),
    # names of keys
    ("data.train_batch_sise=8", "data.train_batch_sise=8: there is no such key", "did you mean data.train_batch_size?"),
    ("optim.learning_rate=1e-5", "optim.learning_rate=1.0e-05: there is no such key", f"set {LR}=1e-05"),
    ("learning_rate=1e-5", "learning_rate=1.0e-05: there is no such key", f"set {LR}=1e-05"),
    ("model=folder", "model=folder: there is no such key", "set actor_rollout_ref.model.path=folder"),
    ("data=rows.jsonl", "data=rows.jsonl: this is a section", "set the keys below it"),
    ("actor_rollout_ref.model=x", "actor_rollout_ref.model=x: this is a section", "set actor_rollout_ref.model.path"),
    ("num_generations=4", "num_generations=4: there is no such key", f"set {ROLLOUT}.n=4"),
    (f"{ACTOR}.lr=1e-5", f"{ACTOR}.lr=1.0e-05: there is no such key", f"did you mean {LR}?"),
    ("steps=3", "steps=3: there is no such key", "did you mean trainer.total_training_steps?"),
    ("lr=1e-5", "lr=1.0e-05: there is no such key", f"did you mean {LR}?"),
    ("trainer.epochs=3", "trainer.epochs=3: there is no such key", "did you mean trainer.total_epochs?"),
    ("trainer.max_steps=3", "trainer.max_steps=3: there is no such key", "trainer.total_training_steps"),
    ("rollout.n=4", "rollout.n=4: there is no such key", f"did you mean {ROLLOUT}.n?"),
    ("data.batch_size=8", "data.batch_size=8: there is no such key", "did you mean data.train_batch_size?"),
    ("data.train_file=x", "data.train_file=x: there is no such key", "did you mean data.train_files?"),
    ("trainer.experiment=x", "trainer.experiment=x: there is no such key", "did you mean trainer.experiment_name?"),
    ("algorithm.estimator=grpo", "algorithm.estimator=grpo: there is no such key", "algorithm.adv_estimator?"),
    ("model.path=x", "model.path=x: there is no such key", "model.path?"),
    # values
    (f"{ROLLOUT}.n=2.5", f"{ROLLOUT}.n=2.5: this value cannot be used here", "an integer >= 1"),
    (f"{ROLLOUT}.n=0", f"{ROLLOUT}.n=0: this value cannot be used here", "an integer >= 1"),
    ("data.train_batch_size=-8", "data.train_batch_size=-8: this value cannot", "an integer >= 1"),
    ("trainer.total_epochs=two", "trainer.total_epochs=two: this value cannot", "an integer >= 1, default 30"),
    (f"{LR}=1e-5e", f"{LR}=1e-5e: this value cannot", "a number >= 0"),
    (f"{LR}=true", f"{LR}=true: a number is wanted, and true and false are none", "a number >= 0"),
    (f"{ROLLOUT}.temperature=-1", f"{ROLLOUT}.temperature=-1: this value cannot", "a number >= 0"),
    (f"{ROLLOUT}.top_p=95", f"{ROLLOUT}.top_p=95: this value cannot", "a number > 0 and <= 1"),
    ("trainer.device=gpu", "trainer.device=gpu: this value cannot", "cuda, cpu"),
    (f"{ACTOR}.use_kl_loss=yess", f"{ACTOR}.use_kl_loss=yess: this value cannot", "true or false"),
    (f"{ACTOR}.strategy=deepspeed", f"{ACTOR}.strategy=deepspeed: this value cannot", "fsdp, fsdp2, veomni, megatron"),
    (f"{ROLLOUT}.name=vlm", f"{ROLLOUT}.name=vlm: this value cannot", "native, hf, vllm, sglang"),
    (f"{ACTOR}.fsdp_config.dtype=bf32", f"{ACTOR}.fsdp_config.dtype=bf32: this value cannot", "bfloat16"),
    ("data=x.jsonl", "data=x.jsonl: this is a section", "set the keys below it"),
    ("trainer.project_name=${trainer.nothing}", "trainer.project_name=${trainer.nothing}: ", "name an existing key"),
    # files and models
    (f"data.train_files={RUN}/trian.jsonl", f"data.train_files={RUN}/trian.jsonl: there is no such file", ""),
    (f"data.train_files={RUN}/train.txt", f"data.train_files={RUN}/train.txt", "jsonl"),
    (f"{MODEL}={RUN}/mymodle", f"{MODEL}={RUN}/mymodle: there is no such folder", "name a folder that holds a model"),
    (f"{MODEL}=modle", f"{MODEL}=modle: there is no such folder. Did you mean model?", "Hugging Face hub"),
    (f"{MODEL}={RUN}/run/global_step_40/actor", "these are the shards of a checkpoint", "verl merge $RUN/run/global_"),
    (f"{MODEL}={RUN}/run", "these are the shards of a checkpoint", f"verl merge {RUN}/run/global_step_40/actor"),
    (f"custom_reward_function.path={RUN}/rewards.py", "rewards.py: there is no such file", "the path of a Python file"),
    (f"custom_reward_function.path={RUN}/my.py custom_reward_function.name=scor", "Did you mean 'score'?", ""),
    # what belongs together
    ("algorithm.adv_estimator=grop", "algorithm.adv_estimator=grop: ", "register your own"),
    ("data.max_response_length=20000", "data.max_response_length=20000: with data.max_prompt_length=512", "15872 or"),
    ("data.train_batch_size=10", f"{ACTOR}.ppo_mini_batch_size=4: it does not divide data.train", "divisors of 10"),
    ("trainer.controller=local", "trainer.controller=local: it runs one rank in this process", "n_gpus_per_node=1"),
    ("trainer.logger=[console,wandbb]", "there is no tracker 'wandbb'. Did you mean 'wandb'?", "console, console_full"),
    ("trainer.resume_mode=resume_path", "trainer.resume_from_path=null: trainer.resume_mode=res", "global_step_N"),
]  # fmt: skip


def told(run: Run, words: list[str]) -> str:
    """What the command line says of these words, added to a run that is right."""
    if problems := read_words(words, PPOConfig).problems:
        return report(problems)
    tree: dict[str, Any] = {}
    given = dict(word.split("=", 1) for word in words)
    for key, value in (run.ppo | {key: yaml.load(text, Loader=yaml_loader()) for key, text in given.items()}).items():
        put(tree, key, value)
    with pytest.raises(ConfigError) as caught:
        load_config(tree, PPOConfig, keys_set(words))
    return str(caught.value)


@pytest.mark.parametrize(("words", "cause", "remedy"), MISTAKES, ids=[words for words, *_ in MISTAKES])
def test_the_cause_comes_first_and_alone(
    run: Run, words: str, cause: str, remedy: str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(run.folder)
    run.ppo["actor_rollout_ref.actor.use_dynamic_bsz"] = True
    (run.folder / "my.py").write_text("def score(solution_str): return 1.0\n")
    (run.folder / "train.txt").touch()
    (run.folder / "run/global_step_40/actor").mkdir(parents=True)
    (run.folder / "run/global_step_40/actor/fsdp_config.json").write_text("{}")
    separate = shlex.split(words) if "'" not in words else [words]
    message = told(run, [word.replace(RUN, str(run.folder)) for word in separate])
    title, _, first, *rest = message.replace(str(run.folder), RUN).splitlines()
    assert title == "1 problem in the configuration:"
    assert cause in first
    assert remedy in "\n".join([first, *rest])


def test_none_is_gone():
    assert len(MISTAKES) == 65
