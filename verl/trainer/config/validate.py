"""Rules that span keys: checked before any model loads, all of them, every time.

A rule is a generator of problems. Rules of one kind live together: batch sizes here, what must lie
on disk in ``validate_files``, algorithm and run in ``validate_run``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from verl.base_config import BaseConfig
from verl.trainer.config import rollout_correction as correction
from verl.trainer.config import validate_code as code
from verl.trainer.config import validate_data as data_rules
from verl.trainer.config import validate_files as files
from verl.trainer.config import validate_rollout as rollout_rules
from verl.trainer.config import validate_run as run
from verl.trainer.config.evaluation import EvalConfig
from verl.trainer.config.generation import GenerationConfig
from verl.trainer.config.inspection import InspectedDPO, InspectedPPO, InspectedRM, InspectedSFT
from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.preference import DPOConfig, PreferenceConfig, RMConfig
from verl.trainer.config.problems import Problem
from verl.trainer.config.sft import SFTConfig
from verl.trainer.config.validate_run import needs_critic, needs_reference

Problems = Iterator[Problem]


def validate(config: BaseConfig) -> list[Problem]:
    """Everything that is wrong with a typed configuration, in the order of the rules."""
    return [problem for rule in RULES[type(config)] for problem in rule(config)]


def mini_batches(config: PPOConfig) -> Problems:
    """Steps split into equal mini-batches, mini-batches into equal shares of the ranks."""
    ranks, n = run.rank_count(config.trainer), config.actor_rollout_ref.rollout.n
    prompts = config.data.train_batch_size
    sections: list[tuple[str, Any]] = [("actor_rollout_ref.actor", config.actor_rollout_ref.actor)]
    if needs_critic(config) and config.critic.ppo_mini_batch_size != config.actor_rollout_ref.actor.ppo_mini_batch_size:
        sections.append(("critic", config.critic))
    for name, section in sections:
        key, size = f"{name}.ppo_mini_batch_size", section.ppo_mini_batch_size
        if prompts % size:
            yield Problem(
                key,
                size,
                f"it does not divide data.train_batch_size={prompts}; every mini-batch must have the same number "
                "of prompts",
                f"divisors of {prompts}, nearest {_near(size, prompts)}",
            )
        elif (size * n) % ranks:
            yield Problem(
                key,
                size,
                f"with rollout.n={n} a mini-batch has {size * n} responses, which {ranks} ranks cannot share equally",
                _shareable(size, prompts, n, ranks),
                "change the mini-batch, rollout.n or the number of ranks",
            )


def actor_passes(config: PPOConfig) -> Problems:
    """Update passes of actor and critic: by sequences or by tokens, and what fits."""
    sections: list[tuple[str, Any]] = [("actor_rollout_ref.actor", config.actor_rollout_ref.actor)]
    if needs_critic(config):
        sections.append(("critic", config.critic))
    ranks, n = run.rank_count(config.trainer), config.actor_rollout_ref.rollout.n
    for name, section in sections:
        keys = (f"{name}.ppo_micro_batch_size_per_gpu", f"{name}.use_dynamic_bsz", f"{name}.ppo_max_token_len_per_gpu")
        values = (section.ppo_micro_batch_size_per_gpu, section.use_dynamic_bsz, section.ppo_max_token_len_per_gpu)
        yield from _passes(keys, values, _longest(config))
        responses, micro = section.ppo_mini_batch_size * n, values[0]
        if micro is None or section.use_dynamic_bsz or responses % ranks:
            continue
        share = responses // ranks
        if share % micro:
            yield Problem(
                keys[0],
                micro,
                f"it does not divide the {share} responses of a mini-batch on one rank "
                f"({section.ppo_mini_batch_size} prompts × {n} responses ÷ {ranks} ranks)",
                f"divisors of {share}, nearest {_near(micro, share)}",
                f"or set {name}.use_dynamic_bsz=true, which fills passes by tokens",
            )


def other_passes(config: PPOConfig) -> Problems:
    """Forward passes for log-probs, values and scores."""
    longest = _longest(config)
    roles = config.actor_rollout_ref
    sections: list[tuple[str, Any]] = [("actor_rollout_ref.rollout", roles.rollout)]
    if needs_reference(config):
        sections.append(("actor_rollout_ref.ref", roles.ref))
    for name, section in sections:
        names = ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz", "log_prob_max_token_len_per_gpu")
        yield from _passes([f"{name}.{key}" for key in names], [getattr(section, key) for key in names], longest)
    if config.reward_model.enable:
        names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "forward_max_token_len_per_gpu")
        values = [getattr(config.reward_model, key) for key in names]
        yield from _passes([f"reward_model.{key}" for key in names], values, longest)
    critic = config.critic
    if needs_critic(config) and critic.use_dynamic_bsz and critic.forward_max_token_len_per_gpu < longest:
        yield _too_few_tokens("critic.forward_max_token_len_per_gpu", critic.forward_max_token_len_per_gpu, longest)


def lengths(config: PPOConfig) -> Problems:
    """The rollout engine and the data agree on lengths."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    for key, engine, limit in (
        ("prompt_length", rollout.prompt_length, data.max_prompt_length),
        ("response_length", rollout.response_length, data.max_response_length),
    ):
        if engine != limit:
            wrong = f"it differs from data.max_{key}={limit}"
            remedy = f"set data.max_{key} and leave this one to follow it"
            yield Problem(f"actor_rollout_ref.rollout.{key}", engine, wrong, remedy=remedy)
    if rollout.max_model_len is not None and rollout.max_model_len < _longest(config):
        yield _too_few_tokens("actor_rollout_ref.rollout.max_model_len", rollout.max_model_len, _longest(config))
    asked = rollout.val_kwargs.max_tokens
    if asked is not None and asked > rollout.response_length:
        wrong = f"it is longer than data.max_response_length={rollout.response_length}"
        yield Problem(
            "actor_rollout_ref.rollout.val_kwargs.max_tokens", asked, wrong, f"1 to {rollout.response_length}"
        )


def sft_batches(config: SFTConfig) -> Problems:
    """Batches that the ranks share equally, passes that fit."""
    data, ranks = config.data, run.rank_count(config.trainer)
    if data.train_batch_size % ranks:
        wrong = f"{ranks} ranks cannot share it equally"
        yield Problem("data.train_batch_size", data.train_batch_size, wrong, f"multiples of {ranks}")
        return
    keys = ("data.micro_batch_size_per_gpu", "data.use_dynamic_bsz", "data.max_token_len_per_gpu")
    yield from _passes(keys, [getattr(data, key.removeprefix("data.")) for key in keys], data.max_length)
    share, micro = data.train_batch_size // ranks, data.micro_batch_size_per_gpu
    if not data.use_dynamic_bsz and micro is not None and share % micro:
        yield Problem(
            keys[0],
            micro,
            f"it does not divide the {share} sequences of a batch on one rank",
            f"divisors of {share}, nearest {_near(micro, share)}",
            "or set data.use_dynamic_bsz=true, which fills passes by tokens",
        )


def preference_batches(config: PreferenceConfig) -> Problems:
    """Batches of pairs that the ranks share equally, passes that fit a pair."""
    data, ranks = config.data, run.rank_count(config.trainer)
    if data.train_batch_size % ranks:
        wrong = f"{ranks} ranks cannot share these pairs equally"
        yield Problem("data.train_batch_size", data.train_batch_size, wrong, f"multiples of {ranks}")
    names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    # Both sides of a pair are in one pass.
    yield from _passes([f"data.{name}" for name in names], [data[name] for name in names], 2 * data.max_length)


def preference_loss(config: DPOConfig) -> Problems:
    """Settings of the loss that exclude each other."""
    loss = config.loss
    if loss.label_smoothing and loss.loss_type != "sigmoid":
        wrong = f"loss.loss_type={loss.loss_type} has no label smoothing"
        remedy = "set loss.loss_type=sigmoid, or this to 0"
        yield Problem("loss.label_smoothing", loss.label_smoothing, wrong, "0", remedy)
    if loss.average_log_prob and loss.loss_type == "ipo":
        wrong = "IPO is defined on whole responses"
        yield Problem("loss.average_log_prob", True, wrong, "false", "set it to false, or loss.loss_type=sigmoid")
    if loss.reference_free and config.ref.path is not None:
        wrong = "no reference is read with loss.reference_free=true"
        yield Problem("ref.path", config.ref.path, wrong, "null", "leave it null, or set loss.reference_free=false")


def sft_columns(config: SFTConfig) -> Problems:
    """A single prompt needs a single response."""
    data = config.data
    if (data.prompt_key is None) != (data.response_key is None):
        given, absent = ("prompt_key", "response_key") if data.response_key is None else ("response_key", "prompt_key")
        remedy = f"set data.{absent} too, or neither of them to read conversations from data.messages_key"
        yield Problem(f"data.{given}", data[given], f"data.{absent} is not set", remedy=remedy)


def _passes(keys: Any, values: Any, longest: int) -> Problems:
    """One kind of pass: ``keys`` and ``values`` of micro-batch size, switch and token budget."""
    micro, dynamic, budget = values
    if dynamic and budget < longest:
        yield _too_few_tokens(keys[2], budget, longest)
    if not dynamic and micro is None:
        remedy = f"set it to the sequences of one pass on one rank, or set {keys[1]}=true to fill passes by tokens"
        yield Problem(keys[0], None, f"it must be set while {keys[1]}=false", "an integer >= 1", remedy)


def _too_few_tokens(key: str, budget: int, longest: int) -> Problem:
    wrong = f"the longest sequence has {longest} tokens and must fit"
    return Problem(key, budget, wrong, f"at least {longest}", f"set {key}={longest} or more, or shorten the sequences")


def _longest(config: PPOConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _near(size: int, whole: int) -> str:
    """The divisors of ``whole`` around ``size``: "64 and 128"."""
    below = next((d for d in range(min(size, whole), 0, -1) if whole % d == 0), None)
    above = next((d for d in range(size, whole + 1) if whole % d == 0), None)
    return " and ".join(dict.fromkeys(str(d) for d in (below, above) if d is not None))


def _shareable(size: int, prompts: int, n: int, ranks: int) -> str:
    good = [d for d in range(1, prompts + 1) if prompts % d == 0 and (d * n) % ranks == 0]
    near = sorted(sorted(good, key=lambda d: abs(d - size))[:2])
    return f"divisors d of {prompts} for which {ranks} divides d·{n}" + (
        f", nearest {' and '.join(map(str, near))}" if near else "; there is none, change data.train_batch_size"
    )


_PREFERENCE: tuple[Callable[[Any], Problems], ...] = (
    files.data_files,
    files.models,
    files.own_code,
    files.output_folders,
    preference_batches,
    run.engines,
    run.resuming,
    run.names,
    run.trackers,
    run.controller,
)

RULES: dict[type[BaseConfig], tuple[Callable[[Any], Problems], ...]] = {
    PPOConfig: (
        files.data_files,
        files.models,
        files.own_code,
        files.output_folders,
        mini_batches,
        actor_passes,
        other_passes,
        lengths,
        data_rules.order_of_rows,
        data_rules.growing_data,
        run.engines,
        run.estimator,
        run.dynamic_sampling,
        run.losses,
        run.sampling,
        rollout_rules.other_programs,
        correction.rollout_correction,
        correction.truncated_sampling,
        run.rewards,
        code.code_rewards,
        run.schedule,
        run.resuming,
        run.names,
        run.trackers,
        run.controller,
    ),
    SFTConfig: (
        files.data_files,
        files.models,
        files.own_code,
        files.output_folders,
        sft_batches,
        sft_columns,
        run.engines,
        run.resuming,
        run.names,
        run.trackers,
        run.controller,
    ),
    RMConfig: _PREFERENCE,
    DPOConfig: (*_PREFERENCE, preference_loss, files.reference),
    InspectedPPO: (
        files.data_files,
        files.tokenizer,
        files.own_code,
        data_rules.order_of_rows,
        data_rules.growing_data,
    ),
    InspectedSFT: (files.data_files, files.tokenizer, files.own_code, sft_columns),
    InspectedRM: (files.data_files, files.tokenizer, files.own_code),
    InspectedDPO: (files.data_files, files.tokenizer, files.own_code),
    GenerationConfig: (
        files.generation_files,
        files.models,
        run.engine_sampling,
        rollout_rules.other_programs,
        run.controller,
    ),
    EvalConfig: (files.evaluation_files, files.own_code),
}
"""Which rules hold for which entry point."""
