from verl.config.actor import ActorConfig as ActorConfig
from verl.config.actor import FSDPActorConfig as FSDPActorConfig
from verl.config.actor import PolicyLossConfig as PolicyLossConfig
