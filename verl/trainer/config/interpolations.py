"""Resolve ``${...}`` in a composed configuration, by OmegaConf."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.keys import Tree, get
from verl.trainer.config.omegaconf_private import use_faster_parsers


class Interpolations:
    """The interpolations of one configuration.

    OmegaConf's copy of the configuration takes longer to make than all the rest of reading it, so there is one.
    """

    def __init__(self, raw: Tree) -> None:
        use_faster_parsers()  # a program that composed its configuration without verl's commands has not called it
        self._raw = raw
        self._config: DictConfig = OmegaConf.create(raw)

    def resolved(self, instead: Callable[[str, str], object]) -> Tree:
        """Return the configuration with all of them resolved.

        Args:
            instead: value of a key whose interpolation cannot be resolved; gets the key and what is wrong.
        """
        tried: set[str] = set()
        while True:
            try:
                return OmegaConf.to_container(self._config, resolve=True)  # type: ignore[return-value]
            except OmegaConfBaseException as error:
                path = error.full_key or ""
                if path in tried:
                    raise
                tried.add(path)
                OmegaConf.update(self._config, path, instead(path, str(error).splitlines()[0]), merge=False)

    def value_of(self, path: str, interpolation: str) -> Any:
        """Return what ``interpolation`` would stand for if it were written at ``path``."""
        OmegaConf.update(self._config, path, interpolation, merge=False)
        value = OmegaConf.select(self._config, path)
        OmegaConf.update(self._config, path, get(self._raw, path), merge=False)
        return OmegaConf.to_container(value, resolve=True) if OmegaConf.is_config(value) else value
