"""Rules that ask a registry what an algorithm, a loss, a reward or a sampler needs; they import PyTorch.

They are checked once no other rule is broken (:mod:`verl.trainer.config.rules`), still before any model loads.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

import verl.algorithms as algorithms
from verl.algorithms.distillation import check_distillation_loss
from verl.base.registry import suggest
from verl.config import (
    ActorConfig,
    BaseConfig,
    DPOConfig,
    PPOConfig,
    Problem,
    RMConfig,
    SFTConfig,
    SupervisedConfig,
)
from verl.datasets.build import SAMPLERS
from verl.errors import ConfigError
from verl.scorers import FORMATS, SCORERS
from verl.trainer.config import rules_files as files
from verl.trainer.config import rules_off_policy as off_policy
from verl.trainer.config import rules_vision as vision
from verl.trainer.config.rules_distillation import distillation
from verl.trainer.config.rules_resume import own_checkpoints
from verl.trainer.config.rules_sizes import needs_critic
from verl.workers.reward_manager import get_reward_manager_cls

Problems = Iterator[Problem]

ACTOR = "actor_rollout_ref.actor"


def broken_algorithm_rules(config: Any, data_only: bool = False) -> list[Problem]:
    """Return the problems of a configuration that keeps all other rules; arguments as in ``broken_rules``."""
    rules = RULES.get(type(config), ())
    if data_only:
        rules = (order_of_rows,) if isinstance(config, PPOConfig) else ()
    problems = [problem for rule in rules for problem in rule(config)]
    if (
        not data_only
        and isinstance(config, PPOConfig | SupervisedConfig)
        and all(problem.advice for problem in problems)
    ):
        problems += own_checkpoints(config)  # a model that is misspelt is no other model
    return problems


def estimator(config: PPOConfig) -> Problems:
    """The advantage estimator exists, and has what it needs: several responses per prompt, values, no KL in rewards."""
    name, n = config.algorithm.adv_estimator, config.actor_rollout_ref.rollout.n
    key = "algorithm.adv_estimator"
    try:
        function = algorithms.get_adv_estimator_fn(name)
    except ConfigError as error:
        yield Problem(key, name, str(error), remedy="register your own with @register_adv_est before the run starts")
        return
    needs = algorithms.adv_needs(name)
    columns = needs.columns
    if config.algorithm.use_kl_in_reward and needs.no_kl_in_reward:
        cause = f"{key}={name} cannot have KL in the reward: {needs.no_kl_in_reward}"
        remedy = "put the KL into the loss: actor_rollout_ref.actor.use_kl_loss=true"
        yield Problem("algorithm.use_kl_in_reward", True, cause, "false", remedy)
    compares = "index" in columns and not config.distillation.replaces_rewards
    if compares and n == 1 and function.__module__.startswith("verl."):
        yield Problem(
            "actor_rollout_ref.rollout.n",
            n,
            f"{key}={name} compares the responses of one prompt; with one response the advantage is its reward, "
            "without a baseline",
            "at least 2, usual are 4 to 16",
            "set rollout.n, or choose an estimator without siblings: gae, reinforce_plus_plus, remax",
            advice=True,
        )
    if "values" in columns and config.critic.enable is False:
        remedy = "set critic.enable=true, or choose an estimator without values: grpo, rloo, reinforce_plus_plus"
        yield Problem("critic.enable", False, f"{key}={name} reads the critic's values", remedy=remedy)
    rewrites = "actor_rollout_ref.rollout.multi_turn.use_inference_chat_template"
    if (
        "trajectory_conversation" in needs.optional_columns
        and config.actor_rollout_ref.rollout.multi_turn.use_inference_chat_template
    ):
        cause = (
            f"{key}={name} compares turns by what the environment said before them, and a trajectory whose history is "
            "rewritten has several sequences, which begin with it in their prompts"
        )
        yield Problem(rewrites, True, cause, "false", "or set algorithm.adv_estimator=grpo_per_turn")


def losses(config: PPOConfig) -> Problems:
    """The policy loss exists and has what it needs; advise against KL in both reward and loss."""
    actor = config.actor_rollout_ref.actor
    try:
        algorithms.get_policy_loss_fn(actor.policy_loss.loss_mode)
    except ConfigError as error:
        key, remedy = "policy_loss.loss_mode", "register your own with @register_policy_loss before the run starts"
        yield Problem(f"actor_rollout_ref.actor.{key}", actor.policy_loss.loss_mode, str(error), remedy=remedy)
    else:
        yield from policy_loss(actor)
    if actor.use_kl_loss and config.algorithm.use_kl_in_reward:
        yield Problem(
            "algorithm.use_kl_in_reward",
            True,
            "the divergence from the reference is penalised twice, here and in actor.use_kl_loss",
            remedy="keep one of them, unless that is what you want",
            advice=True,
        )


def policy_loss(actor: ActorConfig) -> Problems:
    """The chosen policy loss (a registered one) works with ``loss_agg_mode`` and with token selection by entropy."""
    settings, mode = actor.policy_loss, actor.loss_agg_mode
    name, info = settings.loss_mode, algorithms.policy_loss_info(actor.policy_loss.loss_mode)
    if info.modes is not None and mode not in info.modes:
        cause = (
            f"policy_loss.loss_mode={name} makes no sense with it: it would divide out the lengths that the loss has"
        )
        remedy = f"the paper's is {info.paper_mode}" if info.paper_mode else ""
        yield Problem(f"{ACTOR}.loss_agg_mode", mode, cause, ", ".join(info.modes), remedy)
    elif info.paper_mode is not None and mode != info.paper_mode and info.modes is None:
        yield Problem(
            f"{ACTOR}.loss_agg_mode",
            mode,
            f"the paper of policy_loss.loss_mode={name} ({info.paper}) has {info.paper_mode}, which releases of verl "
            "take whatever is set; here the setting counts",
            remedy=f"set loss_agg_mode={info.paper_mode}, unless this is what you want",
            advice=True,
        )
    for key, off in (("top_entropy_quantile", 1), ("off_policy_mask_threshold", None)):
        if settings[key] != off and not info.takes_weights:
            cause = f"policy_loss.loss_mode={name} has no parameter rollout_is_weights, by which tokens are taken out"
            remedy = "add the parameter to your loss, or keep all tokens"
            yield Problem(f"{ACTOR}.policy_loss.{key}", settings[key], cause, "null" if off is None else "1", remedy)


def rewards(config: PPOConfig) -> Problems:
    """Reward manager and scorer exist, and only one scorer is chosen for all rows."""
    manager, model = config.reward_manager, config.reward_model
    if manager.source == "register":
        try:
            get_reward_manager_cls(manager.name)
        except ConfigError as error:
            remedy = "use a known one, or your own with reward_manager.source=importlib"
            yield Problem("reward_manager.name", manager.name, str(error), remedy=remedy)
    formats = sorted({*FORMATS, *SCORERS.names()})
    if model.reward_format is not None and model.reward_format not in FORMATS and model.reward_format not in SCORERS:
        cause = f"there is no such scorer.{suggest(model.reward_format, formats)}"
        yield Problem("reward_model.reward_format", model.reward_format, cause, ", ".join(formats))
    if model.reward_format is not None and config.custom_reward_function.path is not None:
        cause = f"custom_reward_function.path={config.custom_reward_function.path} scores all rows already"
        yield Problem("reward_model.reward_format", model.reward_format, cause, remedy="keep one of the two")


def teacher_of_data(config: SFTConfig) -> Problems:
    """The teacher of supervised training exists, and the model can learn from it by the loss."""
    distillation, key = config.distillation, "distillation"
    if distillation.model_path is None:
        return
    yield from files.model(f"{key}.model_path", distillation.model_path)
    yield from vision.teacher_with_images(f"{key}.model_path", distillation.model_path, config.model.path)
    try:
        check_distillation_loss(distillation.distillation_loss)
    except ConfigError as error:
        mode = distillation.distillation_loss.loss_mode
        remedy = "take another loss_mode; forward_kl learns the whole distribution of the teacher"
        yield Problem(f"{key}.distillation_loss.loss_mode", mode, str(error), remedy=remedy)


def optimizers(config: PPOConfig | SupervisedConfig) -> Problems:
    """The optimizer's package is installed, PyTorch has its class, and moments in bfloat16 are those of Megatron's."""
    trained = (
        [("", "engine.strategy", config.engine.strategy, config.optim)] if isinstance(config, SupervisedConfig) else []
    )
    if isinstance(config, PPOConfig):
        actor, critic = config.actor_rollout_ref.actor, config.critic
        trained.append((f"{ACTOR}.", f"{ACTOR}.strategy", actor.strategy, actor.optim))
        if needs_critic(config):
            trained.append(("critic.", "critic.strategy", critic.strategy, critic.optim))
    for section, key, strategy, optim in trained:
        classes = {name: value for name, value in vars(torch.optim).items() if isinstance(value, type)}
        if optim.optimizer_impl == "torch.optim" and optim.optimizer not in classes:
            cause = f"torch.optim has no such class.{suggest(optim.optimizer, [*classes])}"
            yield Problem(f"{section}optim.optimizer", optim.optimizer, cause, "AdamW, Muon, SGD ...")
        package = optim.optimizer_impl.partition(".")[0]
        if package not in sys.modules and not (package.isidentifier() and importlib.util.find_spec(package)):
            remedy = "or install the package on every node"
            cause = f"the package '{package}' is not installed"
            yield Problem(f"{section}optim.optimizer_impl", optim.optimizer_impl, cause, "torch.optim", remedy)
        for name in ("exp_avg_dtype", "exp_avg_sq_dtype") if strategy != "megatron" else ():
            if (value := optim[name]) != "fp32":
                cause = f"with {key}={strategy} moments have the precision of the stored weights"
                yield Problem(f"{section}optim.{name}", value, cause, "fp32", "or use strategy=megatron")


def order_of_rows(config: PPOConfig) -> Problems:
    """The built-in sampler exists, and rows are not read ahead of the steps that it learns from."""
    data, sampler = config.data, config.data.sampler
    if sampler.class_path is not None or sampler.class_name is None:
        return
    if sampler.class_name not in SAMPLERS:
        cause = f"there is no such sampler.{suggest(sampler.class_name, list(SAMPLERS))}"
        remedy = "set data.sampler.class_path too for a class of your own"
        yield Problem("data.sampler.class_name", sampler.class_name, cause, ", ".join(SAMPLERS), remedy)
    else:
        yield from data.reads_ahead("data", f"data.sampler.class_name={sampler.class_name}")


RULES: dict[type[BaseConfig], tuple[Callable[[Any], Problems], ...]] = {
    PPOConfig: (
        order_of_rows,
        optimizers,
        estimator,
        losses,
        off_policy.rollout_correction,
        off_policy.truncated_sampling,
        off_policy.sampling_mask,
        off_policy.lag,
        rewards,
        distillation,
    ),
    SFTConfig: (optimizers, teacher_of_data),
    RMConfig: (optimizers,),
    DPOConfig: (optimizers,),
}
"""Root section → its rules."""
