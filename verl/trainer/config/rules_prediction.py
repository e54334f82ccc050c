"""Rules about multi-token prediction: which back end trains heads, and which engine uses them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from verl.config import GenerationConfig, HFModelConfig, PPOConfig, Problem, RMConfig, RolloutConfig, SupervisedConfig
from verl.config.rollout import IN_PROCESS_ENGINES
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
    if rollout.name in IN_PROCESS_ENGINES:
        cause = f"{section}.name={rollout.name} draws token by token, without proposals of heads"
        yield Problem(key, True, cause, "false", f"or set {section}.name to vllm or sglang")
    for name, min_p in {"min_p": rollout.min_p, "val_kwargs.min_p": rollout.val_kwargs.min_p}.items():
        if min_p > 0 and rollout.name not in IN_PROCESS_ENGINES:
            cause = f"{rollout.name} verifies proposals of heads (model.mtp.enable_rollout=true) without it"
            yield Problem(f"{section}.{name}", min_p, cause, "0", f"or set {key}=false")
    if rollout.name == "vllm" and rollout.quantization == "int8":
        cause = "heads of model.mtp.enable_rollout=true are not rounded"
        yield Problem(f"{section}.quantization", "int8", cause, "null", f"or set {key}=false")
    if rollout.name == "sglang":
        yield from _verified_by_sglang(model, rollout, key, section)
    yield from _has_heads(model, key)


def _verified_by_sglang(model: HFModelConfig, rollout: RolloutConfig, key: str, section: str) -> Problems:
    """SGLang verifies proposals by a sampler of its own, in place of that of this package."""
    cuts = {"top_k": (rollout.top_k, rollout.top_k > 0, "-1"), "top_p": (rollout.top_p, rollout.top_p < 1, "1")}
    for name, (value, cuts_off, without) in cuts.items():
        if cuts_off:
            cause = f"where SGLang verifies proposals of heads ({key}=true), its log-probs are those without the cut"
            yield Problem(f"{section}.{name}", value, cause, without, f"or set {key}=false, or {section}.name=vllm")
    cause = "SGLang verifies proposals of heads with random numbers of its own, and no test has run it"
    remedy = "a seed does not give the same responses again; compare training/rollout_probs_diff_mean of the first "
    yield Problem(key, True, cause, remedy=f"{remedy}steps with a run without heads", advice=True)
    if model.mtp.is_trained:
        cause = "sglang proposes by the heads in model.path; updates, so trained heads too, pass it by"
        yield Problem(key, True, cause, remedy="expect fewer proposals to be accepted with time", advice=True)


def _has_heads(model: HFModelConfig, key: str) -> Problems:
    fields = model_files.config_entries(Path(model.hf_config_path or model.path).expanduser())
    if fields and not head_count(fields | model.override_config):  # else a name on the hub
        cause = f"the config of {model.path} has no num_nextn_predict_layers above 0, so the model has no heads"
        yield Problem(key, True, cause, "false", "or take a model with heads")
