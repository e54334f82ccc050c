"""Rules about sizes: ranks share batches equally, passes hold the longest sequence, lengths agree."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from verl.config import (
    ActorConfig,
    CriticConfig,
    DataConfig,
    PPOConfig,
    PreferenceConfig,
    Problem,
    RoleProfilerConfig,
    SFTConfig,
)
from verl.config.base import defaults_of
from verl.errors import ConfigError
from verl.trainer.config.sizes import resolve_device
from verl.trainer.roles import need_critic, need_reference_policy

Problems = Iterator[Problem]

_ULYSSES = "ulysses_sequence_parallel_size"
_TOOL = "global_profiler.tool"


def needs_critic(config: PPOConfig) -> bool:
    """Return whether a critic is trained; false for an unknown estimator, which another rule reports."""
    try:
        return need_critic(config)
    except ConfigError:
        return False


def data_parallel_size(ranks: int, shared_by: int) -> int:
    """Number of equal shares of a batch, where so many ranks get the same rows."""
    return max(1, ranks // shared_by)


def _sharers(ranks: int, shared_by: int, section: Any) -> str:
    """Describe who shares a batch; ``section`` has the model's ``strategy``."""
    if shared_by == 1:
        return f"{ranks} ranks"
    why = _ULYSSES if section.ulysses_sequence_parallel_size > 1 else "fsdp_config.tensor_parallel_size"
    why = "the sizes of megatron" if section.strategy == "megatron" else why
    return f"{data_parallel_size(ranks, shared_by)} groups of {shared_by} ranks ({why})"


def mini_batches(config: PPOConfig) -> Problems:
    """A step splits into equal mini-batches, and a mini-batch into equal shares for the ranks."""
    n = config.actor_rollout_ref.rollout.n
    prompts = config.data.train_batch_size
    actor, critic = config.actor_rollout_ref.actor, config.critic
    sections: list[tuple[str, Any]] = [("actor_rollout_ref.actor", actor)]
    is_other = (critic.ppo_mini_batch_size, critic.shared_by) != (actor.ppo_mini_batch_size, actor.shared_by)
    if needs_critic(config) and is_other:
        sections.append(("critic", critic))
    for name, section in sections:
        key, size = f"{name}.ppo_mini_batch_size", section.ppo_mini_batch_size
        ranks, shared_by = config.trainer.ranks, section.shared_by
        parts = data_parallel_size(ranks, shared_by)
        if prompts % size:
            yield Problem(
                key,
                size,
                f"it does not divide data.train_batch_size={prompts}; every mini-batch must have the same number "
                "of prompts",
                f"divisors of {prompts}, nearest {_near(size, prompts)}",
            )
        elif (size * n) % parts:
            who = _sharers(ranks, shared_by, section)
            yield Problem(
                key,
                size,
                f"with rollout.n={n} a mini-batch has {size * n} responses, which {who} cannot share equally",
                _shareable(size, prompts, n, parts),
                "change the mini-batch, rollout.n or the number of ranks",
            )


def actor_passes(config: PPOConfig) -> Problems:
    """The micro-batches of the updates of actor and critic are set, and divide a rank's share."""
    sections: list[tuple[str, Any]] = [("actor_rollout_ref.actor", config.actor_rollout_ref.actor)]
    if needs_critic(config):
        sections.append(("critic", config.critic))
    ranks, n = config.trainer.ranks, config.actor_rollout_ref.rollout.n
    for name, section in sections:
        keys = (f"{name}.ppo_micro_batch_size_per_gpu", f"{name}.use_dynamic_bsz", f"{name}.ppo_max_token_len_per_gpu")
        values = (section.ppo_micro_batch_size_per_gpu, section.use_dynamic_bsz, section.ppo_max_token_len_per_gpu)
        shared_by = section.shared_by
        yield from _size_of_passes(keys, values)
        responses, micro, parts = section.ppo_mini_batch_size * n, values[0], data_parallel_size(ranks, shared_by)
        if micro is None or section.use_dynamic_bsz or responses % parts:
            continue
        share = responses // parts
        if share % micro:
            yield Problem(
                keys[0],
                micro,
                f"it does not divide the {share} responses of a mini-batch on one rank "
                f"({section.ppo_mini_batch_size} prompts × {n} responses ÷ {_sharers(ranks, shared_by, section)})",
                f"divisors of {share}, nearest {_near(micro, share)}",
                f"or set {name}.use_dynamic_bsz=true, which fills passes by tokens",
            )


def other_passes(config: PPOConfig) -> Problems:
    """The micro-batches of passes for log-probs and scores are set."""
    roles, reward = config.actor_rollout_ref, config.reward_model
    sections: list[tuple[str, Any]] = [("actor_rollout_ref.rollout", roles.rollout)]
    if need_reference_policy(config):
        sections.append(("actor_rollout_ref.ref", roles.ref))
    for name, section in sections:
        keys = [f"{name}.{key}" for key in ("log_prob_micro_batch_size_per_gpu", "log_prob_use_dynamic_bsz")]
        values = section.log_prob_micro_batch_size_per_gpu, section.log_prob_use_dynamic_bsz
        yield from _size_of_passes(keys, values)
    if reward.enable:
        keys = ["reward_model.micro_batch_size_per_gpu", "reward_model.use_dynamic_bsz"]
        yield from _size_of_passes(keys, (reward.micro_batch_size_per_gpu, reward.use_dynamic_bsz))


def token_budgets(config: PPOConfig) -> Problems:
    """The budgets of passes that are filled by tokens hold the longest sequence.

    If the lengths of the data were set and no budget was, one problem names the length.
    """
    longest, data = _longest(config), config.data
    small = [budget for budget in _budgets(config) if budget.tokens * budget.shared_by < longest]
    sources = [budget for budget in small if budget.follows not in {follower.key for follower in small}]
    usual = defaults_of(DataConfig)
    lengths = {f"data.{name}": (data[name], usual[name]) for name in ("max_response_length", "max_prompt_length")}
    if (
        not small
        or all(value == default for value, default in lengths.values())
        or any(budget.was_set for budget in small)
    ):
        yield from (_too_few_tokens(budget.key, budget.tokens, longest, budget.shared_by) for budget in sources)
        return
    key, second_key = sorted(lengths, key=lambda name: lengths[name][0], reverse=True)
    least = min(budget.tokens * budget.shared_by for budget in small)
    cause = (
        f"with {second_key}={lengths[second_key][0]} a sequence has up to {longest} tokens, and passes of "
        f"{', '.join(f'{budget.key}={budget.tokens}' for budget in sources)} cannot hold it"
    )
    larger = " ".join(f"{budget.key}={-(-longest // budget.shared_by)}" for budget in sources)
    fits = least - lengths[second_key][0]
    lower = f"lower it to {fits} or less, or " if fits > 0 else ""
    yield Problem(key, lengths[key][0], cause, remedy=f"{lower}set {larger}")


class _Budget(NamedTuple):
    key: str
    tokens: int
    shared_by: int
    """Ranks that share the tokens of a pass."""
    default: int
    follows: str = ""
    """Key whose value it has, unless it was set."""

    @property
    def was_set(self) -> bool:
        return self.tokens != self.default


def _budgets(config: PPOConfig) -> Iterator[_Budget]:
    """Yield the token budgets of the passes that are filled by tokens."""
    roles, critic, reward = config.actor_rollout_ref, config.critic, config.reward_model
    actor: object = roles.actor
    actor_key, usual = "actor_rollout_ref.actor.ppo_max_token_len_per_gpu", defaults_of(ActorConfig)
    most, shared_by = usual.ppo_max_token_len_per_gpu, actor.ulysses_sequence_parallel_size
    if actor.use_dynamic_bsz:
        yield _Budget(actor_key, actor.ppo_max_token_len_per_gpu, shared_by, most)
    for name, section in (("rollout", roles.rollout), ("ref", roles.ref)):
        if section.log_prob_use_dynamic_bsz and (name == "rollout" or need_reference_policy(config)):
            sharers = shared_by if name == "rollout" else roles.ref.ulysses_sequence_parallel_size
            tokens = section.log_prob_max_token_len_per_gpu
            follows = actor_key if tokens == actor.ppo_max_token_len_per_gpu else ""
            key = f"actor_rollout_ref.{name}.log_prob_max_token_len_per_gpu"
            yield _Budget(key, tokens, sharers, most, follows)
    most = defaults_of(CriticConfig).ppo_max_token_len_per_gpu
    critic_key = "critic.ppo_max_token_len_per_gpu"
    if needs_critic(config) and critic.use_dynamic_bsz:
        sharers = critic.ulysses_sequence_parallel_size
        yield _Budget(critic_key, critic.ppo_max_token_len_per_gpu, sharers, most)
        tokens = critic.forward_max_token_len_per_gpu
        follows = critic_key if tokens == critic.ppo_max_token_len_per_gpu else ""
        yield _Budget("critic.forward_max_token_len_per_gpu", tokens, sharers, most, follows)
    if reward.enable and reward.use_dynamic_bsz:
        tokens = reward.forward_max_token_len_per_gpu
        follows = critic_key if tokens == critic.ppo_max_token_len_per_gpu else ""
        key = "reward_model.forward_max_token_len_per_gpu"
        yield _Budget(key, tokens, reward.ulysses_sequence_parallel_size, most, follows)


def lengths(config: PPOConfig) -> Problems:
    """The rollout engine and the data agree on lengths."""
    rollout, data = config.actor_rollout_ref.rollout, config.data
    for key, engine, limit in (
        ("prompt_length", rollout.prompt_length, data.max_prompt_length),
        ("response_length", rollout.response_length, data.max_response_length),
    ):
        if engine != limit:
            cause = f"it differs from data.max_{key}={limit}"
            remedy = f"set data.max_{key} and leave this one to follow it"
            yield Problem(f"actor_rollout_ref.rollout.{key}", engine, cause, remedy=remedy)
    if rollout.max_model_len is not None and rollout.max_model_len < _longest(config):
        yield _too_few_tokens("actor_rollout_ref.rollout.max_model_len", rollout.max_model_len, _longest(config))
    max_tokens = rollout.val_kwargs.max_tokens
    if max_tokens is not None and max_tokens > rollout.response_length:
        cause = f"it is longer than data.max_response_length={rollout.response_length}"
        yield Problem(
            "actor_rollout_ref.rollout.val_kwargs.max_tokens", max_tokens, cause, f"1 to {rollout.response_length}"
        )


def sft_batches(config: SFTConfig) -> Problems:
    """The ranks share a batch equally, and micro-batches divide a rank's share and hold the longest sequence."""
    data, ranks, shared_by = config.data, config.trainer.ranks, config.shared_by
    parts = data_parallel_size(ranks, shared_by)
    if data.train_batch_size % parts:
        cause = f"{_sharers(ranks, shared_by, config.engine)} cannot share it equally"
        yield Problem("data.train_batch_size", data.train_batch_size, cause, f"multiples of {parts}")
        return
    keys = ("data.micro_batch_size_per_gpu", "data.use_dynamic_bsz", "data.max_token_len_per_gpu")
    values = [getattr(data, key.removeprefix("data.")) for key in keys]
    yield from _passes(keys, values, data.max_length, config.engine.ulysses_sequence_parallel_size)
    share, micro = data.train_batch_size // parts, data.micro_batch_size_per_gpu
    if not data.use_dynamic_bsz and micro is not None and share % micro:
        yield Problem(
            keys[0],
            micro,
            f"it does not divide the {share} sequences of a batch on one rank",
            f"divisors of {share}, nearest {_near(micro, share)}",
            "or set data.use_dynamic_bsz=true, which fills passes by tokens",
        )


def preference_batches(config: PreferenceConfig) -> Problems:
    """The ranks share a batch of pairs equally, and a pass holds the longest pair."""
    data, ranks, shared_by = config.data, config.trainer.ranks, config.shared_by
    parts = data_parallel_size(ranks, shared_by)
    if data.train_batch_size % parts:
        cause = f"{_sharers(ranks, shared_by, config.engine)} cannot share these pairs equally"
        yield Problem("data.train_batch_size", data.train_batch_size, cause, f"multiples of {parts}")
    names = ("micro_batch_size_per_gpu", "use_dynamic_bsz", "max_token_len_per_gpu")
    # Both sides of a pair are in one pass.
    values = [data[name] for name in names]
    sharing = config.engine.ulysses_sequence_parallel_size
    yield from _passes([f"data.{name}" for name in names], values, 2 * data.max_length, sharing)


def _passes(keys: Any, values: Any, longest: int, shared_by: int) -> Problems:
    """Check one kind of pass; ``keys`` and ``values`` are micro-batch size, ``use_dynamic_bsz``, token budget.

    ``shared_by`` ranks share the tokens of a pass.
    """
    if values[1] and values[2] * shared_by < longest:
        yield _too_few_tokens(keys[2], values[2], longest, shared_by)
    yield from _size_of_passes(keys, values)


def _size_of_passes(keys: Any, values: Any) -> Problems:
    """Check that the micro-batch size, the first of ``keys``, is set unless passes are filled by tokens, the second."""
    if not values[1] and values[0] is None:
        remedy = f"set it to the sequences of one pass on one rank, or set {keys[1]}=true to fill passes by tokens"
        yield Problem(keys[0], None, f"it must be set while {keys[1]}=false", "an integer >= 1", remedy)


def _too_few_tokens(key: str, budget: int, longest: int, shared_by: int = 1) -> Problem:
    cause, least = f"the longest sequence has {longest} tokens and must fit", -(-longest // shared_by)
    cause += "" if shared_by == 1 else f" into the budgets of the {shared_by} ranks that share it"
    return Problem(key, budget, cause, f"at least {least}", f"set {key}={least} or more, or shorten the sequences")


def _longest(config: PPOConfig) -> int:
    return config.data.max_prompt_length + config.data.max_response_length


def _near(size: int, dividend: int) -> str:
    """Name the divisors of ``whole`` around ``size``, such as "64 and 128"."""
    below = next((d for d in range(min(size, dividend), 0, -1) if dividend % d == 0), None)
    above = next((d for d in range(size, dividend + 1) if dividend % d == 0), None)
    return " and ".join(dict.fromkeys(str(d) for d in (below, above) if d is not None))


def _shareable(size: int, prompts: int, n: int, ranks: int) -> str:
    good = [d for d in range(1, prompts + 1) if prompts % d == 0 and (d * n) % ranks == 0]
    near = sorted(sorted(good, key=lambda d: abs(d - size))[:2])
    return f"divisors d of {prompts} for which {ranks} divides d·{n}" + (
        f", nearest {' and '.join(map(str, near))}" if near else "; there is none, change data.train_batch_size"
    )


def profilers(config: PPOConfig) -> Problems:
    """Roles are profiled by a tool of the device, and only those, on ranks, which the run has.

    Settings that profile nothing harm nothing, so they are advised against and not refused.
    """
    roles, reward, tool = config.actor_rollout_ref, config.reward_model, config.global_profiler.tool
    own_pool = reward.nnodes * reward.n_gpus_per_node if reward.enable_resource_pool else config.trainer.ranks
    has_reference = need_reference_policy(config) and not roles.model.has_adapters
    sections: dict[str, tuple[RoleProfilerConfig, bool, int]] = {
        "actor_rollout_ref.actor": (roles.actor.profiler, True, config.trainer.ranks),
        "actor_rollout_ref.ref": (roles.ref.profiler, has_reference, config.trainer.ranks),
        "critic": (config.critic.profiler, needs_critic(config), config.trainer.ranks),
        "reward_model": (reward.profiler, reward.enable and config.judge is None, own_pool),
    }
    enabled = {name: section for name, section in sections.items() if section[0].enable}
    if tool and not enabled:
        remedy = (
            "set actor_rollout_ref.actor.profiler.enable=true and actor_rollout_ref.actor.profiler.ranks=[0], or those "
            "of another role"
        )
        yield Problem(_TOOL, tool, "no role is profiled", remedy=remedy, advice=True)
    if tool == "torch_memory" and resolve_device(config) == "cpu":
        yield Problem(_TOOL, tool, "it records the memory of a GPU, and this run uses the CPU", "torch")
    for name, (profiler, is_there, ranks) in enabled.items():
        path = f"{name}.profiler"
        if not tool:
            yield Problem(f"{path}.enable", True, f"{_TOOL} is null", "", f"set {_TOOL}=torch and steps", advice=True)
        if not is_there:
            cause = "this run has no workers of this role"
            yield Problem(
                f"{path}.enable", True, cause, "false", "profile another role, such as the actor", advice=True
            )
        elif beyond := [rank for rank in profiler.ranks if not 0 <= rank < ranks]:
            cause = f"the role has {ranks} rank(s), and none with the number {', '.join(map(str, beyond))}"
            yield Problem(f"{path}.ranks", list(profiler.ranks), cause, f"numbers from 0 to {ranks - 1}", advice=True)
