"""Responses kept on disk, so that training can be repeated without sampling them again (``rollout.skip_rollout``).

``{folder}/{uid of the first row}.safetensors`` holds what was sampled for a batch of
prompts; the greedy responses of the same prompts have the suffix ``-greedy``. ``uid`` is the step and the row, so the
second run of the same data finds the responses of the first. The file also says for which prompts and under which
settings they were drawn: a run with others is refused, not trained on responses to something else.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np

from verl.base.fs import below
from verl.config import PPOConfig
from verl.errors import DataError
from verl.protocol import DataProto
from verl.utils.metric import Metrics
from verl.workers.rollout.columns import with_weight_versions

logger = logging.getLogger(__name__)

SETTINGS = (
    *("temperature", "top_k", "top_p", "min_p", "do_sample", "ignore_eos", "stop", "stop_token_ids"),
    *("prompt_length", "response_length", "logprobs_mode"),
)
"""Settings of ``actor_rollout_ref.rollout`` under which responses were drawn and must be trained on."""
DRAWN_FOR = "drawn_for"


class StoredRollouts:
    """Answers prompts of training from files, and by the model where there is no file, which it then writes.

    Args:
        config: ``actor_rollout_ref.rollout.skip_rollout`` and ``skip_dump_dir``; with the first false nothing is read
            or written.
        draw: answers prompts by the model.
    """

    def __init__(self, config: PPOConfig, draw: Callable[[DataProto], DataProto]) -> None:
        rollout, default = config.actor_rollout_ref.rollout, Path(config.trainer.default_local_dir) / "rollouts"
        self.folder = Path(rollout.skip_dump_dir or default) if rollout.skip_rollout else None
        self._draw = draw
        settings = ((name, rollout[name]) for name in SETTINGS)
        # Lists, which is what files have of tuples.
        self._settings = {name: list(value) if isinstance(value, tuple) else value for name, value in settings}
        self._model = config.actor_rollout_ref.model.path
        self._rows = {"read": 0, "drawn": 0}

    def answer(self, prompts: DataProto) -> DataProto:
        """Return the responses of ``prompts``; those of validation are always drawn.

        Raises:
            DataError: the file is damaged, or holds responses to other prompts or under other settings.
        """
        if self.folder is None or prompts.meta_info.get("validate", False):
            return self._draw(prompts)
        greedy = "" if prompts.meta_info.get("do_sample", True) else "-greedy"
        path = below(self.folder, f"{prompts.non_tensor_batch['uid'][0]}{greedy}.safetensors")
        if path.exists():
            batch = self._read(path, prompts)
            self._rows["read"] += len(prompts)
            return batch
        responses = self._draw(prompts)
        drawn_for = {"prompts": _fingerprint(prompts), "settings": self._settings, "model": self._model}
        (responses | DataProto(meta_info={DRAWN_FOR: drawn_for})).save_to_disk(path)
        self._rows["drawn"] += len(prompts)
        return responses

    def metrics(self) -> Metrics:
        """Share of the prompts since the last call whose responses came from files: ``training/stored_rollouts``."""
        total = sum(self._rows.values())
        share = self._rows["read"] / total if total else 0.0
        self._rows = {"read": 0, "drawn": 0}
        return {} if self.folder is None else {"training/stored_rollouts": share}

    def _read(self, path: Path, prompts: DataProto) -> DataProto:
        batch = DataProto.load_from_disk(path)
        was = batch.meta_info.pop(DRAWN_FOR, None)
        if was is None:
            raise DataError(f"{path}: no file of rollout.skip_rollout. {_remedy(path.parent)}")
        if was["prompts"] != _fingerprint(prompts):
            raise DataError(
                f"{path}: these are responses to other prompts. The data, its order (trainer.seed, data.shuffle), "
                f"data.train_batch_size, data.gen_batch_size, rollout.n or the tokenizer have changed. "
                f"{_remedy(path.parent)}"
            )
        now = {name: value for name, value in self._settings.items() if was["settings"].get(name) != value}
        if now:
            differences = ", ".join(f"{name}={was['settings'].get(name)} (now {value})" for name, value in now.items())
            raise DataError(f"{path}: these responses were drawn with rollout.{differences}. {_remedy(path.parent)}")
        if was["model"] != self._model:
            logger.warning("%s: these responses were drawn by %s, and %s is trained.", path, was["model"], self._model)
        return with_weight_versions(batch)


def _remedy(folder: Path) -> str:
    return f"Set it as it was, remove {folder}, or name another folder in actor_rollout_ref.rollout.skip_dump_dir."


def _fingerprint(prompts: DataProto) -> str:
    """A checksum of the tokens of prompts, of which rows they are, and of how they were numbered."""
    digest = hashlib.sha256()
    for name in ("input_ids", "attention_mask"):
        if name in prompts.batch.keys():
            digest.update(np.ascontiguousarray(prompts.batch[name].cpu().numpy()).tobytes())
    for name in ("uid", "sample_index"):
        if name not in prompts.non_tensor_batch:
            continue
        digest.update(repr(prompts.non_tensor_batch[name].tolist()).encode())
    return digest.hexdigest()
