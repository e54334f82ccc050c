"""The newest checkpoint of a run, from :mod:`verl.compat.toolkit.checkpoints`."""

from verl.compat.toolkit.checkpoints import BaseCheckpointManager as BaseCheckpointManager
from verl.compat.toolkit.checkpoints import find_latest_ckpt_path as find_latest_ckpt_path
from verl.compat.toolkit.checkpoints import get_checkpoint_tracker_filename as get_checkpoint_tracker_filename
from verl.compat.toolkit.checkpoints import should_save_ckpt_esi as should_save_ckpt_esi
