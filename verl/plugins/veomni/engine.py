"""Engines with VeOmni's models: FSDP2 shards, trains and stores them as it does Transformers' own."""

from __future__ import annotations

from transformers import PreTrainedModel

from verl.backends.cuda.layers import fuses_layers
from verl.plugins.veomni.library import backbone_class
from verl.utils.model import hf_config_of
from verl.workers.engine.base import EngineRegistry
from verl.workers.engine.fsdp.engine import FSDPEngine, FSDPRewardModelEngine, FSDPValueModelEngine


@EngineRegistry.register("language_model", "veomni")
class VeOmniEngine(FSDPEngine):
    """Engine of a language model; arguments as of :class:`~verl.workers.engine.FSDPEngine`."""

    def backbone_class(self) -> type[PreTrainedModel]:
        """See :meth:`ShardedModel.backbone_class`."""
        is_gpu = self.device.type == "cuda"
        experts = self.engine_config.moe_implementation or ("fused_triton" if is_gpu else "eager")
        liger = is_gpu and fuses_layers(self.model_config.use_liger)
        return backbone_class(hf_config_of(self.model_config), experts, liger)


@EngineRegistry.register("value_model", "veomni")
class VeOmniValueModelEngine(FSDPValueModelEngine):
    """Engine of a value model."""

    backbone_class = VeOmniEngine.backbone_class


@EngineRegistry.register("reward_model", "veomni")
class VeOmniRewardModelEngine(FSDPRewardModelEngine):
    """Engine of a discriminative reward model."""

    backbone_class = VeOmniEngine.backbone_class
