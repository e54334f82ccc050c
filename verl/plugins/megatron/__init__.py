"""The Megatron training engine: tensor, pipeline and data parallel models by megatron-core.

Importing this package needs megatron-core (the extra ``megatron``); the registry imports it when
``strategy=megatron`` asks for it.
"""

from verl.plugins.megatron.engine import MegatronEngine

__all__ = ["MegatronEngine"]
