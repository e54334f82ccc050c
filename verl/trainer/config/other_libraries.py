"""Names of settings in TRL and OpenRLHF, and what they are called here.

One table for :func:`verl.train` and its relatives, which take these names, for ``verl explain``, and for the message
about an unknown key. It holds facts alone: a name, our keys, how a value is converted, or why there is no key.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from verl.errors import ConfigError


@dataclass(frozen=True)
class OtherName:
    """A setting of another library.

    Attributes:
        name: its name there.
        keys: our keys for it. Alternatives of several commands are separated by a space; a command takes the first
            that it has.
        convert: makes the values of ``keys`` of the value there; None gives it unchanged to the only key.
        values: value there → our values by key, for settings with a few values; others are refused.
        note: what differs; or, without keys, why there is none and what to do.
    """

    name: str
    keys: tuple[str, ...] = ()
    convert: Callable[[Any], Sequence[object]] | None = None
    values: Mapping[Any, Mapping[str, object]] | None = None
    note: str = ""

    def keys_of(self, command_keys: Collection[str]) -> list[str]:
        """Return our keys of a command, given all keys that it has; empty if the command has none of them."""
        keys = [_first_present(alternatives, command_keys) for alternatives in self.keys]
        return keys if all(keys) else []

    def settable(self, command_keys: Collection[str]) -> bool:
        """Return whether a command with these keys has a setting for it."""
        if self.values is not None:
            return all(_first_present(key, command_keys) for settings in self.values.values() for key in settings)
        return bool(self.keys_of(command_keys))

    def settings(self, value: object, command_keys: Collection[str], library: str = "TRL") -> dict[str, object]:
        """Convert a value to our settings, by key.

        Raises:
            ConfigError: nothing here stands for the setting or for this value of it.
        """
        shown = f"{self.name}={value!r}"
        if self.values is not None:
            # Of the same type too: 1 equals True.
            same = (
                setting
                for other_value, setting in self.values.items()
                if type(other_value) is type(value) and other_value == value
            )
            if (listed := next(same, None)) is None:
                offered = ", ".join(map(repr, self.values))
                raise ConfigError(
                    f"{shown} of {library} has no counterpart here. Known: {offered}. {self.note}".rstrip()
                )
            return {_first_present(key, command_keys): setting for key, setting in listed.items()}
        keys = self.keys_of(command_keys)
        if not keys:
            raise ConfigError(f"{shown}: {self.note or 'this command has no such setting; leave it out'}")
        try:
            values = [value] if self.convert is None else self.convert(value)
        except (TypeError, ValueError, AttributeError) as error:
            raise ConfigError(
                f"{shown}: this value cannot be used ({error}). Set {self.describe(command_keys)}."
            ) from error
        return {key: setting for key, setting in zip(keys, values, strict=True) if setting is not UNSET}

    def describe(self, command_keys: Collection[str] | None = None) -> str:
        """Return in one line what to set here; ``command_keys`` are the command's keys, None names all alternatives."""
        if self.values is not None:
            text = "; ".join(self.values_in_words()) if command_keys is None or self.settable(command_keys) else ""
        else:
            keys = list(self.keys) if command_keys is None else self.keys_of(command_keys)
            text = " and ".join(key.replace(" ", " or ") for key in keys)
        return " ".join(part for part in (text, f"({self.note})" if text and self.note else self.note) if part)

    def values_in_words(self) -> list[str]:
        """Say for each value of the other library what to set here."""
        return [f"{_word(other_value)}: {_pairs(settings)}" for other_value, settings in (self.values or {}).items()]


def _first_present(alternatives: str, command_keys: Collection[str]) -> str:
    """Return the first of several keys that a command has, or an empty text; ``key[i]`` is an item of a key."""
    return next((key for key in alternatives.split() if key.partition("[")[0] in command_keys), "")


class _Unset:
    """A key that a conversion leaves at its default."""


UNSET = _Unset()


def _word(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _pairs(settings: Mapping[str, object]) -> str:
    return ", ".join(f"{key.split()[0]}={_word(value)}" for key, value in settings.items()) or "the default"


_ACTOR, _ROLLOUT, _MODEL = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.model"
_LOSS = f"{_ACTOR}.policy_loss"
_MULTI = f"{_ROLLOUT}.multi_turn"
_OPTIM = f"{_ACTOR}.optim"
_CORRECTION = "algorithm.rollout_correction"
_AGGREGATION = f"{_ACTOR}.loss_agg_mode"


def _sampling(name: str) -> str:
    return f"{_ROLLOUT}.{name} rollout.{name}"


def _optim(name: str) -> str:
    return f"{_OPTIM}.{name} optim.{name}"


def _of_model(name: str) -> str:
    return f"{_MODEL}.{name} model.{name}"


def _kl_loss(beta: float) -> list[object]:
    return [float(beta) > 0, float(beta) if float(beta) > 0 else UNSET]


def _steps(steps: int | None) -> list[object]:
    return [UNSET if steps is None or int(steps) <= 0 else int(steps)]


def _epochs(epochs: float) -> list[object]:
    if float(epochs) != int(epochs):
        raise ValueError("passes over the data are whole here; set trainer.total_training_steps for a part of one")
    return [int(epochs)]


def _no_limit_is_minus_one(top_k: int | None) -> list[object]:
    return [-1 if not top_k else int(top_k)]


def _loggers(names: str | Iterable[str] | None) -> list[object]:
    listed = [names] if isinstance(names, str) else list(names or ())
    return [["console", "file", *(name for name in listed if name != "none")]]


def _device(use_cpu: object) -> list[object]:
    return ["cpu" if use_cpu else "cuda"]


def _lora(config: Any) -> list[object]:
    names = config.target_modules
    return [config.r, config.lora_alpha, UNSET if names is None else names if isinstance(names, str) else sorted(names)]


_PER_DEVICE = (
    "rows of one pass on one device, which decide nothing but memory here, with use_dynamic_bsz=false; "
    f"data.train_batch_size and {_ACTOR}.ppo_mini_batch_size count prompts, or rows, over all devices"
)

TRL: tuple[OtherName, ...] = (
    # the run
    OtherName("output_dir", ("trainer.default_local_dir",)),
    OtherName("seed", ("trainer.seed",)),
    OtherName("max_steps", ("trainer.total_training_steps",), _steps),
    OtherName("num_train_epochs", ("trainer.total_epochs",), _epochs),
    OtherName("save_steps", ("trainer.save_freq",)),
    OtherName("eval_steps", ("trainer.test_freq",)),
    OtherName(
        "save_strategy",
        values={"no": {"trainer.save_freq": -1}, "steps": {}, "epoch": {"trainer.save_freq": 0}},
        note="0 saves at the end alone; save_steps is trainer.save_freq",
    ),
    OtherName(
        "eval_strategy", values={"no": {"trainer.test_freq": -1}, "steps": {}}, note="eval_steps is trainer.test_freq"
    ),
    OtherName("save_total_limit", ("trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep",)),
    OtherName("logging_steps", note="every step is logged; leave it out"),
    OtherName("report_to", ("trainer.logger",), _loggers, note="console and file stay"),
    OtherName("run_name", ("trainer.experiment_name",)),
    OtherName("project", ("trainer.project_name",)),
    OtherName("use_cpu", ("trainer.device",), _device),
    OtherName("resume_from_checkpoint", ("trainer.resume_from_path",), note="with trainer.resume_mode=resume_path"),
    OtherName("log_completions", note="verl.train keeps all samples; on the command line set trainer.rollout_data_dir"),
    OtherName("num_completions_to_print", ("trainer.log_val_generations",)),
    # counting
    OtherName(
        "per_device_train_batch_size",
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu data.micro_batch_size_per_gpu",),
        note=_PER_DEVICE,
    ),
    OtherName(
        "gradient_accumulation_steps",
        note=f"accumulation follows from sizes: set {_ACTOR}.ppo_mini_batch_size, in prompts over all devices (of "
        "supervised runs data.train_batch_size, in rows), and the micro-batch for memory",
    ),
    OtherName(
        "per_device_eval_batch_size", ("data.val_batch_size",), note="prompts over all devices; null takes all at once"
    ),
    OtherName("generation_batch_size", note="set data.train_batch_size, in prompts: divide it by num_generations"),
    OtherName(
        "steps_per_generation",
        note=f"data.train_batch_size divided by {_ACTOR}.ppo_mini_batch_size is this number; set these two",
    ),
    OtherName("num_generations", (f"{_ROLLOUT}.n",)),
    OtherName("num_generations_eval", (f"{_ROLLOUT}.val_kwargs.n",)),
    OtherName("max_completion_length", ("data.max_response_length rollout.response_length",)),
    OtherName("max_new_tokens", ("data.max_response_length rollout.response_length",)),
    OtherName("max_prompt_length", ("data.max_prompt_length rollout.prompt_length",)),
    OtherName("max_length", ("data.max_length",)),
    OtherName("dataloader_num_workers", ("data.dataloader_num_workers data.num_workers",)),
    OtherName("shuffle_dataset", ("data.shuffle",)),
    OtherName("chat_template_kwargs", ("data.apply_chat_template_kwargs",)),
    # the optimizer
    OtherName("learning_rate", (_optim("lr"),)),
    OtherName("warmup_steps", (_optim("lr_warmup_steps"),)),
    OtherName("warmup_ratio", (_optim("lr_warmup_steps_ratio"),)),
    OtherName("weight_decay", (_optim("weight_decay"),)),
    OtherName("adam_beta1", (_optim("betas[0]"),), note="the first of two in betas"),
    OtherName("adam_beta2", (_optim("betas[1]"),), note="the second of two in betas"),
    OtherName(
        "lr_scheduler_type",
        values={
            "constant": {_optim("lr_scheduler_type"): "constant"},
            "constant_with_warmup": {_optim("lr_scheduler_type"): "constant"},
            "cosine": {_optim("lr_scheduler_type"): "cosine"},
        },
    ),
    OtherName("max_grad_norm", (f"{_ACTOR}.grad_clip optim.clip_grad",)),
    OtherName("gradient_checkpointing", (_of_model("enable_gradient_checkpointing"),)),
    OtherName(
        "bf16",
        values={
            True: {f"{_ACTOR}.fsdp_config.dtype engine.dtype": "bfloat16"},
            False: {f"{_ACTOR}.fsdp_config.dtype engine.dtype": "float32"},
        },
        note="the precision of computing; weights and optimizer stay in fp32",
    ),
    OtherName(
        "fp16",
        values={True: {f"{_ACTOR}.fsdp_config.dtype engine.dtype": "float16"}, False: {}},
        note="the precision of computing, with a loss scale; weights and optimizer stay in fp32",
    ),
    # the loss
    OtherName("beta", (f"{_ACTOR}.use_kl_loss", f"{_ACTOR}.kl_loss_coef"), _kl_loss, note="0 is no penalty"),
    OtherName("num_iterations", (f"{_ACTOR}.ppo_epochs",)),
    OtherName(
        "max_staleness",
        ("trainer.v1.sampler.max_off_policy_threshold",),
        note="with trainer.v1.trainer_mode=colocate_async or separate_async",
    ),
    OtherName("weight_sync_steps", ("trainer.async.sync_every",), note="with trainer.v1.trainer_mode=separate_async"),
    OtherName("epsilon", (f"{_ACTOR}.clip_ratio",), note="clip_ratio_low and clip_ratio_high follow it"),
    OtherName("epsilon_high", (f"{_ACTOR}.clip_ratio_high",)),
    OtherName("delta", (f"{_ACTOR}.clip_ratio_c",)),
    OtherName(
        "scale_rewards",
        values={
            True: {"algorithm.norm_adv_by_std_in_grpo": True},
            "group": {"algorithm.norm_adv_by_std_in_grpo": True},
            False: {"algorithm.norm_adv_by_std_in_grpo": False},
            "none": {"algorithm.norm_adv_by_std_in_grpo": False},
        },
        note="a deviation over the whole batch ('batch') is not in this version",
    ),
    OtherName(
        "loss_type",
        values={
            "dapo": {_AGGREGATION: "token-mean"},
            "bnpo": {_AGGREGATION: "token-mean"},
            "grpo": {_AGGREGATION: "seq-mean-token-mean"},
            "dr_grpo": {_AGGREGATION: "seq-mean-token-sum-norm"},
            "cispo": {f"{_LOSS}.loss_mode": "cispo", _AGGREGATION: "token-mean"},
            "sapo": {f"{_LOSS}.loss_mode": "sapo", _AGGREGATION: "seq-mean-token-mean"},
            "luspo": {f"{_LOSS}.loss_mode": "luspo"},
            "vespo": {f"{_LOSS}.loss_mode": "vespo", _AGGREGATION: "token-mean"},
        },
        note="in verl dpo it is loss.loss_type",
    ),
    OtherName(
        "importance_sampling_level",
        values={"token": {f"{_LOSS}.loss_mode": "vanilla"}, "sequence": {f"{_LOSS}.loss_mode": "gspo"}},
    ),
    OtherName("top_entropy_quantile", (f"{_LOSS}.top_entropy_quantile",)),
    OtherName("off_policy_mask_threshold", (f"{_LOSS}.off_policy_mask_threshold",)),
    OtherName("use_bias_correction_kl", (f"{_ACTOR}.use_bias_correction_kl",)),
    OtherName("vespo_k_pos", (f"{_LOSS}.vespo_k_pos",)),
    OtherName("vespo_lambda_pos", (f"{_LOSS}.vespo_lambda_pos",)),
    OtherName("vespo_k_neg", (f"{_LOSS}.vespo_k_neg",)),
    OtherName("vespo_lambda_neg", (f"{_LOSS}.vespo_lambda_neg",)),
    OtherName("entropy_coef", (f"{_ACTOR}.entropy_coeff",)),
    OtherName("entropy_target", (f"{_ACTOR}.entropy_target",)),
    OtherName("mask_truncated_completions", note="not in this version; a reward function can give such responses 0"),
    OtherName("sync_ref_model", note="the reference policy stays as it was loaded; leave it out"),
    OtherName("disable_dropout", note="dropout is off unless model.override_config names its rate; leave it out"),
    OtherName("remove_unused_columns", note="every column reaches the reward functions; leave it out"),
    OtherName(
        "multi_objective_aggregation",
        values={
            "sum_then_normalize": {"algorithm.adv_estimator": "grpo"},
            "normalize_then_sum": {"algorithm.adv_estimator": "gdpo"},
        },
        note="gdpo also wants algorithm.gdpo_reward_keys",
    ),
    # sampling
    OtherName("temperature", (_sampling("temperature"),)),
    OtherName("top_p", (_sampling("top_p"),)),
    OtherName("top_k", (_sampling("top_k"),), _no_limit_is_minus_one, note="no limit is -1"),
    OtherName("min_p", (_sampling("min_p"),)),
    OtherName("repetition_penalty", values={1.0: {}}, note="sampling with a penalty is not in this version"),
    OtherName(
        "use_vllm",
        values={
            True: {_sampling("name"): "vllm"},
            False: {},
        },
        note="without it the engine is native, verl's own",
    ),
    OtherName("vllm_mode", values={"colocate": {}}, note="the engine shares the trainer's devices"),
    OtherName("vllm_gpu_memory_utilization", (_sampling("gpu_memory_utilization"),)),
    OtherName("vllm_tensor_parallel_size", (_sampling("tensor_model_parallel_size"),)),
    OtherName("vllm_max_model_length", (_sampling("max_model_len"),)),
    OtherName("vllm_enable_sleep_mode", (_sampling("free_cache_engine"),)),
    OtherName(
        "vllm_importance_sampling_mode",
        values={
            "token_truncate": {f"{_CORRECTION}.rollout_is": "token"},
            "sequence_truncate": {f"{_CORRECTION}.rollout_is": "sequence"},
            "token_mask": {f"{_CORRECTION}.rollout_is": "token", f"{_CORRECTION}.rollout_is_threshold": "0.0_3.0"},
            "sequence_mask": {
                f"{_CORRECTION}.rollout_is": "sequence",
                f"{_CORRECTION}.rollout_is_threshold": "0.0_3.0",
            },
        },
        note="of a mask the bound is the second number, after 0.0_",
    ),
    OtherName("vllm_importance_sampling_clip_max", (f"{_CORRECTION}.rollout_is_threshold",)),
    # agents and adapters
    OtherName("max_tool_calling_iterations", (f"{_MULTI}.max_assistant_turns",)),
    OtherName("tools", (f"{_MULTI}.function_tool_path",), note="verl.train takes the functions themselves: tools=[f]"),
    OtherName(
        "environment_factory",
        (f"{_MULTI}.environment_config_path",),
        note="verl.train takes classes: environments=[Class]",
    ),
    OtherName(
        "peft_config",
        (_of_model("lora_rank"), _of_model("lora_alpha"), _of_model("target_modules")),
        _lora,
        note="the fields of LoraConfig, each by its own key",
    ),
    # arguments of trainers
    OtherName("model", (_of_model("path"),)),
    OtherName("args", note="its fields are separate settings here"),
    OtherName("reward_funcs", ("custom_reward_function.path",), note="verl.train takes the functions: reward=[f, g]"),
    OtherName("reward_weights", note="verl.train takes reward_weights; your own function can weigh differently"),
    OtherName("train_dataset", ("data.train_files",), note="verl.train takes data=rows"),
    OtherName("eval_dataset", ("data.val_files",), note="verl.train takes eval_data=rows"),
    OtherName("processing_class", (_of_model("tokenizer_path"),), note="the path of a tokenizer"),
    # supervised runs
    OtherName("packing", ("model.use_remove_padding",), note="rows are packed without attention across them"),
    OtherName("padding_free", ("model.use_remove_padding",)),
    OtherName("assistant_only_loss", note="the loss is always on the assistant's messages alone"),
    OtherName("completion_only_loss", note="with data.prompt_key and data.response_key it always is on the response"),
    OtherName("dataset_text_field", ("data.messages_key",), note="conversations; plain text is not trained on"),
    OtherName("label_smoothing", ("loss.label_smoothing",)),
    OtherName("precompute_ref_log_probs", note="the reference computes beside the policy; leave it out"),
)
"""``GRPOConfig``, ``SFTConfig`` and ``DPOConfig`` of TRL 1.16, and arguments of the trainers."""


_FLAT: tuple[OtherName, ...] = (
    OtherName("pretrain", (_of_model("path"),)),
    OtherName("critic_pretrain", ("critic.model.path",)),
    OtherName("reward_pretrain", ("reward_model.model.path",), note="with reward_model.enable=true"),
    OtherName("prompt_data", ("data.train_files",)),
    OtherName("eval_dataset", ("data.val_files",)),
    OtherName("dataset", ("data.train_files",)),
    OtherName("input_key", ("data.prompt_key",)),
    OtherName("output_key", ("data.response_key",)),
    OtherName(
        "label_key", note="a row has reward_model={ground_truth: ...}, or a column that the reward function names"
    ),
    OtherName("apply_chat_template", note="always: prompts are lists of messages"),
    OtherName("input_template", note="the chat template of the tokenizer is used; leave it out"),
    OtherName("prompt_max_len", ("data.max_prompt_length rollout.prompt_length",)),
    OtherName("generate_max_len", ("data.max_response_length rollout.response_length",)),
    OtherName("max_len", ("data.max_length",)),
    OtherName("max_samples", ("data.train_max_samples",)),
    OtherName("n_samples_per_prompt", (f"{_ROLLOUT}.n data.n_samples",)),
    OtherName(
        "train_batch_size",
        note=f"samples of an optimizer step: set {_ACTOR}.ppo_mini_batch_size to it divided by the samples per prompt "
        "(of supervised runs data.train_batch_size to it)",
    ),
    OtherName("rollout_batch_size", ("data.train_batch_size",), note="both in prompts"),
    OtherName(
        "micro_train_batch_size",
        (f"{_ACTOR}.ppo_micro_batch_size_per_gpu data.micro_batch_size_per_gpu",),
        note="changes memory and speed, never the loss",
    ),
    OtherName("micro_rollout_batch_size", (f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu",)),
    OtherName("use_dynamic_batch", (f"{_ACTOR}.use_dynamic_bsz data.use_dynamic_bsz",)),
    OtherName("train_max_tokens_per_gpu", (f"{_ACTOR}.ppo_max_token_len_per_gpu data.max_token_len_per_gpu",)),
    OtherName("rollout_max_tokens_per_gpu", (f"{_ROLLOUT}.log_prob_max_token_len_per_gpu",)),
    OtherName("packing_samples", (_of_model("use_remove_padding"),)),
    OtherName("max_epochs", (f"{_ACTOR}.ppo_epochs trainer.total_epochs",)),
    OtherName("num_episodes", ("trainer.total_epochs",)),
    OtherName("actor_learning_rate", (f"{_OPTIM}.lr",)),
    OtherName("critic_learning_rate", ("critic.optim.lr",)),
    OtherName("lr_warmup_ratio", (_optim("lr_warmup_steps_ratio"),)),
    OtherName("l2", (_optim("weight_decay"),)),
    OtherName("adam_betas", (_optim("betas"),)),
    OtherName("max_norm", (f"{_ACTOR}.grad_clip optim.clip_grad",)),
    OtherName(
        "advantage_estimator",
        values={
            "gae": {"algorithm.adv_estimator": "gae"},
            "rloo": {"algorithm.adv_estimator": "rloo"},
            "group_norm": {"algorithm.adv_estimator": "grpo"},
            "reinforce": {"algorithm.adv_estimator": "reinforce_plus_plus"},
            "reinforce_baseline": {"algorithm.adv_estimator": "reinforce_plus_plus_baseline"},
            "dr_grpo": {"algorithm.adv_estimator": "grpo", "algorithm.norm_adv_by_std_in_grpo": False},
        },
    ),
    OtherName("gamma", ("algorithm.gamma",)),
    OtherName("lambd", ("algorithm.lam",)),
    OtherName("eps_clip", (f"{_ACTOR}.clip_ratio",)),
    OtherName("eps_clip_low_high", (f"{_ACTOR}.clip_ratio_low", f"{_ACTOR}.clip_ratio_high"), list),
    OtherName("value_clip", ("critic.cliprange_value",)),
    OtherName("init_kl_coef", ("algorithm.kl_ctrl.kl_coef",), note="with algorithm.use_kl_in_reward=true"),
    OtherName("kl_target", ("algorithm.kl_ctrl.target_kl",), note="with algorithm.kl_ctrl.type=adaptive"),
    OtherName("kl_estimator", (f"{_ACTOR}.kl_loss_type",)),
    OtherName("entropy_loss_coef", (f"{_ACTOR}.entropy_coeff",)),
    OtherName("dynamic_filtering", ("algorithm.filter_groups.enable",)),
    OtherName("enable_vllm_is_correction", note=f"set {_CORRECTION}.rollout_is=token"),
    OtherName("remote_rm_url", ("custom_reward_function.path",), note="a Python file"),
    OtherName("agent_func_path", (f"{_ROLLOUT}.agent.agent_loop_config_path",), note="a list of agent loops"),
    OtherName(
        "vllm_num_engines",
        note=f"as many engines as the ranks allow; set the ranks that share one, {_ROLLOUT}.tensor_model_parallel_size",
    ),
    OtherName("vllm_enable_sleep", (_sampling("free_cache_engine"),)),
    OtherName("enable_prefix_caching", (_sampling("enable_prefix_caching"),)),
    OtherName("enforce_eager", (_sampling("enforce_eager"),)),
    OtherName("colocate_all_models", note="always; leave it out"),
    OtherName("async_train", values={True: {"trainer.async.lag": 1}, False: {"trainer.async.lag": 0}}),
    OtherName("actor_num_nodes", ("trainer.nnodes",)),
    OtherName("actor_num_gpus_per_node", ("trainer.n_gpus_per_node",)),
    OtherName("zero_stage", note="FSDP2 always shards weights, gradients and optimizer; leave it out"),
    OtherName("adam_offload", (f"{_ACTOR}.fsdp_config.optimizer_offload engine.optimizer_offload",)),
    OtherName("ring_attn_size", (f"{_ACTOR}.ulysses_sequence_parallel_size engine.ulysses_sequence_parallel_size",)),
    OtherName("flash_attn", note="the fastest attention that is installed is used; leave it out"),
    OtherName("save_path", ("trainer.default_local_dir",)),
    OtherName("ckpt_path", ("trainer.default_local_dir",)),
    OtherName("max_ckpt_num", ("trainer.max_actor_ckpt_to_keep trainer.max_ckpt_to_keep",)),
    OtherName("save_hf_ckpt", note="add hf_model to save_contents of the checkpoint"),
    OtherName(
        "load_checkpoint", note="a run resumes from its newest checkpoint: trainer.resume_mode=auto, the default"
    ),
    OtherName("use_wandb", note="add wandb to trainer.logger"),
    OtherName("use_tensorboard", note="add tensorboard to trainer.logger"),
)
"""Flags of ``openrlhf.cli.train_ppo_ray`` and ``train_sft``, without dashes, up to 0.10.1."""

_SECTIONS: Mapping[str, str] = {
    "actor": "model_name_or_path=pretrain adam.lr=actor_learning_rate adam.betas=adam_betas adam.weight_decay=l2 "
    "lr_warmup_ratio max_norm eps_clip eps_clip_low_high dual_clip=delta entropy_coef=entropy_loss_coef "
    "gradient_checkpointing_enable=gradient_checkpointing num_nodes=actor_num_nodes "
    "num_gpus_per_node=actor_num_gpus_per_node",
    "critic": "model_name_or_path=critic_pretrain adam.lr=critic_learning_rate value_clip",
    "reward": "model_name_or_path=reward_pretrain remote_url=remote_rm_url",
    "model": "model_name_or_path=pretrain gradient_checkpointing_enable=gradient_checkpointing",
    "adam": "lr=learning_rate betas=adam_betas weight_decay=l2",
    "algo": "advantage.estimator=advantage_estimator advantage.gamma=gamma advantage.lambd=lambd "
    "advantage.is_correction_enable=enable_vllm_is_correction kl.init_coef=init_kl_coef kl.target=kl_target "
    "kl.estimator=kl_estimator dynamic_filtering_enable=dynamic_filtering",
    "data": "prompt_dataset=prompt_data dataset input_key output_key label_key apply_chat_template input_template "
    "max_len max_samples",
    "rollout": "n_samples_per_prompt batch_size=rollout_batch_size micro_batch_size=micro_rollout_batch_size "
    "max_new_tokens=generate_max_len max_tokens_per_gpu=rollout_max_tokens_per_gpu temperature top_p",
    "train": "batch_size=train_batch_size micro_batch_size=micro_train_batch_size max_epochs num_episodes seed "
    "dynamic_batch_enable=use_dynamic_batch max_tokens_per_gpu=train_max_tokens_per_gpu async_enable=async_train "
    "agent_func_path colocate_all=colocate_all_models",
    "vllm": "num_engines=vllm_num_engines enable_sleep=vllm_enable_sleep enable_prefix_caching enforce_eager "
    "gpu_memory_utilization=vllm_gpu_memory_utilization tensor_parallel_size=vllm_tensor_parallel_size",
    "ds": "zero_stage adam_offload packing_samples ring_attn_size attn_implementation=flash_attn",
    "ckpt": "output_dir=save_path path=ckpt_path save_steps max_num=max_ckpt_num save_hf=save_hf_ckpt "
    "load_enable=load_checkpoint",
    "eval": "dataset=eval_dataset steps=eval_steps n_samples_per_prompt=num_generations_eval",
    "logger": "wandb.key=use_wandb wandb.project=project wandb.run_name=run_name tensorboard_dir=use_tensorboard",
}
"""Section of the names since 0.10.2 to the names in it, each with the entry above that has the same meaning."""


def _with_sections() -> Iterable[OtherName]:
    entries = {entry.name: entry for entry in (*TRL, *_FLAT)}
    for section, names in _SECTIONS.items():
        for pair in names.split():
            name, _, flat = pair.partition("=")
            yield replace(entries[flat or name], name=f"{section}.{name}")


OPENRLHF: tuple[OtherName, ...] = (
    *_FLAT,
    *_with_sections(),
    *(
        OtherName(f"ds.lora.{name}", (_of_model(new_name),))
        for name, new_name in (("rank", "lora_rank"), ("alpha", "lora_alpha"))
    ),
    OtherName("ds.lora.target_modules", (_of_model("target_modules"),)),
    OtherName("actor.loss_agg_mode", (_AGGREGATION,)),
    OtherName(
        "actor.policy_loss_type",
        values={"ppo": {f"{_LOSS}.loss_mode": "vanilla"}, "gspo": {f"{_LOSS}.loss_mode": "gspo"}},
    ),
    OtherName(
        "algo.advantage.no_std_norm",
        values={True: {"algorithm.norm_adv_by_std_in_grpo": False}, False: {}},
    ),
    OtherName("algo.kl.use_loss", (f"{_ACTOR}.use_kl_loss",), note=f"the coefficient is {_ACTOR}.kl_loss_coef"),
    OtherName(
        "algo.advantage.is_correction_level",
        values={
            "off": {},
            "token": {f"{_CORRECTION}.rollout_is": "token"},
            "seq": {f"{_CORRECTION}.rollout_rs": "seq_mean_k1"},
        },
        note=f"bounds are {_CORRECTION}.rollout_is_threshold and rollout_rs_threshold",
    ),
)
"""Flags of OpenRLHF without dashes: the flat ones, and those with sections, since 0.10.2."""

LIBRARIES: Mapping[str, tuple[OtherName, ...]] = {"TRL": TRL, "OpenRLHF": OPENRLHF}


def other_name(word: str) -> tuple[str, OtherName] | None:
    """Return the library and the entry of a name, written as there; None if neither has it."""
    name = word.lstrip("-").replace("-", "_")
    for library, names in LIBRARIES.items():
        for entry in names:
            if entry.name == name:
                return library, entry
    return None


def similar_name(word: str) -> str | None:
    """Return the name of another library that a word most likely means.

    >>> similar_name("max_completions_length")
    'max_completion_length'
    """
    names = [entry.name for entries in LIBRARIES.values() for entry in entries]
    return next(iter(difflib.get_close_matches(word, names, n=1, cutoff=0.8)), None)


def lines_about(word: str) -> list[str]:
    """Say what a name of another library is here; nothing of an unknown name.

    >>> lines_about("num_generations")
    ['num_generations of TRL is actor_rollout_ref.rollout.n here']
    >>> lines_about("kl_target")
    ['kl_target of OpenRLHF is algorithm.kl_ctrl.target_kl here (with algorithm.kl_ctrl.type=adaptive)']
    """
    if (match := other_name(word)) is None:
        return []
    library, entry = match
    what, note = f"{entry.name} of {library}", f" ({entry.note})" if entry.note else ""
    if entry.keys:
        return [f"{what} is {' and '.join(key.replace(' ', ' or ') for key in entry.keys)} here{note}"]
    if entry.values is None:
        return [f"{what} has no key here: {entry.note}"]
    return [f"{what} becomes, by its value{note}", *(f"  {value}" for value in entry.values_in_words())]


def remedy_for(word: str, value: object, command_keys: Collection[str]) -> str:
    """Say what to set in place of a name of another library with its value; empty for an unknown name.

    >>> remedy_for("lambd", 0.95, {"algorithm.lam"})
    'lambd of OpenRLHF: set algorithm.lam=0.95'
    """
    if (match := other_name(word)) is None:
        return ""
    library, entry = match
    try:
        settings = entry.settings(value, command_keys, library)
    except ConfigError:
        return f"{entry.name} of {library}: {entry.describe(command_keys) or entry.describe()}"
    note = f" ({entry.note})" if entry.note else ""
    return f"{entry.name} of {library}: {f'set {_pairs(settings)}' if settings else 'leave it out'}{note}"
