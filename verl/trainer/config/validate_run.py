"""Algorithm, sampling, rewards, schedule: rules that need neither files nor batch sizes."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from verl.errors import ConfigError
from verl.trainer.config import validate_losses
from verl.trainer.config.estimator import estimator_reads
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.problems import Problem
from verl.trainer.config.sft import SFTConfig
from verl.utils.fs import name_problem
from verl.utils.registry import suggest
from verl.workers.config.engine import FSDPEngineConfig
from verl.workers.config.rollout import RolloutConfig, SamplingConfig

Problems = Iterator[Problem]

TRACKERS: dict[str, str | None] = {
    "console": None,
    "file": None,
    "tensorboard": "tensorboard",
    "wandb": "wandb",
    "mlflow": "mlflow",
    "swanlab": "swanlab",
    "clearml": "clearml",
    "trackio": "trackio",
}
"""Tracker → the module that it needs."""


def rank_count(trainer: Any) -> int:
    """Ranks of the run."""
    return trainer.nnodes * trainer.n_gpus_per_node


def needs_critic(config: PPOConfig) -> bool:
    """Whether a critic is trained; not for an unknown estimator, which is a problem of its own."""
    from verl.trainer.ppo.utils import need_critic

    try:
        return need_critic(config)
    except ConfigError:
        return False


def needs_reference(config: PPOConfig) -> bool:
    """Whether the reference policy is used."""
    from verl.trainer.ppo.utils import need_reference_policy

    return need_reference_policy(config)


def estimator(config: PPOConfig) -> Problems:
    """The advantage estimator exists, and has what it reads: siblings, values."""
    from verl.trainer.ppo import core_algos

    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    key = "algorithm.adv_estimator"
    try:
        function = core_algos.get_adv_estimator_fn(name)
    except ConfigError as error:
        yield Problem(key, name, str(error), remedy="register your own with @register_adv_est before the run starts")
        return
    yield from estimator_reads(config)
    columns = core_algos.adv_needs(name).columns
    if "index" in columns and n == 1 and function.__module__.startswith("verl."):
        yield Problem(
            "actor_rollout_ref.rollout.n",
            n,
            f"{key}={name} compares the responses of one prompt, and with one response there is nothing to compare",
            "at least 2, usual are 4 to 16",
            "set rollout.n, or choose an estimator without siblings: gae, reinforce_plus_plus, remax",
        )
    if "values" in columns and config.critic.enable is False:
        remedy = "set critic.enable=true, or choose an estimator without values: grpo, rloo, reinforce_plus_plus"
        yield Problem("critic.enable", False, f"{key}={name} reads the critic's values", remedy=remedy)


def dynamic_sampling(config: PPOConfig) -> Problems:
    """A group can only differ where it has several responses, and in something that is named."""
    chosen, data, key = config.algorithm.filter_groups, config.data, "algorithm.filter_groups.metric"
    if not chosen.enable:
        if data.gen_batch_size not in (None, data.train_batch_size):
            wrong = "more prompts than a step trains on are only sampled with dynamic sampling"
            remedy = "leave it null, or set algorithm.filter_groups.enable=true"
            yield Problem("data.gen_batch_size", data.gen_batch_size, wrong, remedy=remedy)
        return
    if chosen.metric is None:
        remedy = f"set {key}=seq_reward, or acc if the reward function returns it"
        yield Problem(key, None, "dynamic sampling must know what has to differ", remedy=remedy)
    if chosen.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        wrong = "with algorithm.use_kl_in_reward=true all final rewards differ, and nothing is filtered"
        yield Problem(key, chosen.metric, wrong, "seq_reward, score, acc", f"set {key}=seq_reward")
    if config.reward_model.launch_reward_fn_async:
        wrong = "dynamic sampling needs the scores before it goes on"
        yield Problem("reward_model.launch_reward_fn_async", True, wrong, "false")
    n = config.actor_rollout_ref.rollout.n
    if n == 1:
        wrong = "dynamic sampling compares the responses of one prompt, and there is one"
        yield Problem("actor_rollout_ref.rollout.n", n, wrong, "at least 2")


def losses(config: PPOConfig) -> Problems:
    """The policy loss exists and has what it needs; both KL terms at once deserve a word."""
    from verl.trainer.ppo import core_algos

    actor = config.actor_rollout_ref.actor
    try:
        core_algos.get_policy_loss_fn(actor.policy_loss.loss_mode)
    except ConfigError as error:
        key, remedy = "policy_loss.loss_mode", "register your own with @register_policy_loss before the run starts"
        yield Problem(f"actor_rollout_ref.actor.{key}", actor.policy_loss.loss_mode, str(error), remedy=remedy)
    else:
        yield from validate_losses.policy_loss(actor)
    yield from validate_losses.entropy_control(actor)
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield Problem(
            "algorithm.use_kl_in_reward",
            True,
            "the divergence from the reference is penalised twice, here and in actor.use_kl_loss",
            remedy="keep one of them, unless that is what you want",
            advice=True,
        )


def sampling(config: PPOConfig) -> Problems:
    """Training and validation sample as their settings say."""
    rollout = config.actor_rollout_ref.rollout
    yield from _samples("actor_rollout_ref.rollout", rollout, rollout.n)
    yield from _samples("actor_rollout_ref.rollout.val_kwargs", rollout.val_kwargs, rollout.val_kwargs.n)


def engine_sampling(config: GenerationConfig) -> Problems:
    """Several responses per prompt need sampling."""
    yield from _samples("rollout", config.rollout, config.data.n_samples, "data.n_samples")


def _samples(prefix: str, settings: RolloutConfig | SamplingConfig, n: int, n_key: str | None = None) -> Problems:
    if settings.do_sample and settings.temperature == 0:
        remedy = f"set {prefix}.temperature=1.0, or {prefix}.do_sample=false for greedy responses"
        yield Problem(f"{prefix}.temperature", 0, "temperature 0 is greedy, but do_sample=true", "> 0", remedy)
    if not settings.do_sample and n > 1:
        wrong = f"greedy responses of one prompt are all the same ({prefix}.do_sample=false)"
        remedy = f"set {prefix}.do_sample=true and a temperature, or ask for one response"
        yield Problem(n_key or f"{prefix}.n", n, wrong, "1", remedy)
    texts, ids = settings.stop or (), settings.stop_token_ids or ()
    if "" in texts:
        yield Problem(f"{prefix}.stop", [*texts], "the empty text is in every response", "texts of some length")
    if any(not 0 <= token < 2**63 for token in ids):
        yield Problem(f"{prefix}.stop_token_ids", [*ids], "no token has such an id", "ids of the model's vocabulary")


def rewards(config: PPOConfig) -> Problems:
    """Reward manager and scorer exist, and only one of them is asked for."""
    from verl.trainer.ppo.reward import FORMATS
    from verl.utils.reward_score import SCORERS
    from verl.workers.reward_manager import get_reward_manager_cls

    manager, model = config.reward_manager, config.reward_model
    if manager.source == "register":
        try:
            get_reward_manager_cls(manager.name)
        except ConfigError as error:
            remedy = "use a known one, or your own with reward_manager.source=importlib"
            yield Problem("reward_manager.name", manager.name, str(error), remedy=remedy)
    known = sorted({*FORMATS, *SCORERS.names()})
    if model.reward_format is not None and model.reward_format not in FORMATS and model.reward_format not in SCORERS:
        wrong = f"there is no such scorer.{suggest(model.reward_format, known)}"
        yield Problem("reward_model.reward_format", model.reward_format, wrong, ", ".join(known))
    if model.reward_format is not None and config.custom_reward_function.path is not None:
        wrong = f"custom_reward_function.path={config.custom_reward_function.path} scores all rows already"
        yield Problem("reward_model.reward_format", model.reward_format, wrong, remedy="keep one of the two")
    if model.enable_resource_pool and model.nnodes == 0:
        remedy = "set reward_model.nnodes and reward_model.n_gpus_per_node, or enable_resource_pool=false"
        yield Problem("reward_model.nnodes", 0, "a pool of its own needs at least one node", ">= 1", remedy)


def schedule(config: PPOConfig) -> Problems:
    """The run does something."""
    trainer = config.trainer
    if trainer.critic_warmup > 0 and not needs_critic(config):
        wrong = f"there is no critic to warm up (algorithm.adv_estimator={config.algorithm.adv_estimator})"
        yield Problem("trainer.critic_warmup", trainer.critic_warmup, wrong, "0", "set it to 0, or critic.enable=true")
    if trainer.val_only and not trainer.val_before_train:
        wrong = "the run would do nothing: trainer.val_before_train=false"
        yield Problem("trainer.val_only", True, wrong, remedy="set trainer.val_before_train=true")


def resuming(config: PPOConfig | SFTConfig) -> Problems:
    """``resume_mode`` and ``resume_from_path`` belong together."""
    trainer = config.trainer
    key, path = "trainer.resume_from_path", trainer.resume_from_path
    if trainer.resume_mode != "resume_path":
        if path is not None:
            wrong = f"it is not read with trainer.resume_mode={trainer.resume_mode}"
            yield Problem(key, path, wrong, remedy="set trainer.resume_mode=resume_path, or leave it null")
    elif path is None:
        yield Problem(key, None, "trainer.resume_mode=resume_path needs it", remedy="name a .../global_step_N folder")
    elif not re.search(r"global_step_\d+/?$", path):
        yield Problem(key, path, "this is no checkpoint", "a folder that ends in global_step_N")
    elif not Path(path).is_dir():
        yield Problem(key, path, "there is no such folder", remedy=_checkpoints_beside(Path(path)))


def _checkpoints_beside(path: Path) -> str:
    steps = sorted((int(p.name.rpartition("_")[2]), p.name) for p in path.parent.glob("global_step_[0-9]*"))
    return f"there is {', '.join(name for _, name in steps[-3:])}" if steps else f"{path.parent} holds no checkpoint"


def engines(config: PPOConfig | SFTConfig) -> Problems:
    """Sharding groups divide the ranks, and what is trained has a format that can be trained."""
    sections: dict[str, FSDPEngineConfig] = {}
    if isinstance(config, PPOConfig):
        roles = config.actor_rollout_ref
        sections["actor_rollout_ref.actor.fsdp_config"] = roles.actor.fsdp_config
        if needs_reference(config):
            sections["actor_rollout_ref.ref.fsdp_config"] = roles.ref.fsdp_config
        if needs_critic(config):
            sections["critic.model.fsdp_config"] = config.critic.model.fsdp_config
    else:
        sections["engine"] = config.engine
    ranks = rank_count(config.trainer)
    for name, engine in sections.items():
        size = engine.fsdp_size
        if size == 0 or (0 < size < ranks and ranks % size):
            yield Problem(f"{name}.fsdp_size", size, f"it does not divide {ranks} ranks", f"divisors of {ranks}, or -1")
        if not engine.forward_only:
            for key in ("dtype", "model_dtype"):
                if engine[key] in ("fp16", "float16"):
                    wrong = "gradients underflow in fp16"
                    yield Problem(f"{name}.{key}", engine[key], wrong, "bfloat16, fp32")


def names(config: PPOConfig | SFTConfig) -> Problems:
    """Names of project and run, which become folders, stay below the folder they are put into."""
    for key in ("project_name", "experiment_name"):
        if wrong := name_problem(config.trainer[key]):
            remedy = "set folders by trainer.default_local_dir and by the variables of the trackers"
            yield Problem(f"trainer.{key}", config.trainer[key], wrong, "a name, or names with / between them", remedy)


def trackers(config: PPOConfig | SFTConfig) -> Problems:
    """Every tracker is known and installed."""
    for name in config.trainer.logger:
        if name not in TRACKERS:
            wrong = f"there is no tracker '{name}'.{suggest(name, list(TRACKERS))}"
            yield Problem("trainer.logger", list(config.trainer.logger), wrong, ", ".join(TRACKERS))
        elif (module := TRACKERS[name]) is not None and importlib.util.find_spec(module) is None:
            rest = [other for other in config.trainer.logger if other != name] or ["console"]
            remedy = f"pip install 'verl[{name}]', or set trainer.logger=[{','.join(rest)}]"
            yield Problem("trainer.logger", list(config.trainer.logger), f"{name} is not installed", remedy=remedy)


def controller(config: PPOConfig | SFTConfig | GenerationConfig) -> Problems:
    """The local controller runs one rank."""
    ranks = rank_count(config.trainer)
    if config.trainer.controller == "local" and ranks > 1:
        wrong = f"it runs one rank in this process, and {ranks} are asked for (nnodes × n_gpus_per_node)"
        remedy = "set trainer.nnodes=1 and trainer.n_gpus_per_node=1, or trainer.controller=ray"
        yield Problem("trainer.controller", "local", wrong, remedy=remedy)
    if config.trainer.controller == "ray" and importlib.util.find_spec("ray") is None:
        remedy = "pip install 'verl[ray]', or set trainer.controller=local with one rank"
        yield Problem("trainer.controller", "ray", "Ray is not installed", remedy=remedy)
