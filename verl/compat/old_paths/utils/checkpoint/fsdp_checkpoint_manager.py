"""Checkpoints of an FSDP2 model, from :mod:`verl.toolkit.checkpoints`."""

from verl.toolkit.checkpoints import FSDPCheckpointManager as FSDPCheckpointManager
