"""``verl.train`` and ``verl.sft``."""

from __future__ import annotations

import itertools
import math
import shutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from verl.api.data import DataFiles, Rows, as_rows, supervised_rows, write_jsonl, write_prompts
from verl.api.functions import MODULE
from verl.api.objects import NO_REWARD, RewardArgument, check_environments, rewards_of, write_objects
from verl.api.result import CHECKPOINTS, METRICS, SAMPLES, TrainingResult, path_of
from verl.api.rewards import check_columns
from verl.api.settings import (
    COUNTED,
    batch_sizes,
    checked_config,
    keys_of_call,
    placement,
    prompt_length,
    ranks_of,
    rows_of_batch,
    settings_of,
)
from verl.base import env
from verl.base.types import JsonObject
from verl.config import BaseConfig, PPOConfig, SFTConfig
from verl.errors import ConfigError
from verl.supervision.lock import FolderLock
from verl.utils.console import restart_clock

MAX_PROMPTS = 32
"""Prompts of a step unless the call says, if there are as many."""
GROUP = 8
"""Responses to a prompt unless the call says; 1 with a critic."""
_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_ALGORITHMS = {"ppo": "gae"}
"""Names of algorithms that differ from their advantage estimator."""
_PARTS = ("model", "optimizer", "extra", "hf_model")
"""Contents of a checkpoint: all that resuming needs, and the model as transformers reads it."""


def train(
    model: str | Path,
    data: Rows,
    reward: RewardArgument = None,
    *,
    algorithm: str = "grpo",
    eval_data: Rows = None,
    reward_weights: Sequence[float] | None = None,
    tools: Sequence[Callable[..., object]] = (),
    environments: Sequence[type] = (),
    output_dir: str | Path | None = None,
    ray: bool = False,
    settings: Mapping[str, object] | None = None,
    **more_settings: object,
) -> TrainingResult:
    """Train a policy by reinforcement learning, as ``verl train`` does, and return what the run wrote.

    Args:
        model: a folder with a model, a GGUF file, or a name on the Hugging Face hub.
        data: rows with ``prompt`` (a text or messages) and any other columns: a list of dicts, a ``datasets.Dataset``,
            a ``pandas.DataFrame``, or files.
        reward: a function or several, whose weighted scores are added up: :data:`verl.api.rewards.FORMS`. A text
            names a registered scorer; None takes the scorer of each row's ``data_source``.
        algorithm: the advantage estimator (``algorithm.adv_estimator``); ``ppo`` is ``gae``.
        eval_data: rows for validation, before the first step, every ``eval_steps`` steps (by default after each pass
            over the data) and at the end.
        reward_weights: a number for each function; 1 by default.
        tools: functions that the policy may call: typed, with a docstring that describes each parameter.
        environments: classes of :class:`verl.environments.base.Environment`; a row chooses one by
            ``environment_kwargs={"name": ...}``, and need not if there is one.
        output_dir: folder of the run; a second call with the same folder goes on from its last checkpoint. By default
            a new folder in ``outputs``.
        ray: run the ranks as processes of Ray, one for each GPU, instead of one rank in this process.
        settings: settings by key, such as ``{"actor_rollout_ref.rollout.n": 8}``.
        more_settings: settings by key, by the end of a key, or by their names in TRL and OpenRLHF.

    Raises:
        ConfigError: lists all problems of the settings, before a model loads.
        DataError: the rows cannot be used.
        RewardError: too many responses could not be scored.
    """
    values, counted = _split_settings(settings, more_settings, PPOConfig)
    estimator = values.setdefault("algorithm.adv_estimator", _ALGORITHMS.get(algorithm, algorithm))
    if algorithm not in (estimator, "grpo", "ppo"):
        raise ConfigError(f"algorithm={algorithm!r} and algorithm.adv_estimator={estimator!r} differ. Keep one.")
    if reward is not None and "custom_reward_function.path" in values:
        raise ConfigError("custom_reward_function.path and reward both choose the reward. Keep one.")
    with _folder(output_dir, estimator) as (folder, checked):
        check_environments(environments)
        files, val = _prompts(data, eval_data, folder, values.get("data.prompt_key", "prompt"), environments)
        per_prompt = values.get(f"{_ROLLOUT}.n", 1 if estimator == "gae" else GROUP)
        defaults = _run_defaults(folder, ray) | {
            "actor_rollout_ref.model.path": path_of(model),
            "data.train_files": files.paths,
            "data.val_files": val and val.paths,
            "data.dataloader_num_workers": 0,
            f"{_ROLLOUT}.n": per_prompt,
            f"{_ACTOR}.checkpoint.save_contents": list(_PARTS),
            "trainer.rollout_data_dir": str(folder / SAMPLES / "train"),
        }
        defaults |= prompt_length(
            path_of(model), "data.max_prompt_length", "data.max_response_length", values, PPOConfig
        )
        if estimator == "gae":
            defaults["critic.model.path"] = path_of(model)
        defaults |= _sizes(files.count, per_prompt, counted, values, defaults)
        if val is not None:
            defaults["trainer.test_freq"] = _steps_of_pass(files.count, defaults, values)
            defaults["trainer.validation_data_dir"] = str(folder / SAMPLES / "validation")
        has_reward = reward is not None or environments or "data_source" in files.columns
        if not has_reward and not values.keys() & {"reward_model.enable", "custom_reward_function.path"}:
            raise ConfigError(NO_REWARD)
        defaults |= write_objects(reward, reward_weights, tools, environments, files, folder)
        if val is not None and not environments:
            check_columns(rewards_of(reward, reward_weights), val.columns, val.has_truth, "eval_data")
        if estimator == "gdpo" and (rewards := rewards_of(reward, reward_weights)):
            defaults |= {
                "algorithm.gdpo_reward_keys": [entry.name for entry in rewards],
                "algorithm.gdpo_reward_weights": [entry.weight for entry in rewards],
                "reward_model.reward_manager": "gdpo",
            }
        config = checked_config(defaults, values, PPOConfig)
        checked()

        from verl.trainer.main_ppo import run_ppo

        restart_clock()
        with env.file_logger_at(folder / METRICS):
            run_ppo(config)
    return TrainingResult(folder)


def sft(
    model: str | Path,
    data: Rows,
    *,
    eval_data: Rows = None,
    output_dir: str | Path | None = None,
    ray: bool = False,
    settings: Mapping[str, object] | None = None,
    **more_settings: object,
) -> TrainingResult:
    """Fine-tune a model on given answers, as ``verl sft`` does, and return what the run wrote.

    Args:
        model: as in :func:`train`.
        data: rows with ``messages``, or with ``prompt`` and ``completion`` (texts, or lists of messages). The loss is
            on the assistant's messages, and on the completion.
        eval_data: rows for the validation loss, every ``eval_steps`` steps and at the end.
        output_dir: as in :func:`train`.
        ray: as in :func:`train`.
        settings: settings of ``verl sft`` by key.
        more_settings: settings by key, by the end of a key, or by their names in TRL and OpenRLHF.

    Raises:
        ConfigError: lists all problems of the settings, before a model loads.
        DataError: the rows cannot be used.
    """
    values, counted = _split_settings(settings, more_settings, SFTConfig)
    with _folder(output_dir, "sft") as (folder, checked):
        rows, keys = supervised_rows(as_rows(data, "data"), "data", values)
        write_jsonl(rows, folder / "data" / "train.jsonl", "data")
        defaults = (
            _run_defaults(folder, ray)
            | keys
            | {
                "model.path": path_of(model),
                "data.train_files": [str(folder / "data" / "train.jsonl")],
                "data.num_workers": 0,
                "data.train_batch_size": len(rows) // math.ceil(len(rows) / MAX_PROMPTS),
                "checkpoint.save_contents": list(_PARTS),
            }
        )
        if counted:
            defaults |= rows_of_batch(counted, ranks_of({**defaults, **values})) | {"data.use_dynamic_bsz": False}
        if eval_data is not None:
            write_jsonl(
                supervised_rows(as_rows(eval_data, "eval_data"), "eval_data", values)[0],
                folder / "data" / "eval.jsonl",
                "eval_data",
            )
            defaults["data.val_files"] = [str(folder / "data" / "eval.jsonl")]
            defaults["trainer.test_freq"] = _steps_of_pass(len(rows), defaults, values)
        config = checked_config(defaults, values, SFTConfig)
        checked()

        from verl.trainer.sft_trainer import run_sft

        restart_clock()
        with env.file_logger_at(folder / METRICS):
            run_sft(config)
    return TrainingResult(folder)


ARGUMENTS = {
    "actor_rollout_ref.model.path": "model",
    "model.path": "model",
    "data.train_files": "data",
    "data.val_files": "eval_data",
    "trainer.default_local_dir": "output_dir",
    "trainer.rollout_data_dir": "output_dir",
    "trainer.validation_data_dir": "output_dir",
}
"""Settings that an argument of the call decides."""
TRL_ARGUMENTS = {"reward_funcs": "reward", "train_dataset": "data", "eval_dataset": "eval_data"}
"""Arguments of TRL's trainers whose values are objects, and ours."""


def _split_settings(
    settings: Mapping[str, object] | None, more: Mapping[str, object], root: type[BaseConfig]
) -> tuple[JsonObject, JsonObject]:
    """Return the call's settings by key, and TRL's counts of completions by name.

    Raises:
        ConfigError: as in :func:`keys_of_call`, or one is decided by an argument.
    """
    all_settings = settings_of(settings, more)
    if trl_name := next((name for name in all_settings if name in TRL_ARGUMENTS), None):
        raise ConfigError(
            f"{trl_name} of TRL is the argument {TRL_ARGUMENTS[trl_name]} here: {TRL_ARGUMENTS[trl_name]}=..."
        )
    counted = {name: all_settings.pop(name) for name in COUNTED if name in all_settings}
    values = keys_of_call(all_settings, root)
    if owned := next((key for key in values if key in ARGUMENTS), None):
        raise ConfigError(f"{owned}={values[owned]!r:.100}: the argument {ARGUMENTS[owned]} decides it. Give it there.")
    if "trainer.logger" in values:
        loggers = values["trainer.logger"]
        loggers = [loggers] if isinstance(loggers, str) else list(loggers)
        values["trainer.logger"] = loggers if "file" in loggers else [*loggers, "file"]  # which the result reads
    return values, counted


@contextmanager
def _folder(output_dir: str | Path | None, kind: str) -> Iterator[tuple[Path, Callable[[], None]]]:
    """Yield the folder of the run, the call's or a new one in ``outputs``, and a function to call once all is checked.

    The folder is locked against other runs. If the block raises before that call, a new folder is deleted, and one that
    was there has the files of its last run again.

    Raises:
        ConfigError: it cannot be made or written, or has a file of this name that no run wrote.
        CheckpointError: another run writes into it.
    """
    name = f"{kind}-{time.strftime('%Y%m%d-%H%M%S')}"
    folders = (Path("outputs").absolute() / (f"{name}-{suffix}" if suffix else name) for suffix in itertools.count())
    folder = next(folders) if output_dir is None else Path(output_dir).expanduser().absolute()
    while output_dir is None and folder.exists():
        folder = next(folders)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the run's folder {folder} cannot be made: {error}. Name another output_dir.") from error
    marker, *other_files = written = [
        folder / name for name in (METRICS, MODULE, "data/train.jsonl", "data/eval.jsonl")
    ]
    if not marker.exists() and (foreign := next((path for path in other_files if path.exists()), None)):
        raise ConfigError(f"{foreign} would be replaced, and no run wrote it. Name another output_dir.")
    with FolderLock(folder / CHECKPOINTS):
        before = {path: path.read_bytes() if path.exists() else None for path in written}
        marker.touch()
        is_checked = False

        def checked() -> None:
            nonlocal is_checked
            is_checked = True

        try:
            yield folder, checked
        finally:
            if output_dir is None and not is_checked:
                shutil.rmtree(folder)
            elif not is_checked:
                for path, content in before.items():
                    path.unlink(missing_ok=True) if content is None else path.write_bytes(content)


def _run_defaults(folder: Path, ray: bool) -> JsonObject:
    return placement(ray) | {
        "trainer.project_name": folder.parent.name or "verl",
        "trainer.experiment_name": folder.name or "verl",
        "trainer.default_local_dir": str(folder / CHECKPOINTS),
        "trainer.total_epochs": 1,
    }


def _steps_of_pass(rows: int, defaults: Mapping[str, object], values: Mapping[str, object]) -> int:
    batch = {**defaults, **values}["data.train_batch_size"]
    return max(1, rows // batch) if isinstance(batch, int) and batch > 0 else 1  # else it is reported later


def _sizes(
    rows: int,
    per_prompt: int,
    counted: Mapping[str, object],
    values: Mapping[str, object],
    defaults: Mapping[str, object],
) -> JsonObject:
    """Return the sizes of a step: TRL's, if any was given; else as many equal steps as the rows allow."""
    if counted:
        sizes: JsonObject = dict(batch_sizes(counted, ranks_of({**defaults, **values}), per_prompt))
    else:
        # An incomplete last batch is dropped, so steps are of equal size: 40 rows are 2 steps of 20, not 32 and a rest.
        steps = math.ceil(rows / MAX_PROMPTS)
        prompts = values.get("data.train_batch_size", rows // steps)
        sizes = {"data.train_batch_size": prompts}
        if isinstance(prompts, str) or prompts:  # else it alone is reported
            sizes[f"{_ACTOR}.ppo_mini_batch_size"] = prompts
    micro_batch = f"{_ACTOR}.ppo_micro_batch_size_per_gpu"
    on_device = values.get(micro_batch, sizes.get(micro_batch))
    if on_device is None:
        return sizes | {f"{_ACTOR}.use_dynamic_bsz": True}
    size_keys = [f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu"]
    if "critic.model.path" in defaults:
        size_keys.append("critic.ppo_micro_batch_size_per_gpu")
    return sizes | dict.fromkeys(size_keys, on_device)


def _prompts(
    data: Rows, eval_data: Rows, folder: Path, prompt_key: str, environments: Sequence[type]
) -> tuple[DataFiles, DataFiles | None]:
    """Write the rows of training and validation into the run's folder."""
    files: list[DataFiles | None] = []
    for what, name, rows in (("data", "train", data), ("eval_data", "eval", eval_data)):
        if rows is None and what == "eval_data":
            files.append(None)
            continue
        listed = as_rows(rows, what)
        if len(environments) == 1:
            (only,) = environments
            for row in listed:
                row["environment_kwargs"] = {"name": only.__name__, **(row.get("environment_kwargs") or {})}
        files.append(write_prompts(listed, folder / "data" / f"{name}.jsonl", prompt_key, what))
    assert files[0] is not None
    return files[0], files[1]
