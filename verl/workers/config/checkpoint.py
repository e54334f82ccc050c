"""What a checkpoint holds."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from verl.base_config import BaseConfig, OneOrMany, section, setting

CheckpointPart = Literal["model", "optimizer", "extra", "hf_model"]


def _same_as_saved(data: dict[str, Any]) -> tuple[str, ...]:
    return data["save_contents"]


@section
class CheckpointConfig(BaseConfig):
    """What is written at every save, and what is read back on resume."""

    hydra_target: ClassVar[str] = "verl.trainer.config.CheckpointConfig"

    save_contents: Annotated[tuple[CheckpointPart, ...], OneOrMany] = setting(("model", "optimizer", "extra"))
    """What to save: `model` shards, `optimizer` state, `extra` (schedule, random states), `hf_model` (safetensors)."""
    load_contents: Annotated[tuple[CheckpointPart, ...], OneOrMany] = setting(
        factory=_same_as_saved, interpolation="${.save_contents}"
    )
    """What to read back on resume; by default all that was saved."""
    async_save: bool = setting(False)
    """Copy the state and write it while training goes on, with memory for the copy; else a step waits for the disk."""
