"""What a run survives, and how: restarts, states held in memory, the watchdog, damaged files, bad numbers."""

from __future__ import annotations

from typing import Literal

from verl.base_config import BaseConfig, section, setting


@section
class RecoveryConfig(BaseConfig):
    """When something breaks."""

    max_restarts: int = setting(3, ge=0)
    """Restarts of the workers without a finished step between them, before the run stops; 0 stops at the first loss."""
    backoff_s: float = setting(1.0, ge=0)
    """Pause before the first restart, in seconds; each further one waits twice as long, up to a minute."""
    snapshot_freq: int = setting(1, ge=0)
    """Steps between states held in memory to go on from (on Ray); 0 goes on from the newest checkpoint on disk."""
    hang_timeout_s: float | None = setting(1800.0, gt=0)
    """Longest that one call of a worker may take, in seconds; a longer one counts as hung. Null waits for ever."""
    driver_restarts: int = setting(3, ge=0)
    """How often a driver that a signal kills is started again (on Linux, from the command line); 0 never."""
    on_damaged_checkpoint: Literal["previous", "stop"] = setting("previous")
    """Go on from the checkpoint before a damaged one, naming it, or stop."""
    on_failed_save: Literal["retry", "stop"] = setting("retry")
    """A checkpoint that cannot be written is tried again after the next step (the last one must succeed), or stops."""
    max_bad_steps: int | None = setting(3, ge=1)
    """So many steps in a row whose update was left out (loss or gradient not finite) stop the run; null never does."""
    bad_batch_dir: str | None = setting(None, path=True)
    """Folder for the batches of such steps, the newest few; null takes `bad_batches` in the checkpoint folder."""
    split_on_out_of_memory: bool = setting(True)
    """Cut a micro-batch that does not fit the memory in two, try again, and remember the size that fitted."""
