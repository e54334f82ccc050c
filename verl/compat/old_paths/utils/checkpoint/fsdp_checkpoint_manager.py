"""Checkpoints of an FSDP2 model, from :mod:`verl.compat.toolkit.checkpoints`."""

from verl.compat.toolkit.checkpoints import FSDPCheckpointManager as FSDPCheckpointManager
