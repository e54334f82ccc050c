"""Import by path or name, and find out what is installed."""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
from collections.abc import Sequence
from types import ModuleType

from packaging.version import Version

from verl.base.import_utils import load_module, load_object


def is_installed(module: str) -> bool:
    """Return whether a module can be imported; its parent packages are imported for that."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:
        return False


is_nvtx_available = functools.partial(is_installed, "nvtx")
is_vllm_available = functools.partial(is_installed, "vllm")
is_sglang_available = functools.partial(is_installed, "sglang")
is_megatron_core_available = functools.partial(is_installed, "megatron.core")
is_trl_available = functools.partial(is_installed, "trl")


def import_external_libs(external_libs: str | Sequence[str] | None = None) -> None:
    """Import the named modules, for what they register."""
    names = [external_libs] if isinstance(external_libs, str) else external_libs or []
    for name in names:
        importlib.import_module(name)


def load_extern_object(module_path: str, object_name: str) -> object:
    """Return an object of a Python file, of ``pkg://my.module`` or of ``my.module``.

    Raises:
        ConfigError: there is no such file, module or name.
    """
    return load_object(module_path, object_name, "load_extern_object")


def load_extern_module(module_path: str) -> ModuleType:
    """Import a Python file, ``pkg://my.module`` or ``my.module``; a missing one is a ``ConfigError``."""
    return load_module(module_path, "load_extern_module")


def load_extern_type(file_path: str | None, type_name: str) -> type | None:
    """Return a class of a Python file, None without a path; see :func:`load_extern_object`."""
    return None if not file_path else load_object(file_path, type_name, "load_extern_type")


def is_version_ge(pkg: str = "vllm", minver: str = "0.7.3") -> bool:
    """Return whether a package is installed in at least version ``minver``."""
    try:
        return Version(importlib.metadata.version(pkg)) >= Version(minver)
    except importlib.metadata.PackageNotFoundError:
        return False


def load_class_from_fqn(fqn: str, description: str = "class") -> type:
    """Return a class by its full name, ``package.module.Class``.

    Raises:
        ValueError: the name has no module.
        ImportError: there is no such module.
        AttributeError: the module has no such class.
    """
    module, _, name = fqn.rpartition(".")
    if not module:
        raise ValueError(f"{description} '{fqn}' names no module. Write it in full: package.module.{fqn or 'Class'}.")
    return getattr(importlib.import_module(module), name)


def is_torch_npu_available(check_device: bool = True) -> bool:
    """Return whether Ascend devices can be used; not in this version of verl."""
    return False
