"""All that is taken from megatron-core 0.16, in one place; it has no types that hold, so all of it is ``Any``."""

import logging
import warnings
from importlib import import_module
from typing import Any

import torch


def _module(name: str) -> Any:
    with warnings.catch_warnings():
        # It warns that Apex and TransformerEngine are missing; nothing here uses them.
        warnings.simplefilter("ignore")
        return import_module(f"megatron.core.{name}")


logging.getLogger("megatron.core").setLevel(logging.WARNING)  # it logs the parameters of each bucket
for _name in ("reduce_scatter_tensor", "all_gather_into_tensor"):  # PyTorch's older names, which it calls
    warnings.filterwarnings("ignore", rf".*{_name}. is deprecated", FutureWarning)

parallel_state = _module("parallel_state")
# It lets torch.load make objects of more classes, from anybody's files. That is undone.
_more = _module("safe_globals").SAFE_GLOBALS
_safe = [entry for entry in torch.serialization.get_safe_globals() if entry not in _more]
torch.serialization.clear_safe_globals()
torch.serialization.add_safe_globals(_safe)
tensor_parallel = _module("tensor_parallel")

DistributedDataParallel = _module("distributed").DistributedDataParallel
DistributedDataParallelConfig = _module("distributed").DistributedDataParallelConfig
finalize_model_grads = _module("distributed").finalize_model_grads
get_forward_backward_func = _module("pipeline_parallel").get_forward_backward_func

GPTModel = _module("models.gpt").GPTModel
TransformerConfig = _module("transformer").TransformerConfig
PackedSeqParams = _module("packed_seq_params").PackedSeqParams
ModuleSpec = _module("transformer.spec_utils").ModuleSpec
AttnMaskType = _module("transformer.enums").AttnMaskType
SelfAttention = _module("transformer.attention").SelfAttention
SelfAttentionSubmodules = _module("transformer.attention").SelfAttentionSubmodules
MLP = _module("transformer.mlp").MLP
MoELayer = _module("transformer.moe.moe_layer").MoELayer
MoESubmodules = _module("transformer.moe.moe_layer").MoESubmodules
TopKRouter = _module("transformer.moe.router").TopKRouter
SequentialMLP = _module("transformer.moe.experts").SequentialMLP
SharedExpertMLP = _module("transformer.moe.shared_experts").SharedExpertMLP
token_dispatcher = _module("transformer.moe.token_dispatcher")
MultiTokenPredictionLayer = _module("transformer.multi_token_prediction").MultiTokenPredictionLayer
MultiTokenPredictionLayerSubmodules = _module("transformer.multi_token_prediction").MultiTokenPredictionLayerSubmodules
LanguageModelEmbedding = _module("models.common.embeddings.language_model_embedding").LanguageModelEmbedding
MLPSubmodules = _module("transformer.mlp").MLPSubmodules
TransformerBlockSubmodules = _module("transformer.transformer_block").TransformerBlockSubmodules
get_num_layers_to_build = _module("transformer.transformer_block").get_num_layers_to_build
TransformerLayer = _module("transformer.transformer_layer").TransformerLayer
get_transformer_layer_offset = _module("transformer.transformer_layer").get_transformer_layer_offset
TransformerLayerSubmodules = _module("transformer.transformer_layer").TransformerLayerSubmodules
get_bias_dropout_add = _module("fusions.fused_bias_dropout").get_bias_dropout_add
