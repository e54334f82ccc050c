"""Rules that involve several sections, all checked before any model loads, and before PyTorch is imported.

A rule is a generator of problems. Rules of one section are in its class (``BaseConfig.problems``); rules about
files on disk are in :mod:`verl.trainer.config.rules_files`, those that ask a registry of algorithms, rewards or
samplers in :mod:`verl.trainer.config.rules_algorithms`.
"""

from __future__ import annotations

import importlib.util
import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from verl.base.requirements import install_command
from verl.config import (
    BaseConfig,
    DPOConfig,
    EvalConfig,
    FSDPEngineConfig,
    GenerationConfig,
    PPOConfig,
    Problem,
    RMConfig,
    ServeConfig,
    SFTConfig,
    SupervisedConfig,
)
from verl.config.agent import SINGLE_TURN
from verl.config.base import config_fields, named_section_of
from verl.config.model import FP16
from verl.config.rollout import IN_PROCESS_ENGINES
from verl.trainer.config import rules_engines as rollouts
from verl.trainer.config import rules_files as files
from verl.trainer.config import rules_megatron as megatron
from verl.trainer.config import rules_prediction as prediction
from verl.trainer.config import rules_sizes as sizes
from verl.trainer.config import rules_tensor_parallel as tensor_parallel
from verl.trainer.config import rules_veomni as veomni
from verl.trainer.config import rules_vision as vision
from verl.trainer.config.rules_asynchronous import asynchronous
from verl.trainer.config.rules_sizes import needs_critic, profilers
from verl.trainer.roles import need_reference_policy
from verl.utils.model_facts import model_files

Problems = Iterator[Problem]

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def broken_rules(config: Any, data_only: bool = False, reads_data: bool = True) -> list[Problem]:
    """Return the problems of a typed configuration, of an entry point or of one section, but for its algorithms.

    ``data_only`` checks data and tokenizer; without ``reads_data`` files of data need not exist.
    """
    if data_only:
        rules: tuple[Callable[[Any], Problems], ...] = (files.data_files, files.tokenizer, files.own_code)
        sections = section_problems(config["data"], "data")
    else:
        # A section by itself has no rules that involve others.
        rules, sections = RULES.get(type(config), ()), section_problems(config)
    if not reads_data:
        rules = tuple(rule for rule in rules if rule not in (files.data_files, files.validation_files))
    return [*(problem for rule in rules for problem in rule(config)), *sections]


def section_problems(section: BaseConfig, path: str = "") -> Problems:
    """Yield the problems of a section's own fields and of all its subsections."""
    yield from section.problems(path)
    for name, value in section.items():
        if isinstance(value, BaseConfig):
            yield from section_problems(value, f"{path}.{name}".lstrip("."))
        elif named_section_of(config_fields(type(section))[name]) is not None:
            for own_name, item in value.items():
                yield from section_problems(item, f"{path}.{name}.{own_name}".lstrip("."))


def router_replay(config: PPOConfig) -> Problems:
    """Something records the choice of experts that is to be replayed, and what is recorded is replayed."""
    actor, rollout = config.actor_rollout_ref.actor, config.actor_rollout_ref.rollout
    mode, key = actor.router_replay.mode, f"{ACTOR}.router_replay.mode"
    records_key = f"{ROLLOUT}.enable_rollout_routing_replay"
    if mode != "R3" and rollout.enable_rollout_routing_replay:
        remedy = f"set {key}=R3, which replays it in training"
        yield Problem(records_key, True, f"nothing reads what the rollout records with {key}={mode}", "false", remedy)
    if mode == "disabled":
        return
    if mode != "R3":
        return
    if not rollout.enable_rollout_routing_replay:
        yield Problem(records_key, False, f"{key}=R3 replays the choice of the rollout, which must record it", "true")
    if rollout.name not in IN_PROCESS_ENGINES:
        cause = f"{ROLLOUT}.name={rollout.name} does not return the experts that it chose"
        yield Problem(
            key, mode, cause, "disabled, R2", f"or set {ROLLOUT}.name to one of {', '.join(IN_PROCESS_ENGINES)}"
        )


def dynamic_sampling(config: PPOConfig) -> Problems:
    """Dynamic sampling has a metric to compare, several responses per prompt, and scores in time."""
    filtering, data, key = config.algorithm.filter_groups, config.data, "algorithm.filter_groups.metric"
    if not filtering.enable:
        if data.gen_batch_size not in (None, data.train_batch_size):
            cause = "more prompts than a step trains on are only sampled with dynamic sampling"
            remedy = "leave it null, or set algorithm.filter_groups.enable=true"
            yield Problem("data.gen_batch_size", data.gen_batch_size, cause, remedy=remedy)
        return
    if filtering.metric is None:
        remedy = f"set {key}=seq_reward, or acc if the reward function returns it"
        yield Problem(key, None, "dynamic sampling must know what has to differ", remedy=remedy)
    if filtering.metric == "seq_final_reward" and config.algorithm.use_kl_in_reward:
        cause = "with algorithm.use_kl_in_reward=true all final rewards differ, and nothing is filtered"
        yield Problem(key, filtering.metric, cause, "seq_reward, score, acc", f"set {key}=seq_reward")
    if config.reward_model.launch_reward_fn_async:
        cause = "dynamic sampling needs the scores before it goes on"
        yield Problem("reward_model.launch_reward_fn_async", True, cause, "false")
    n = config.actor_rollout_ref.rollout.n
    if n == 1:
        cause = "dynamic sampling compares the responses of one prompt, and there is one"
        yield Problem("actor_rollout_ref.rollout.n", n, cause, "at least 2")


# ---- rewards, data, placement ----------------------------------------------------------------------


def judge(config: PPOConfig) -> Problems:
    """The engine of a generative reward model can serve it, and has ranks that are free while rewards are computed."""
    served, model = config.judge, config.reward_model
    if served is None:
        return
    yield from served.rollout.problems("reward_model.rollout")
    if lacking := [name for name in ("openai", "starlette", "uvicorn") if importlib.util.find_spec(name) is None]:
        cause = f"the endpoint of a judge needs {', '.join(lacking)}, which is not installed"
        yield Problem("reward_model.rollout.name", served.rollout.name, cause, remedy=install_command("judge"))
    if model.launch_reward_fn_async and not model.enable_resource_pool:
        cause = "the judge and the policy, which computes log-probs meanwhile, share their ranks"
        remedy = "set it to false, or reward_model.enable_resource_pool=true"
        yield Problem("reward_model.launch_reward_fn_async", True, cause, "false", remedy)
    if model.reward_format == "llm_judge" and (base_url := model.scorer_kwargs.get("base_url")):
        cause = f"reward_model.rollout.name={served.rollout.name} serves a judge in this run, and this one is asked"
        remedy = "leave it out to ask the judge of the run, or set reward_model.enable=false"
        yield Problem("reward_model.scorer_kwargs.base_url", base_url, cause, remedy=remedy)
    if model.reward_format == "llm_judge" and model.scorer_kwargs.get("read") == "yes_probability":
        cause = "the judge of the run gives no probabilities of tokens that it did not draw"
        yield Problem("reward_model.scorer_kwargs.read", "yes_probability", cause, "regex, json")
    needed = served.rollout.prompt_length + served.rollout.response_length
    allowed = served.rollout.max_model_len
    if allowed is not None and allowed < needed:
        cause = f"reward_model.rollout.prompt_length + response_length is {needed}"
        yield Problem("reward_model.rollout.max_model_len", allowed, cause, f"null, or >= {needed}")


def rollout_pool(config: PPOConfig) -> Problems:
    """A pool of rollout engines has processes of its own."""
    if not config.actor_rollout_ref.hybrid_engine and config.trainer.controller == "local":
        cause = "trainer.controller=local runs one rank in this process, and a pool of rollout engines needs others"
        remedy = "set trainer.controller=ray, or leave it true"
        yield Problem("actor_rollout_ref.hybrid_engine", False, cause, "true", remedy)


def critic_warmup(config: PPOConfig) -> Problems:
    """Only a critic can be warmed up."""
    steps = config.trainer.critic_warmup
    if steps > 0 and not needs_critic(config):
        cause = f"there is no critic to warm up (algorithm.adv_estimator={config.algorithm.adv_estimator})"
        yield Problem("trainer.critic_warmup", steps, cause, "0", "set it to 0, or critic.enable=true")


def engines(config: PPOConfig | SupervisedConfig) -> Problems:
    """Groups of ranks divide the ranks, their sequences the heads of the model; fp16 stores nothing that is trained."""
    policy = config.actor_rollout_ref.model if isinstance(config, PPOConfig) else config.model
    policy_placement = policy.path, config.trainer.ranks
    sections: dict[str, tuple[FSDPEngineConfig, str, int]] = {}
    if isinstance(config, PPOConfig):
        roles, model = config.actor_rollout_ref, config.reward_model
        sections["actor_rollout_ref.actor.fsdp_config"] = (roles.actor.fsdp_config, *policy_placement)
        if need_reference_policy(config):
            sections["actor_rollout_ref.ref.fsdp_config"] = (roles.ref.fsdp_config, *policy_placement)
        if needs_critic(config):
            critic = config.critic.model
            sections["critic.model.fsdp_config"] = (critic.fsdp_config, critic.path, config.trainer.ranks)
        if model.enable and config.judge is None:
            ranks = model.nnodes * model.n_gpus_per_node if model.enable_resource_pool else config.trainer.ranks
            sections["reward_model.model.fsdp_config"] = (model.model.fsdp_config, model.model.path, ranks)
    else:
        sections["engine"] = (config.engine, *policy_placement)
    problems: list[Problem] = []
    for name, (engine, path, ranks) in sections.items():
        if engine.strategy == "megatron":  # see rules_megatron
            continue
        problems += _held_by_fsdp(name, engine, path, ranks)
        if not engine.forward_only and not name.startswith("reward_model"):
            problems += _trained_formats(name, engine)
    yield from problems
    causes = {problem.cause for problem in problems}
    for name, engine, path, ranks in _further_models(config):
        for problem in _held_by_fsdp(name, engine, path, ranks) if engine.strategy != "megatron" else ():
            if problem.cause not in causes:
                yield replace(problem, cause=f"{problem.cause}, in {path}")


def _trained_formats(name: str, engine: FSDPEngineConfig) -> Problems:
    """Check the formats of weights that are trained, and of their gradients."""
    if engine.model_dtype in FP16:
        cause = "small updates of weights that are stored in fp16 are lost; dtype=fp16 only computes in it"
        yield Problem(f"{name}.model_dtype", engine.model_dtype, cause, "fp32")
    precision = engine.mixed_precision
    if precision is not None and precision.reduce_dtype in FP16:
        cause = "sums of scaled gradients overflow in fp16"
        yield Problem(f"{name}.mixed_precision.reduce_dtype", precision.reduce_dtype, cause, "fp32")


def _further_models(config: PPOConfig | SupervisedConfig) -> Iterator[tuple[str, FSDPEngineConfig, str, int]]:
    """Yield teachers and references with the section that places another model too: its key, it, folder and ranks."""
    if isinstance(config, SupervisedConfig):
        paths = [
            config.distillation.model_path if isinstance(config, SFTConfig) else None,
            config.ref.path if isinstance(config, DPOConfig) else None,
        ]
        yield from (("engine", config.engine, path, config.trainer.ranks) for path in paths if path is not None)
        return
    section, engine = "actor_rollout_ref.ref.fsdp_config", config.actor_rollout_ref.ref.fsdp_config
    for teacher in config.distillation.teachers.values() if config.distillation.enabled else ():
        if teacher.model_path is not None and teacher.inference.is_forward_pass:
            yield section, engine, teacher.model_path, config.distillation.ranks or config.trainer.ranks


def _held_by_fsdp(name: str, engine: FSDPEngineConfig, path: str, ranks: int) -> Problems:
    """Check that ``ranks`` ranks can hold the model in ``path`` as the section ``name`` says."""
    if engine.strategy == "veomni":
        yield from veomni.model(name, engine, path)
    yield from _groups_of_ranks(name, engine, path, ranks)
    yield from tensor_parallel.divided_matrices(name, engine, path, ranks)


def _groups_of_ranks(name: str, engine: FSDPEngineConfig, path: str, ranks: int) -> Problems:
    """Check the groups of ranks that share weights, or sequences, of the model in ``path``."""
    size, shared_by = engine.fsdp_size, engine.ulysses_sequence_parallel_size
    tensor = engine.tensor_parallel_size
    groups = ranks // tensor
    if size == 0 or (0 < size < groups and groups % size):
        who = f"{ranks} ranks" if tensor == 1 else f"{groups} groups of tensor_parallel_size={tensor} ranks"
        yield Problem(f"{name}.fsdp_size", size, f"it does not divide {who}", f"divisors of {groups}, or -1")
    key, heads = f"{name}.ulysses_sequence_parallel_size", model_files.attention_heads(Path(path).expanduser())
    if ranks % shared_by:
        cause = f"so many ranks share each sequence, and it does not divide {ranks} ranks"
        yield Problem(key, shared_by, cause, f"divisors of {ranks}")
    elif heads is not None and heads % shared_by:
        cause = f"each rank computes equally many of the model's {heads} attention heads"
        yield Problem(key, shared_by, cause, f"divisors of {math.gcd(heads, ranks)}")


def agent_loops(config: PPOConfig) -> Problems:
    """Agent loops get the messages of the prompt, and a loss of what an environment writes has an environment."""
    loop = config.actor_rollout_ref.rollout.default_agent_loop
    if loop == SINGLE_TURN and config.actor_rollout_ref.actor.use_echo_loss:
        cause = (
            f"rows whose agent_name is not set are answered by rollout.agent.default_agent_loop={SINGLE_TURN}, in "
            "whose responses the policy wrote every token: actor/echo_loss is 0 for them"
        )
        remedy = "set rollout.multi_turn.enable=true for tools, or name another agent loop"
        yield Problem(f"{ACTOR}.use_echo_loss", True, cause, remedy=remedy, advice=True)
    rollout = config.actor_rollout_ref.rollout
    if config.actor_rollout_ref.actor.use_echo_loss and rollout.do_sample and rollout.temperature != 1:
        cause = "the cross entropy of ECHO is that of the distribution which is sampled, and text has temperature 1"
        key = "actor_rollout_ref.rollout.temperature"
        yield Problem(key, rollout.temperature, cause, "1", "or accept what a scaled distribution learns", advice=True)
    if loop != SINGLE_TURN and not config.data.return_raw_chat:
        cause = f"the agent loop {loop} answers prompts by their messages"
        yield Problem("data.return_raw_chat", False, cause, "true")


def one_response(config: GenerationConfig) -> Problems:
    """A prompt gets one response each, from the model and without tools."""
    rollout = config.rollout
    if rollout.skip_rollout:
        yield Problem(
            "rollout.skip_rollout", True, "main_generation has no step whose responses it could keep", "false"
        )
    if rollout.keep_sampling_mask:
        yield Problem("rollout.keep_sampling_mask", True, "main_generation does not train", "false")
    if rollout.default_agent_loop != SINGLE_TURN:
        cause = "main_generation answers each prompt by one response"
        key = "rollout.multi_turn.enable" if rollout.multi_turn.enable else "rollout.agent.default_agent_loop"
        remedy = "leave it out; validation (trainer.val_only=true) answers by agent loops"
        yield Problem(key, rollout.default_agent_loop, cause, SINGLE_TURN, remedy)


_SUPERVISED = (
    files.data_files,
    files.models,
    files.own_code,
    files.output_folders,
    engines,
    tensor_parallel.beside_divided_matrices,
    megatron.models,
    prediction.heads,
)

RULES: dict[type[BaseConfig], tuple[Callable[[Any], Problems], ...]] = {
    PPOConfig: (
        files.data_files,
        files.validation_files,
        files.models,
        files.own_code,
        files.output_folders,
        sizes.mini_batches,
        sizes.actor_passes,
        sizes.other_passes,
        sizes.token_budgets,
        sizes.lengths,
        engines,
        tensor_parallel.beside_divided_matrices,
        veomni.one_kernel,
        megatron.models,
        prediction.heads,
        vision.models_with_images,
        dynamic_sampling,
        router_replay,
        rollout_pool,
        rollouts.context,
        rollouts.parallel_sizes,
        rollouts.quantization,
        rollouts.speed,
        agent_loops,
        asynchronous,
        judge,
        critic_warmup,
        profilers,
    ),
    SFTConfig: (*_SUPERVISED, sizes.sft_batches),
    RMConfig: (*_SUPERVISED, sizes.preference_batches),
    DPOConfig: (*_SUPERVISED, sizes.preference_batches, files.reference),
    GenerationConfig: (
        files.generation_files,
        files.models,
        rollouts.context,
        rollouts.parallel_sizes,
        rollouts.quantization,
        rollouts.speed,
        prediction.heads,
        one_response,
    ),
    EvalConfig: (files.evaluation_files, files.own_code),
    ServeConfig: (files.models,),
}
"""Root section → the rules of its entry point."""
