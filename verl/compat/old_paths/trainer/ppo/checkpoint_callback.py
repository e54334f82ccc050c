"""Users' code after each saved checkpoint."""

from verl.compat.toolkit.imports import load_class_from_fqn as load_class_from_fqn
from verl.trainer.checkpoint_callback import CheckpointCallback as CheckpointCallback
from verl.trainer.checkpoint_callback import build_checkpoint_callback as build_checkpoint_callback
