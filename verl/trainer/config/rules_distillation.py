"""Rules of distillation: which teachers, losses and layouts go together."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.algorithms import policy_loss_info
from verl.algorithms.distillation import check_distillation_loss, distillation_loss_info
from verl.config import DistillationConfig, PPOConfig, Problem
from verl.config.agent import SINGLE_TURN
from verl.config.distillation import FORWARD_PASSES
from verl.errors import ConfigError
from verl.trainer.config.rules_engines import most_likely_tokens
from verl.trainer.config.rules_sizes import needs_critic
from verl.utils.model_facts import model_files
from verl.vision.families import FAMILIES

Problems = Iterator[Problem]

LOSS = "distillation.distillation_loss"


def distillation(config: PPOConfig) -> Problems:
    """The policy can learn from the divergence as it is set, and each teacher gives what that reads."""
    section = config.distillation
    if not section.enabled:
        return
    settings = section.distillation_loss
    try:
        info = check_distillation_loss(settings)
    except ConfigError as error:
        yield Problem(f"{LOSS}.loss_mode", settings.loss_mode, str(error))
        return
    if info.reads == "full" and not section.is_self_distillation:
        yield from _whole_vocabulary(section, settings.loss_mode)
    if settings.use_policy_gradient:
        yield from _policy_gradient(config)
    if section.replaces_rewards:
        yield from _without_rewards(config)
    if section.is_self_distillation:
        yield from _of_itself(config)
        return
    if section.aligns_text:
        yield from _aligned_by_text(config)
    for name, teacher in section.teachers.items():
        if info.reads == "topk" and settings.topk is not None:
            path, asks = f"distillation.teacher_models.{name}.inference", f"{LOSS}.topk={settings.topk}"
            yield from most_likely_tokens(path, teacher.inference, settings.topk, asks)
        if section.has_forward_passes and not teacher.inference.is_forward_pass:
            cause = "another teacher is a forward pass, and the teachers of a run are all of that kind, or none is"
            key = f"distillation.teacher_models.{name}.inference.name"
            yield Problem(key, teacher.inference.name, cause, ", ".join(FORWARD_PASSES))
    if section.nnodes > 0 and config.trainer.controller == "local":
        cause = "trainer.controller=local runs one rank in this process, and a pool of teachers needs others"
        remedy = "set trainer.controller=ray, or leave it 0"
        yield Problem("distillation.nnodes", section.nnodes, cause, "0", remedy)


def _without_rewards(config: PPOConfig) -> Problems:
    """No critic is trained, and no samples are lost, for advantages from which nothing is learnt."""
    is_self_distillation = (
        config.distillation.is_self_distillation
    )  # whose template may show the best of several responses
    unread = f"{LOSS}.use_task_rewards=false: the policy learns from the teacher alone"
    if config.algorithm.filter_groups.enable and not is_self_distillation:
        cause = f"{unread}, to which equal scores of the responses of a prompt make no difference, and samples are lost"
        yield Problem("algorithm.filter_groups.enable", True, cause, "false", advice=True)
    if needs_critic(config):
        cause = f"{unread}, and a critic would be loaded and trained for advantages that nothing reads"
        remedy = f"or set {LOSS}.use_task_rewards=true to learn from the rewards too"
        if config.critic.enable:
            yield Problem("critic.enable", True, cause, "null", remedy)
        else:
            name = config.algorithm.adv_estimator
            yield Problem("algorithm.adv_estimator", name, cause, "an estimator without a critic: grpo", remedy)


def _of_itself(config: PPOConfig) -> Problems:
    """The policy has an average of its weights where that is the teacher, and its template can be read."""
    settings, key = config.distillation.self_distillation, "distillation.self_distillation"
    strategy = config.actor_rollout_ref.actor.strategy
    if settings.weights != "policy" and strategy == "megatron":
        cause = "strategy=megatron keeps no second set of the policy's weights"
        yield Problem(f"{key}.weights", settings.weights, cause, "policy", "or set actor.strategy=fsdp2")
    if settings.template_path is not None and not Path(settings.template_path).expanduser().is_file():
        yield Problem(
            f"{key}.template_path", settings.template_path, "there is no such file", remedy="name the Jinja file"
        )
    if not config.data.return_raw_chat:
        cause = f"{key}.enabled=true reads the messages of the prompts"
        yield Problem("data.return_raw_chat", False, cause, "true")


def _aligned_by_text(config: PPOConfig) -> Problems:
    """Spans of text have a log-prob under both models, and the teacher reads what the policy read and wrote."""
    settings, key = config.distillation.distillation_loss, "distillation.alignment"
    if distillation_loss_info(settings.loss_mode).reads != "sampled":
        cause = f"{settings.loss_mode} compares distributions of tokens, which two tokenizers do not share"
        remedy = "or leave alignment=token, with teachers of the policy's model family"
        allowed = "k1, k2, k3, abs, ..."
        yield Problem(f"{LOSS}.loss_mode", settings.loss_mode, f"{key}=text: {cause}", allowed, remedy)
    loop = config.actor_rollout_ref.rollout.default_agent_loop
    if loop != SINGLE_TURN:
        cause = f"{key}=text: results of tools are in the chat template of the policy alone"
        yield Problem("actor_rollout_ref.rollout.agent.default_agent_loop", loop, cause, SINGLE_TURN)
    if not config.data.return_raw_chat:
        cause = f"{key}=text: the teacher's prompts are made of the messages"
        yield Problem("data.return_raw_chat", False, cause, "true")
    if config.data.truncation != "error":
        cause = f"{key}=text: of a prompt that is cut in the policy's tokens the teacher would read the whole"
        remedy = "set data.filter_overlong_prompts=true to leave such rows out"
        yield Problem("data.truncation", config.data.truncation, cause, "error", remedy)
    kind = model_files.model_type(Path(config.actor_rollout_ref.model.path).expanduser())
    if kind in FAMILIES:
        cause = f"images are read by the tokens of the policy, a {kind}"
        yield Problem(key, "text", cause, "token", "take a teacher of the same kind")


def _whole_vocabulary(section: DistillationConfig, mode: str) -> Problems:
    """Teachers of the whole vocabulary are in the workers of the policy, which alone can hold what they compute."""
    remedy = f"set {LOSS}.loss_mode={mode}_topk"
    for name, teacher in section.teachers.items():
        if not teacher.inference.is_forward_pass:
            cause = f"{mode} reads the teacher's whole vocabulary, and this kind of teacher gives some log-probs of it"
            key = f"distillation.teacher_models.{name}.inference.name"
            yield Problem(key, teacher.inference.name, cause, ", ".join(FORWARD_PASSES), remedy)
    if section.nnodes > 0:
        cause = f"{mode} reads the teacher's whole vocabulary, which is not sent from ranks of its own to the policy's"
        yield Problem("distillation.nnodes", section.nnodes, cause, "0", remedy)


def _policy_gradient(config: PPOConfig) -> Problems:
    """The policy loss of the divergences reads nothing that is made for the policy loss of the rewards."""
    name = config.distillation.distillation_loss.policy_loss_mode
    try:
        info = policy_loss_info(name)
    except ConfigError as error:
        yield Problem(f"{LOSS}.policy_loss_mode", name, str(error))
        return
    mode = config.actor_rollout_ref.actor.loss_agg_mode
    if info.columns or info.prepared_columns:
        cause = "it reads columns of the whole mini-batch that are made for actor.policy_loss alone"
        yield Problem(f"{LOSS}.policy_loss_mode", name, cause, "vanilla, or another loss of single tokens or sequences")
    elif info.modes is not None and mode not in info.modes:
        cause = f"it makes no sense with actor_rollout_ref.actor.loss_agg_mode={mode}"
        yield Problem(f"{LOSS}.policy_loss_mode", name, cause)
