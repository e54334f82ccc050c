"""Parts of a command's module: its function of a configuration, its command line, and names that are loaded on use."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from omegaconf import DictConfig

from verl.base import env
from verl.base.lazy import on_first_use
from verl.config import BaseConfig
from verl.trainer.config.command_line import command
from verl.trainer.config.flags import CONFIG_NAMES
from verl.trainer.driver import driving

ConfigT = TypeVar("ConfigT", bound=BaseConfig)


def entry(
    module: Mapping[str, Any],
    root: type[ConfigT],
    runner: str,
    public_names: tuple[str, ...] = (),
    config_name: str | None = None,
    restarts: bool = False,
) -> tuple[Callable[[ConfigT | DictConfig], None], Callable[..., None], Callable[[str], object]]:
    """Create the parts of a command's module.

    `--help` and `--cfg job` answer at once: what needs torch or transformers is imported where it is used.

    Args:
        module: ``globals()`` of the module; its docstring begins with what the command does.
        root: root section of the configuration.
        runner: ``module:class`` of what runs a configuration.
        public_names: further public names of the runner's module that the command's module offers.
        config_name: name of the YAML file, by default that of ``root``.
        restarts: see :func:`verl.trainer.config.command_line.command`.

    Returns:
        the function that runs a configuration, typed or composed by Hydra, on Ray or in this process
        (``trainer.controller``); the command line; the module's ``__getattr__``.
    """
    home, _, class_name = runner.partition(":")
    loaded = on_first_use(module["__name__"], dict.fromkeys([class_name, *public_names], home))

    def run(config: ConfigT | DictConfig) -> None:
        """Run one configuration, on Ray or in this process (``trainer.controller``)."""
        if env.rank() > 0:  # under torchrun: rank 0 drives, and starts the other ranks through Ray
            return
        from verl.trainer.config.load import load_config

        checked = load_config(config, root, for_program=True) if isinstance(config, DictConfig) else config
        with driving(checked):
            loaded(class_name)().run(checked)

    def main() -> None:
        """Run the command line."""
        if env.rank() > 0:  # as in `run`, before the configuration is composed
            return
        command(run, config_name or CONFIG_NAMES[root], root, restarts=restarts, module=module)()

    return run, main, loaded
