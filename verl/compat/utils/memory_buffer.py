"""A buffer of trajectories, from :mod:`verl.protocol.replay_buffer`."""

from verl.base.doors import old_names
from verl.protocol.replay_buffer import ReplayBuffer as ReplayBuffer
from verl.protocol.replay_buffer import Replayed as Replayed

__getattr__ = old_names(__name__)
