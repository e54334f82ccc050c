"""Users' code that runs after each saved checkpoint, such as an upload or an entry in a registry of models."""

from __future__ import annotations

from typing import Any

from verl.base.import_utils import user_code
from verl.errors import ConfigError
from verl.utils.class_entries import load_class

SETTING = "trainer.checkpoint_callback_class"


class CheckpointCallback:
    """Base class of ``trainer.checkpoint_callback_class``; it does nothing.

    Args:
        config: the configuration of the run, a DictConfig.
    """

    def __init__(self, config: Any = None) -> None:
        self.config = config

    def on_save(
        self, trainer: Any, global_step: int, checkpoint_dir: str, async_save: bool = False, **kwargs: Any
    ) -> None:
        """Run in the driver when a checkpoint is complete; an error ends the run.

        Args:
            trainer: the trainer of the run.
            global_step: the step that was saved.
            checkpoint_dir: its folder, ``.../global_step_N``.
            async_save: whether files may still be missing; always false here.
            **kwargs: none yet.
        """


def build_checkpoint_callback(config: Any) -> CheckpointCallback:
    """Create the callback that a configuration names, or one that does nothing.

    Raises:
        ConfigError: there is no such class, it cannot be created, or it has no ``on_save``.
    """
    address = config["trainer"].get("checkpoint_callback_class")
    if address is None:
        return CheckpointCallback(config)
    cls: Any = load_class(address, object, SETTING)
    if not callable(getattr(cls, "on_save", None)):
        raise ConfigError(
            f"{SETTING}={address}: this is no class with a method on_save. Derive it from "
            "verl.trainer.ppo.checkpoint_callback.CheckpointCallback."
        )
    with user_code(f"{SETTING}={address} cannot be created"):
        return cls(config=config)
