"""Rules about models with images."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path

from verl.base.engine_python import engine_python
from verl.config import PPOConfig, Problem, RolloutConfig
from verl.config.rollout import SERVER_ENGINES
from verl.trainer.config.rules_sizes import needs_critic
from verl.utils.model_facts import model_files
from verl.vision.families import FAMILIES

Problems = Iterator[Problem]
_HERE = (None, sys.executable)
"""Interpreters of engines that run in this environment; None where no other one is found."""


def models_with_images(config: PPOConfig) -> Problems:
    """A policy with images has engines that take them, and a critic that sees them too."""
    roles = config.actor_rollout_ref
    kind = model_files.model_type(Path(roles.model.path).expanduser())
    if kind not in FAMILIES:
        if kind is not None and roles.actor.freeze_vision_tower:
            cause = f"the policy is a {kind}, which has no vision tower"
            yield Problem("actor_rollout_ref.actor.freeze_vision_tower", True, cause, "false")
        return
    rollout, key = roles.rollout, "actor_rollout_ref.rollout.tensor_model_parallel_size"
    if rollout.name in SERVER_ENGINES:
        yield from _has_torchvision(rollout, kind)
        heads = model_files.vision_heads(Path(roles.model.path).expanduser())
        if heads is not None and heads % rollout.tensor_model_parallel_size:
            cause = f"{rollout.name} splits the {heads} attention heads of the vision tower over these ranks"
            yield Problem(key, rollout.tensor_model_parallel_size, cause, f"a divisor of {heads}")
    if config.reward_model.enable and config.judge is None:
        yield from _of_reward_model(config, kind)
    if needs_critic(config):
        critic = model_files.model_type(Path(config.critic.model.path).expanduser())
        if critic is not None and critic != kind:
            cause = f"it holds a {critic}, and the policy with images is a {kind}, whose tokens the critic reads"
            yield Problem("critic.model.path", config.critic.model.path, cause, "a model of the same kind")
    for name, teacher in config.distillation.teachers.items() if config.distillation.enabled else ():
        if teacher.model_path is not None and teacher.inference.name != "openai":
            path = f"distillation.teacher_models.{name}.model_path"
            yield from teacher_with_images(path, teacher.model_path, roles.model.path)


def teacher_with_images(key: str, teacher: str, student: str) -> Problems:
    """A teacher of a model with images is of the same kind: it reads the pictures as they are made for that model."""
    teacher_kind, student_kind = (model_files.model_type(Path(path).expanduser()) for path in (teacher, student))
    if student_kind in FAMILIES and teacher_kind is not None and teacher_kind != student_kind:
        cause = f"it holds a {teacher_kind}, and what it reads is made for a model with images, a {student_kind}"
        yield Problem(key, teacher, cause, "a model of the same kind")


def _of_reward_model(config: PPOConfig, kind: str | None) -> Problems:
    """The reward model sees the images of the policy."""
    section = config.reward_model
    model_type = model_files.model_type(Path(section.model.path).expanduser())
    if model_type is not None and model_type != kind:
        cause = (
            f"it holds a {model_type}, and the policy with images is a {kind}, whose tokens and images it would be "
            "given"
        )
        remedy = "train one with python -m verl.trainer.rm_trainer, or score by custom_reward_function.path"
        yield Problem("reward_model.model.path", section.model.path, cause, "a reward model of the same kind", remedy)
    longest = config.data.max_prompt_length + config.data.max_response_length
    if section.max_length is not None and section.max_length < longest:
        cause = f"sequences have up to {longest} tokens, and those with images are not cut"
        yield Problem("reward_model.max_length", section.max_length, cause, f"null, or >= {longest}")


def _has_torchvision(rollout: RolloutConfig, kind: str | None) -> Problems:
    """The environment of vLLM or SGLang, unless it is another one, has what their models with images import."""
    if rollout.engine_kwargs.get(rollout.name, {}).get("python") or engine_python(rollout.name) not in _HERE:
        return
    if importlib.util.find_spec("torchvision") is None:
        cause = f"{rollout.name} needs the package torchvision for a {kind}, and it is not installed here"
        remedy = "install it (on a CPU as requirements/vllm.txt says), or set rollout.name=native"
        yield Problem("actor_rollout_ref.rollout.name", rollout.name, cause, remedy=remedy)
