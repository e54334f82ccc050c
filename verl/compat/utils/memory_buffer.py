"""A buffer of trajectories, from :mod:`verl.protocol.replay_buffer`."""

from verl.base.doors import absent_names
from verl.protocol.replay_buffer import ReplayBuffer as ReplayBuffer
from verl.protocol.replay_buffer import Replayed as Replayed

__getattr__ = absent_names(__name__)
