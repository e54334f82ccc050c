"""What Hydra writes down about a run (``.hydra/*.yaml``), without the secrets of its configuration."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from verl.utils.redact import redacted, secrets_in, without_secrets


def mask_record(cfg: DictConfig) -> None:
    """Rewrite what Hydra wrote for the job at hand, as soon as it has written it.

    Args:
        cfg: the composed configuration.
    """
    from hydra.core.hydra_config import HydraConfig

    hydra = HydraConfig.get()
    files = [Path(hydra.sweep.dir) / "multirun.yaml"]
    if hydra.output_subdir is not None:
        files += sorted((Path(hydra.runtime.output_dir) / hydra.output_subdir).glob("*.yaml"))
    known = [*secrets_in(OmegaConf.to_container(cfg)), *_overridden(hydra.overrides.task)]
    for file in files:
        if file.is_file():
            _mask(file, known)


def _overridden(overrides: Iterable[str]) -> list[str]:
    """The secrets that overrides set, as Hydra reads their values."""
    from hydra.core.override_parser.overrides_parser import OverridesParser
    from hydra.errors import HydraException

    parser = OverridesParser.create()
    found: list[str] = []
    for override in overrides:
        name, _, text = override.partition("=")
        try:
            value = parser.parse_override(override).value()
        except HydraException:  # not of Hydra's language; as it stands, then
            value = text
        found += secrets_in(_nested(name, value))
    return found


def _nested(name: str, value: Any) -> dict[str, Any]:
    """``a.b`` and a value as ``{"a": {"b": value}}``: the name of any section may say that all below is secret."""
    for part in reversed(name.lstrip("+~").split(".")):
        value = {part: value}
    return value


def _mask(file: Path, known: Iterable[str]) -> None:
    before: Any = OmegaConf.to_container(OmegaConf.load(file), resolve=False)
    after = _without(without_secrets(before), list(known))
    if after == before:
        return
    unfinished = file.with_name(f"{file.name}.{os.getpid()}.unfinished")
    OmegaConf.save(OmegaConf.create(after), unfinished)
    unfinished.replace(file)


def _without(value: Any, known: list[str]) -> Any:
    if isinstance(value, dict):
        return {key: _without(item, known) for key, item in value.items()}
    if isinstance(value, list):
        return [_without(item, known) for item in value]
    return redacted(value, known) if isinstance(value, str) else value
