"""Public path of sequence parallelism around workers of one's own, from :mod:`verl.compat.toolkit.ulysses`."""

from verl.compat.toolkit.ulysses import FSDPUlyssesShardingManager as FSDPUlyssesShardingManager
