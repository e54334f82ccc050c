"""Public address of :mod:`verl.config.actor`."""

from verl.compat.import_hooks import old_names
from verl.config.actor import ActorConfig as ActorConfig
from verl.config.actor import FSDPActorConfig as FSDPActorConfig
from verl.config.actor import McoreActorConfig as McoreActorConfig
from verl.config.actor import PolicyLossConfig as PolicyLossConfig
from verl.config.actor import RouterReplayConfig as RouterReplayConfig

__getattr__ = old_names(__name__)
