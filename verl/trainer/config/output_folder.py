"""The folder of a run (``hydra.run.dir``): the settings it was started with, without secrets, and its log."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from verl.base.redact import redacted, secrets_in, without_secrets


@contextmanager
def output_folder(composed: DictConfig) -> Iterator[Callable[[], None]]:
    """Make the folder, set up logging, and run the block, as a job of Hydra.

    The block gets a function that writes the settings into ``.hydra/``: once they are checked.

    Args:
        composed: the configuration with Hydra's own section.

    Raises:
        OSError: the folder cannot be made, or that function cannot write into it.
    """
    from hydra.core.hydra_config import HydraConfig
    from hydra.core.utils import configure_log, env_override

    before, started_in = HydraConfig.instance().cfg, Path.cwd()
    HydraConfig.instance().set_config(composed)  # for `${hydra:...}` in the name of the folder
    folder = Path(composed.hydra.run.dir).absolute()
    with read_write(composed.hydra.runtime), open_dict(composed.hydra.runtime):
        composed.hydra.runtime.output_dir = str(folder)
    HydraConfig.instance().set_config(composed)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        configure_log(composed.hydra.job_logging, composed.hydra.verbose)
        if composed.hydra.job.chdir:
            os.chdir(folder)
        with env_override(composed.hydra.job.env_set):
            yield lambda: _write_settings(folder, composed)
    finally:
        HydraConfig.instance().cfg = before
        os.chdir(started_in)


def _write_settings(folder: Path, composed: DictConfig) -> None:
    """Write the three files that Hydra writes for a job; a secret is never on the disk."""
    if composed.hydra.output_subdir is None:
        return
    folder /= composed.hydra.output_subdir
    settings: Any = OmegaConf.to_container(composed, resolve=False)
    hydra = settings.pop("hydra")
    overrides = [str(override) for override in hydra["overrides"]["task"]]
    secrets = [*secrets_in(settings), *_secrets_of_overrides(overrides)]
    folder.mkdir(parents=True, exist_ok=True)
    files = {"config.yaml": settings, "hydra.yaml": {"hydra": hydra}, "overrides.yaml": overrides}
    for name, content in files.items():
        OmegaConf.save(OmegaConf.create(_masked(without_secrets(content), secrets)), folder / name)


def _secrets_of_overrides(overrides: Iterable[str]) -> list[str]:
    """Return the secrets that overrides set, parsed as Hydra parses their values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser, secrets = OverridesParser.create(), []
    for override in overrides:
        name, _, text = override.partition("=")
        try:
            value = parser.parse_override(override).value()
        except HydraException:  # not in Hydra's grammar: take the text itself
            value = text
        for part in reversed(name.lstrip("+~").split(".")):  # a section's name can mark all values below as secret
            value = {part: value}
        secrets += secrets_in(value)
    return secrets


def _masked(value: object, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _masked(item, secrets) for key, item in value.items()}
    if isinstance(value, list):
        return [_masked(item, secrets) for item in value]
    return redacted(value, secrets) if isinstance(value, str) else value
