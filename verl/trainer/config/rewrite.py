"""Settings that have two places, or an older form: made one before types are checked.

After this, code reads either place of a pair and finds the same value, and only the
``*_per_gpu`` form of micro-batch sizes is set.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from verl.trainer.config.keys import Key, Tree, drop, get, put, same
from verl.trainer.config.problems import Problem

_ACTOR = "actor_rollout_ref.actor"
_REF = "actor_rollout_ref.ref"
_SHARED = ("strategy", "ulysses_sequence_parallel_size")
_SHARED_KERNELS = ("use_torch_compile", "entropy_from_logits_with_chunking", "entropy_checkpointing")

PAIRS: tuple[tuple[str, str], ...] = (
    (f"{_ACTOR}.grad_clip", f"{_ACTOR}.optim.clip_grad"),
    ("critic.grad_clip", "critic.optim.clip_grad"),
    *((f"{_ACTOR}.{name}", f"{_ACTOR}.fsdp_config.{name}") for name in _SHARED + _SHARED_KERNELS),
    *((f"{_REF}.{name}", f"{_REF}.fsdp_config.{name}") for name in _SHARED + _SHARED_KERNELS),
    *((f"critic.{name}", f"critic.model.fsdp_config.{name}") for name in _SHARED),
    *((f"reward_model.{name}", f"reward_model.model.fsdp_config.{name}") for name in _SHARED),
)
"""Two places of one setting."""

MICRO_BATCHES: tuple[tuple[str, str], ...] = (
    (f"{_ACTOR}.ppo_micro_batch_size", f"{_ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{_REF}.log_prob_micro_batch_size", f"{_REF}.log_prob_micro_batch_size_per_gpu"),
    (
        "actor_rollout_ref.rollout.log_prob_micro_batch_size",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    ),
    ("critic.ppo_micro_batch_size", "critic.ppo_micro_batch_size_per_gpu"),
    ("critic.forward_micro_batch_size", "critic.forward_micro_batch_size_per_gpu"),
    ("reward_model.micro_batch_size", "reward_model.micro_batch_size_per_gpu"),
    ("data.micro_batch_size", "data.micro_batch_size_per_gpu"),
)
"""Older form (sequences over all ranks) and present form (sequences per rank) of a micro-batch size."""


def rewrite(
    tree: Tree, raw: Tree, known: Mapping[str, Key], explicit: Collection[str], problems: list[Problem]
) -> None:
    """Apply all rules in place; ``raw`` is the configuration before interpolation."""
    for one, other in PAIRS:
        if one in known and other in known:
            _make_equal(tree, known, (one, other), explicit, problems)
    for total, per_rank in MICRO_BATCHES:
        if total in known:
            _per_rank(tree, raw, known, (total, per_rank), problems)
    for path, key in known.items():
        # Left at its default, such a field goes where the field that it follows goes.
        if key.follows and path not in explicit and same(get(tree, path), key.default):
            drop(tree, path)


def _make_equal(
    tree: Tree, known: Mapping[str, Key], pair: tuple[str, str], explicit: Collection[str], problems: list[Problem]
) -> None:
    values = [get(tree, path, known[path].default) for path in pair]
    if same(values[0], values[1]):
        return
    chosen = [p for p, v in zip(pair, values, strict=True) if p in explicit or not same(v, known[p].default)]
    if len(chosen) == 2:
        wrong = f"this is the same setting as {pair[1]}, which is set to {values[1]}"
        problems.append(Problem(pair[0], values[0], wrong, remedy="give both the same value, or set only one"))
        return
    source = chosen[0] if chosen else pair[0]
    for path in pair:
        put(tree, path, get(tree, source))


def _per_rank(tree: Tree, raw: Tree, known: Mapping[str, Key], pair: tuple[str, str], problems: list[Problem]) -> None:
    total, per_rank = pair
    size = get(tree, total)
    if not isinstance(size, int) or size < 1:
        return  # not set, or wrong in itself
    derived = [
        known[path].meta.interpolation is not None and get(raw, path) == known[path].meta.interpolation for path in pair
    ]
    own = None if derived[1] or same(get(tree, per_rank), known[per_rank].default) else get(tree, per_rank)
    put(tree, total, None)
    if own is not None:
        if not derived[0]:
            wrong = f"this counts sequences over all ranks, and {per_rank}={own} counts them per rank"
            problems.append(Problem(total, size, wrong, remedy=f"set only {per_rank}"))
        return
    ranks = _ranks(tree)
    if size % ranks:
        wrong = f"it counts sequences over all ranks, and {ranks} ranks do not divide it"
        remedy = f"set {per_rank} instead, which counts them per rank"
        problems.append(Problem(total, size, wrong, f"multiples of {ranks}", remedy))
        return
    put(tree, per_rank, size // ranks)


def _ranks(tree: Mapping[str, Any]) -> int:
    sizes = [get(tree, f"trainer.{name}", 1) for name in ("nnodes", "n_gpus_per_node")]
    counts = [int(size) for size in sizes if str(size).isdigit() and int(size) > 0]
    return counts[0] * counts[1] if len(counts) == 2 else 1
