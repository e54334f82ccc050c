"""Rules about multi-token prediction: which back end trains heads, and which engine uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.config import GenerationConfig, HFModelConfig, PPOConfig, Problem, RMConfig, RolloutConfig, SupervisedConfig
from verl.config.rollout import OWN_ENGINES
from verl.utils.model_facts import model_files
from verl.utils.model_facts.prediction_heads import head_count

Problems = Iterator[Problem]


def heads(config: PPOConfig | SupervisedConfig | GenerationConfig) -> Problems:
    """Heads are trained by Megatron, and proposed from by engines that can; the model has some."""
    if isinstance(config, PPOConfig):
        roles = config.actor_rollout_ref
        yield from _trained(roles.model, roles.actor.strategy, "actor_rollout_ref.model", "actor_rollout_ref.actor")
        yield from _in_rollout(roles.model, roles.rollout, "actor_rollout_ref.model", "actor_rollout_ref.rollout")
        return
    if isinstance(config, GenerationConfig):
        yield from _in_rollout(config.model, config.rollout, "model", "rollout")
        return
    if isinstance(config, RMConfig) and config.model.mtp.is_trained:
        cause = "a reward model predicts no tokens, so it has no heads that could be trained"
        yield Problem("model.mtp.enable_train", True, cause, "false")
        return
    yield from _trained(config.model, config.engine.strategy, "model", "engine")


def _trained(model: HFModelConfig, strategy: str, path: str, section: str) -> Problems:
    if not model.mtp.is_trained:
        return
    key = f"{path}.mtp.enable_train"
    if strategy != "megatron":
        cause = f"{section}.strategy={strategy} does not build heads of multi-token prediction"
        remedy = f"or set {section}.strategy=megatron; untrained heads are kept as they are"
        yield Problem(key, True, cause, "false", remedy)
    if model.has_adapters:
        cause = "LoRA adapters are trained in place of the model's weights, and heads have none"
        yield Problem(key, True, cause, "false", "or train without adapters")
    yield from _has_heads(model, key)


def _in_rollout(model: HFModelConfig, rollout: RolloutConfig, path: str, section: str) -> Problems:
    if not model.mtp.is_in_rollout:
        return
    key = f"{path}.mtp.enable_rollout"
    if rollout.name in OWN_ENGINES:
        cause = f"{section}.name={rollout.name} draws token by token, without proposals of heads"
        yield Problem(key, True, cause, "false", f"or set {section}.name to vllm or sglang")
    else:
        # Its draws while it verifies proposals were compared with no oracle: SGLang's do not use our sampler.
        cause = f"no test has run proposals of heads with {rollout.name}"
        remedy = "compare training/rollout_probs_diff_mean of the first steps with a run without them"
        yield Problem(key, True, cause, remedy=remedy, advice=True)
        if model.mtp.is_trained:
            cause = f"{rollout.name} proposes by the heads in model.path; updates, so trained heads too, pass it by"
            yield Problem(key, True, cause, remedy="expect fewer proposals to be accepted with time", advice=True)
    yield from _has_heads(model, key)


def _has_heads(model: HFModelConfig, key: str) -> Problems:
    fields = model_files.config_entries(Path(model.hf_config_path or model.path).expanduser())
    if fields and not head_count(fields | model.override_config):  # else a name on the hub
        cause = f"the config of {model.path} has no num_nextn_predict_layers above 0, so the model has no heads"
        yield Problem(key, True, cause, "false", "or take a model with heads")
