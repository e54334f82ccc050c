"""Public address of :mod:`verl.config.actor`."""

from verl.config.actor import ActorConfig as ActorConfig
from verl.config.actor import FSDPActorConfig as FSDPActorConfig
from verl.config.actor import McoreActorConfig as McoreActorConfig
from verl.config.actor import PolicyLossConfig as PolicyLossConfig
from verl.config.actor import RouterReplayConfig as RouterReplayConfig
