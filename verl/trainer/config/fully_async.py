"""Settings of the commands ``fully_async_main`` and ``one_step_off_policy.main_ppo``, as settings of ``main_ppo``.

The sections ``async_training`` and ``rollout`` of these commands are read here alone. In ``async_training`` an update
trains on ``require_batches`` mini-batches, and weights are transferred after ``trigger_parameter_sync_step`` updates.
Here such an update is a step, so what counts transfers there is multiplied.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from verl.config import Problem
from verl.config.problems import shown
from verl.trainer.config.keys import Tree, drop, get, merged, put, same

MOVED: Mapping[str, str] = {
    "async_training.staleness_threshold": "trainer.async.volume",
    "async_training.trigger_parameter_sync_step": "trainer.async.sync_every",
    "async_training.require_batches": "trainer.v1.separate_async.parameter_sync_step",
    "async_training.partial_rollout": "trainer.async.partial_rollout",
    "rollout.nnodes": "actor_rollout_ref.rollout.nnodes",
    "rollout.n_gpus_per_node": "actor_rollout_ref.rollout.n_gpus_per_node",
    "rollout.n": "actor_rollout_ref.rollout.n",
    "rollout.test_freq": "trainer.test_freq",
    "rollout.total_epochs": "trainer.total_epochs",
    "rollout.total_rollout_steps": "trainer.total_training_steps",
    "actor_rollout_ref.rollout.standalone_gpu_memory_utilization": "actor_rollout_ref.rollout.gpu_memory_utilization",
}
"""Key of these commands → the key of ``main_ppo`` that it sets."""

FULLY_ASYNC: Mapping[str, Mapping[str, object]] = {
    "async_training": {
        "staleness_threshold": 0.1,
        "trigger_parameter_sync_step": 4,
        "require_batches": 1,
        "partial_rollout": True,
        "use_trainer_do_validate": False,
        "use_dynamic_resource_scheduling": False,
        "dynamic_schedule_policy": "default",
        "dynamic_schedule_deactivate_ratio": 0.3,
        "dynamic_schedule_enable_rebalance": True,
        "concurrent_samples_per_replica": 16,
    },
    "rollout": {"nnodes": 1, "n_gpus_per_node": 8, "n": 4, "total_rollout_steps": 100},
}
"""The two sections of ``fully_async_main``, with their defaults."""

ONE_STEP_OFF: Mapping[str, Mapping[str, object]] = {"rollout": {"nnodes": 1, "n_gpus_per_node": 8}}
"""The section of ``one_step_off_policy.main_ppo``, with its defaults."""

_ASYNC = "async_training"
_HYBRID = "actor_rollout_ref.hybrid_engine"
_MINI_BATCH = "actor_rollout_ref.actor.ppo_mini_batch_size"
_STANDALONE = "standalone_gpu_memory_utilization"
_TEST_FREQ = "rollout.test_freq"
_TOTAL = "rollout.total_rollout_steps"
_BYPASS = "algorithm.rollout_correction.bypass_mode"
_LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
_OWN_LOG_PROBS = "actor_rollout_ref.actor.use_rollout_log_probs"


def move_settings(
    tree: Tree,
    explicit: Collection[str],
    problems: list[Problem],
    defaults_of: Callable[[str], tuple[object, ...]],
    for_program: bool,
) -> None:
    """Replace the settings of these commands in a composed configuration by those of ``main_ppo``, in place.

    A configuration without the section ``async_training`` or a key ``rollout.nnodes`` is that of another command; and a
    program may have sections of these names itself, unless it sets ``hybrid_engine=false``.

    Args:
        tree: the configuration before interpolation.
        explicit: keys that the user set on the command line.
        problems: list to which contradictions are appended.
        defaults_of: returns the values that an unset key of ``main_ppo`` can hold.
        for_program: whether the configuration is that of a Python program.
    """
    asynchronous = isinstance(get(tree, "async_training"), dict)
    if not asynchronous and get(tree, "rollout.nnodes") is None:
        return
    if for_program and get(tree, _HYBRID) is not False:
        return
    if get(tree, _HYBRID) is True:
        old = "async_training" if asynchronous else "rollout.nnodes"
        problems.append(Problem(_HYBRID, True, f"{old} is about ranks that sample and do not train", "false"))
        put(tree, _HYBRID, False)
    settings = {old: value for old in MOVED if (value := get(tree, old)) is not None}
    if asynchronous:
        put(tree, "async_training", merged(FULLY_ASYNC["async_training"], tree["async_training"]))
        settings |= {old: get(tree, old) for old in MOVED if old.startswith("async_training.")}
        put(tree, "trainer.v1.trainer_mode", "separate_async")
        takes_bypass = get(tree, _LOSS_MODE) in ("vanilla", "bypass_mode") and get(tree, _OWN_LOG_PROBS) is not False
        if not takes_bypass and _BYPASS not in explicit:
            put(tree, _BYPASS, False)
    unset = {old for old in settings if old not in explicit and same(get(FULLY_ASYNC, old), settings[old])}
    if asynchronous:
        _count_in_steps(tree, settings, problems)
    for old, value in settings.items():
        drop(tree, old)
        new = MOVED[old]
        if old.endswith(_STANDALONE):  # of engines on ranks of their own, as all are here
            put(tree, new, value)
            continue
        now = get(tree, new)
        is_set = new in explicit or not any(same(now, usual) for usual in defaults_of(new))
        if not is_set:
            put(tree, new, value)
        elif old not in unset and not same(now, value):
            cause = f"this is another spelling of {new}, which is set to {shown(now)}"
            problems.append(Problem(old, value, cause, remedy=f"keep one of the two, best {new}"))


def _count_in_steps(tree: Tree, settings: dict[str, object], problems: list[Problem]) -> None:
    """Turn prompts and transfers into steps: the size of a batch, the length of the run, frequencies."""
    sizes: list[int] = []
    for key in (f"{_ASYNC}.require_batches", f"{_ASYNC}.trigger_parameter_sync_step", _MINI_BATCH):
        value = get(tree, key)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            cause = "the sizes of a step are computed from it"
            problems.append(Problem(key, value, cause, "an integer >= 1", "write the number itself"))
            return
        sizes.append(value)
    batches, updates, prompts = sizes
    batch = batches * prompts
    if get(tree, "data.train_batch_size") == 0:
        put(tree, "data.train_batch_size", batch)
    if isinstance(total := settings.get(_TOTAL), int):
        if total < batch:
            cause = f"a step trains on require_batches x ppo_mini_batch_size = {batches} x {prompts} = {batch} prompts"
            remedy = "give more prompts, or null to train total_epochs"
            problems.append(Problem(_TOTAL, total, cause, f">= {batch}, or null", remedy))
        settings[_TOTAL] = max(1, total // batch)
    if isinstance(often := settings.get(_TEST_FREQ), int) and often > 0:
        settings[_TEST_FREQ] = often * updates
    for key in ("trainer.test_freq", "trainer.save_freq"):
        if isinstance(often := get(tree, key), int) and often > 0:
            put(tree, key, often * updates)
