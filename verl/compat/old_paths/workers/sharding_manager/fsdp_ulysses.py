"""Public path of sequence parallelism around workers of one's own, from :mod:`verl.toolkit.ulysses`."""

from verl.toolkit.ulysses import FSDPUlyssesShardingManager as FSDPUlyssesShardingManager
