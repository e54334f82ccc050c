from verl.protocol.replay_buffer import ReplayBuffer as ReplayBuffer
from verl.protocol.replay_buffer import Replayed as Replayed
