"""Load plug-ins: packages below ``verl/plugins``, imported by name where a setting or a command needs them."""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import Any

from verl.errors import MissingPluginError

PACKAGE = "verl.plugins"


def import_module(name: str) -> ModuleType:
    """Import a module of the core, of a plug-in or of another package.

    Raises:
        MissingPluginError: the module belongs to a plug-in whose folder is not installed.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # Only the folder of the plug-in itself; a package that a plug-in needs is another error, with another remedy.
        if error.name and error.name.rpartition(".")[0] == PACKAGE:
            plugin = error.name.rpartition(".")[2]
            raise MissingPluginError(
                f"this needs the plug-in '{plugin}' (verl/plugins/{plugin}), which this installation lacks. Install a "
                "whole verl, or do without the command or setting that asks for it."
            ) from error
        raise


def load(address: str) -> Any:
    """Load an object of a plug-in by ``plugin.module:name``.

    Raises:
        MissingPluginError: the plug-in is not installed.
    """
    module, _, name = address.partition(":")
    return getattr(import_module(f"{PACKAGE}.{module}"), name)
