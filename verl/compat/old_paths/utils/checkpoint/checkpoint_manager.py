"""The newest checkpoint of a run, from :mod:`verl.toolkit.checkpoints`."""

from verl.base.doors import old_names
from verl.toolkit.checkpoints import BaseCheckpointManager as BaseCheckpointManager
from verl.toolkit.checkpoints import find_latest_ckpt_path as find_latest_ckpt_path
from verl.toolkit.checkpoints import get_checkpoint_tracker_filename as get_checkpoint_tracker_filename
from verl.toolkit.checkpoints import should_save_ckpt_esi as should_save_ckpt_esi

__getattr__ = old_names(__name__)
