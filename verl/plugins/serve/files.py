"""Saved weights of clients: folders below ``server.state_dir``, which clients name by ``tinker://`` paths.

::

    tinker://RUN/weights/NAME              RUN/weights/NAME              adapter and optimizer, to go on training
    tinker://RUN/sampler_weights/NAME      RUN/sampler_weights/NAME      adapter alone
                                           RUN/run.json                  what the model is
                                           .running/                     of this server alone: emptied at its start
                                           run.lock                      held by the server
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from verl.base.types import JsonMapping, JsonObject
from verl.checkpoint.files import put_back, replace_text
from verl.errors import CheckpointError, ConfigError
from verl.plugins.serve.adapters import SPEC_FILE, AdapterSpec, read_spec
from verl.plugins.serve.refusals import RefusedError
from verl.supervision.lock import FolderLock

logger = logging.getLogger(__name__)

SCHEME = "tinker://"
KINDS = {"weights": "training", "sampler_weights": "sampler"}
"""Part of a path → the protocol's word for it."""
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.:+-]{0,199}")
_RESERVED = (".partial", ".replaced")


def now() -> str:
    """The time, as the protocol writes it."""
    return datetime.now(UTC).isoformat()


def _described_run(file: Path) -> JsonObject:
    """Read a ``run.json``; one that is damaged is described with ``corrupted``."""
    try:
        described = json.loads(file.read_text())
        if absent := {"training_run_id", "base_model", "created", "spec", "user_metadata"} - {*described}:
            raise ValueError(f"it lacks {min(absent)}")
        if not (isinstance(described["spec"], dict) and "rank" in described["spec"]):
            raise ValueError(f"its spec is {described['spec']!r:.60}, without a rank")
        if not all(isinstance(described[name], str) for name in ("training_run_id", "base_model", "created")):
            raise ValueError("training_run_id, base_model and created must be text")
    except (OSError, ValueError, TypeError) as error:
        logger.warning("%s cannot be read: %s. The other files of its folder are not touched.", file, error)
        changed = datetime.fromtimestamp(file.stat().st_mtime, UTC).isoformat()
        return {
            "training_run_id": file.parent.name,
            "base_model": "unknown",
            "created": changed,
            "spec": {"rank": None},
            "user_metadata": None,
            "corrupted": True,
        }
    return described


@dataclass(frozen=True)
class SavedPath:
    """A ``tinker://`` path."""

    run: str
    kind: str
    """One of :data:`KINDS`."""
    name: str

    @classmethod
    def parse(cls, text: str) -> SavedPath:
        """Read a path.

        Raises:
            RefusedError: it is none.
        """
        parts = text.removeprefix(SCHEME).split("/")
        if not text.startswith(SCHEME) or len(parts) != 3 or parts[1] not in KINDS:
            raise RefusedError(
                f"{text!r:.200} is no path of saved weights, which are tinker://RUN/weights/NAME or "
                "tinker://RUN/sampler_weights/NAME."
            )
        return cls(checked_name(parts[0]), parts[1], checked_name(parts[2]))

    @property
    def text(self) -> str:
        """The path."""
        return f"{SCHEME}{self.run}/{self.kind}/{self.name}"


def checked_name(name: str) -> str:
    """Return the name of a run or of saved weights.

    Raises:
        RefusedError: it could be the name of another file.
    """
    if not _NAME.fullmatch(name) or name.endswith(_RESERVED):
        raise RefusedError(f"{name!r:.200} cannot be a name of saved weights: use letters, digits and _ . : + -")
    return name


class StateFiles:
    """The folder of a service.

    Args:
        root: the folder; made if it is not there.

    Raises:
        ConfigError: another service uses it, whose running files this one would delete; or it cannot be written.
    """

    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.running = self.root / ".running"
        self._lock = FolderLock(self.root)
        try:
            self._lock.acquire(wait_s=1.0)
        except CheckpointError as error:
            raise ConfigError(
                f"server.state_dir={root} must be a folder of this service alone that can be written: "
                f"{str(error).partition('. ')[0]}."
            ) from error
        shutil.rmtree(self.running, ignore_errors=True)
        self.running.mkdir(parents=True)

    def folder(self, path: SavedPath) -> Path:
        """Return the folder of these weights, whether they are saved yet or not."""
        return self.root / path.run / path.kind / path.name

    def saved(self, path: SavedPath) -> Path:
        """Return the folder of saved weights.

        Raises:
            RefusedError: there are none.
        """
        folder = self.folder(path)
        put_back(folder)
        if not (folder / SPEC_FILE).is_file():
            raise RefusedError(f"there are no saved weights {path.text}.", status=404)
        return folder

    def spec(self, path: SavedPath) -> AdapterSpec:
        """Return the specification of saved weights; errors as of :meth:`saved`."""
        try:
            return read_spec(self.saved(path))[0]
        except CheckpointError as error:
            raise RefusedError(str(error)) from error

    def write_run(self, run: str, described: JsonMapping) -> None:
        """Write what a model is."""
        (self.root / run).mkdir(parents=True, exist_ok=True)
        replace_text(self.root / run / "run.json", json.dumps(described, indent=2) + "\n")

    def runs(self) -> list[JsonObject]:
        """Describe all models of which something was written, the newest first."""
        described = [_described_run(file) for file in self.root.glob("*/run.json")]
        return sorted(described, key=lambda run: run["created"], reverse=True)

    def checkpoints(self, run: str) -> tuple[list[JsonObject], list[Path]]:
        """Describe what is saved of a run, in the protocol's form, the oldest first; and name damaged folders."""
        checkpoints, damaged = list[JsonObject](), list[Path]()
        for kind, word in KINDS.items():
            for file in (self.root / run / kind).glob(f"*/{SPEC_FILE}"):
                path = SavedPath(run, kind, file.parent.name)
                if path.name.endswith(_RESERVED):
                    continue
                try:
                    _, notes = read_spec(file.parent)
                    time = notes["time"]
                except (CheckpointError, KeyError) as error:
                    logger.warning("%s is damaged and is not listed: %s", file.parent, error)
                    damaged.append(file.parent)
                    continue
                checkpoints.append(
                    {
                        "checkpoint_id": f"{kind}/{path.name}",
                        "checkpoint_type": word,
                        "time": time,
                        "tinker_path": path.text,
                        "size_bytes": sum(part.stat().st_size for part in file.parent.iterdir()),
                        "user_metadata": notes.get("user_metadata"),
                    }
                )
        return sorted(checkpoints, key=lambda checkpoint: checkpoint["time"]), damaged

    def delete(self, path: SavedPath) -> None:
        """Delete saved weights; errors as of :meth:`saved`."""
        shutil.rmtree(self.saved(path))
