"""megatron-core's model of a Transformers folder, as this rank holds it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PretrainedConfig

from verl.checkpoint.core_weights import DistFiles
from verl.config import HFModelConfig, McoreEngineConfig
from verl.config.megatron import HYBRIDS
from verl.config.megatron_flags import RECOMPUTE
from verl.errors import ConfigError
from verl.plugins.megatron.adapters import add_adapters, first_values, need_gradients, shape_by_expert
from verl.plugins.megatron.delta_net import DeltaShape, GatedDeltaNet
from verl.plugins.megatron.experts import Experts, expert_layer
from verl.plugins.megatron.files import ModelFiles
from verl.plugins.megatron.flags import transformer_fields
from verl.plugins.megatron.groups import Layout
from verl.plugins.megatron.latent import LatentAttention, LatentShape
from verl.plugins.megatron.layers import CausalAttention, DecoderModel, HiddenHead, RMSNorm, Rotation, freeze_row
from verl.plugins.megatron.library import (
    MLP,
    AttnMaskType,
    MLPSubmodules,
    ModuleSpec,
    SelfAttention,
    SelfAttentionSubmodules,
    TransformerBlockSubmodules,
    TransformerConfig,
    TransformerLayer,
    TransformerLayerSubmodules,
    get_bias_dropout_add,
    get_num_layers_to_build,
    get_transformer_layer_offset,
    parallel_state,
    tensor_parallel,
)
from verl.plugins.megatron.prediction import HeadWeights
from verl.plugins.megatron.vision import DeepstackLayer, build_tower
from verl.plugins.megatron.weights import Division, ExpertDivision, ShardRegion, regions_of
from verl.utils.model import torch_dtype
from verl.utils.model_facts.megatron_fit import misfits
from verl.workers.engine.model.adapters import AdapterTarget, adapter_layers, is_adapter, own_name, targets_of
from verl.workers.engine.model.headed import HeadedModel, ModelType, build_model, own_state, trained_parameters


@dataclass(frozen=True)
class BuiltModel:
    """A model and where its weights are."""

    pieces: nn.ModuleList
    """:class:`DecoderModel` each: this rank's layers and its part of their matrices. With interleaved pipelines there
    are several, of which each has consecutive layers; else one."""
    skeleton: HeadedModel
    """The Transformers model, with adapters that of peft: config, names and shapes of its weights, no values."""
    regions: list[ShardRegion]
    """The boxes of weights on this rank, by the names of ``skeleton``."""
    shapes: dict[str, tuple[int, ...]]
    """Shapes of all weights, by name in ``skeleton``, tied ones once; adapters of experts have three dimensions."""
    frozen: frozenset[str]
    """Names of the weights that are not trained."""
    targets: Mapping[str, AdapterTarget]
    """Weight that each layer with an adapter adapts; see :func:`~verl.workers.engine.model.adapters.targets_of`."""
    heads: HeadWeights
    """Weights of the heads of multi-token prediction, where they are trained."""

    @property
    def hf_config(self) -> PretrainedConfig:
        """The Transformers config."""
        return self.skeleton.hf.config

    @property
    def text_config(self) -> PretrainedConfig:
        """Config of the decoder, which is a part of the config of a model with images."""
        return self.hf_config.get_text_config()

    @property
    def first(self) -> Any:
        """The piece that has the embedding, on the first pipeline stage."""
        return self.pieces[0]

    @property
    def last(self) -> Any:
        """The piece that has the head, on the last pipeline stage."""
        return self.pieces[-1]

    def head_weight(self) -> Tensor:
        """Return this rank's rows of the output projection, on the last pipeline stage."""
        head = self.last.output_layer
        return self.last.embedding.word_embeddings.weight if head.weight is None else head.weight


def build(
    model_type: ModelType,
    config: HFModelConfig,
    engine: McoreEngineConfig,
    layout: Layout,
    device: torch.device,
    frozen: Sequence[str] = (),
) -> BuiltModel:
    """Build this rank's part of the model in the folder ``config.path``, with its weights.

    Parts of module names in ``frozen``, such as ``visual``, are not trained.

    Raises:
        ConfigError: the folder is missing, holds another kind of model, or one that this layout cannot divide.
    """
    dtype, is_trained = torch_dtype(engine.dtype), not engine.forward_only
    with torch.device("meta"):
        skeleton = build_model(model_type, config, dtype, with_weights=False, is_trained=is_trained, frozen=frozen)
    hf = skeleton.hf.config.get_text_config()
    _check_fit(skeleton.hf.config, config, engine)
    shapes = {name: tuple(tensor.shape) for name, tensor in own_state(skeleton).items()}
    named = {own_name(name): name for name in shapes if not is_adapter(name)}
    base = {model_name: shapes[name] for model_name, name in named.items()}
    experts = Experts.from_config(hf)
    is_tied = model_type == "language_model" and "lm_head.weight" not in base
    heads = HeadWeights.from_model(hf, config, base, is_trained)
    shapes, base = {**shapes, **heads.shapes}, {**base, **heads.shapes}
    flags = transformer_fields(engine, layout, device, experts is not None)
    settings = _transformer_config(hf, config, engine, layout, dtype, experts, base, flags)
    # Transformers computes no gradient of the padding token's embedding; megatron-core has no such index.
    padding: Any = skeleton.hf.get_input_embeddings().padding_idx
    pieces = nn.ModuleList()
    for piece_index in range(layout.pieces):
        piece = _gpt_model(skeleton, settings, layout, is_tied, experts, piece_index)
        if piece.post_process:
            _replace_head(piece, skeleton, settings)
            piece.heads = heads.build(piece, _layer_specs(skeleton, settings, experts)[-1], config.mtp, padding)
        if piece.pre_process and skeleton.vision is not None:
            piece.visual = build_tower(
                skeleton.hf.base_model, dtype, is_trained and config.enable_gradient_checkpointing
            )
        _set_rotation(piece, skeleton)
        _set_windows(piece, hf)
        for name, parameter in piece.named_parameters():
            # Gradients of experts are added up over all ranks that hold them. megatron-core marks them only where
            # expert_model_parallel_size is above 1. These ranks also differ from those of the layers where an expert
            # has fewer ranks than a layer.
            if ".experts." in name:
                parameter.allreduce = layout.expert == 1 and layout.expert_tensor == layout.tensor
        pieces.append(piece)
    first: Any = pieces[0]
    if first.pre_process and padding is not None:
        freeze_row(first.embedding.word_embeddings, padding)
    if first.pre_process and not first.post_process:
        # megatron-core keeps its gradient in a buffer of its own, where the last stage has a copy.
        first.embedding.word_embeddings.weight.shared_embedding = is_tied or heads.count > 0
    division = Division.from_config(hf, parallel_state.get_tensor_model_parallel_group(), _expert_division())
    own_regions = regions_of(base, pieces, division, is_tied)
    regions = [replace(region, name=named.get(region.name, region.name)) for region in own_regions]
    count = None if experts is None else experts.count
    shapes = {name: shape_by_expert(name, shape, count) for name, shape in shapes.items()}
    files = _first_weights(config, engine, hf, heads)
    _load(pieces, regions, shapes, files, is_new_head=model_type != "language_model")
    trained, targets = trained_parameters(skeleton), {}
    if is_trained and config.has_adapters:
        targets = targets_of(adapter_layers(skeleton))
        regions += add_adapters(pieces, regions, targets, shapes)
        _fill(pieces, [region for region in regions if region.name in trained], shapes, config, engine.seed, trained)
        if first.pre_process:
            need_gradients(first.embedding)
    parameters = dict(pieces.to(device).named_parameters())
    for weight in regions:
        parameters[weight.parameter].requires_grad_(weight.name in trained or weight.name in heads.trained)
    frozen_weights = frozenset(shapes.keys() - trained.keys() - heads.trained)
    return BuiltModel(pieces, skeleton, regions, shapes, frozen_weights, targets, heads)


def _check_fit(hf: PretrainedConfig, config: HFModelConfig, engine: McoreEngineConfig) -> None:
    for problem in misfits(hf.to_dict(), engine, "megatron", "strategy"):
        raise ConfigError(str(problem))
    if not engine.forward_only and config.has_adapters and hf.model_type in HYBRIDS:
        raise ConfigError(
            f"model.lora_rank={config.lora_rank}: strategy=megatron has no adapters of gated attention and gated delta "
            f"nets, the layers of {hf.model_type}. Set lora_rank=0, or use strategy=fsdp2."
        )


def _first_weights(
    config: HFModelConfig, engine: McoreEngineConfig, hf: PretrainedConfig, heads: HeadWeights
) -> ModelFiles | DistFiles:
    if not engine.use_dist_checkpointing:
        return ModelFiles(config.path)
    if heads.count:
        raise ConfigError(
            "model.mtp.enable_train=true, and heads of multi-token prediction are not read from megatron-core's own "
            "checkpoints. Set megatron.use_dist_checkpointing=false, or enable_train=false."
        )
    return DistFiles(str(engine.dist_checkpointing_path), engine.dist_checkpointing_prefix, hf)


def _expert_division() -> ExpertDivision:
    return ExpertDivision(
        parallel_state.get_expert_model_parallel_world_size(),
        parallel_state.get_expert_model_parallel_rank(),
        parallel_state.get_expert_tensor_parallel_world_size(),
        parallel_state.get_expert_tensor_parallel_rank(),
    )


def _transformer_config(
    hf: PretrainedConfig,
    model: HFModelConfig,
    engine: McoreEngineConfig,
    layout: Layout,
    dtype: torch.dtype,
    experts: Experts | None,
    shapes: Mapping[str, tuple[int, ...]],
    flags: dict[str, object],
) -> Any:
    recompute: dict[str, object] = {}
    if model.enable_gradient_checkpointing and not engine.forward_only:
        recompute = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
    if "recompute_granularity" in engine.override_transformer_config and not engine.forward_only:
        recompute = {key: engine.override_transformer_config.get(key) for key in RECOMPUTE}
    return TransformerConfig(
        num_layers=hf.num_hidden_layers,
        hidden_size=hf.hidden_size,
        # Without dense layers some configs lack it.
        ffn_hidden_size=getattr(hf, "intermediate_size", None) or hf.moe_intermediate_size,
        num_attention_heads=hf.num_attention_heads,
        num_query_groups=hf.num_key_value_heads,
        kv_channels=getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads,
        normalization="RMSNorm",
        layernorm_epsilon=hf.rms_norm_eps,
        qk_layernorm=any(name.endswith(".self_attn.q_norm.weight") for name in shapes),
        add_qkv_bias=any(name.endswith(".self_attn.q_proj.bias") for name in shapes),
        attention_output_gate=hf.model_type in HYBRIDS,
        layernorm_zero_centered_gamma=hf.model_type in HYBRIDS,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=functional.silu,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        params_dtype=dtype,
        pipeline_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        virtual_pipeline_model_parallel_size=layout.pieces if layout.pieces > 1 else None,
        context_parallel_size=layout.context,
        sequence_parallel=engine.sequence_parallel and layout.tensor > 1,
        variable_seq_lengths=layout.pipeline > 1,
        **({} if experts is None else experts.settings(layout)),
        # Interleaved stages send in both directions at once. In batches, two stages would confuse the sizes of the two
        # directions.
        overlap_p2p_comm=layout.pieces > 1,
        batch_p2p_comm=layout.pieces == 1,
        batch_p2p_sync=False,  # a work-around for old versions of NCCL
        cuda_graph_scope=[],
        use_cpu_initialization=True,  # every weight is read from the folder, so none is drawn
        perform_initialization=False,
        # Of sizes that vary; it is asked for without experts too.
        **{"moe_token_dispatcher_type": "alltoall", **flags},
        **recompute,
    )


def _gpt_model(
    skeleton: HeadedModel, settings: Any, layout: Layout, is_tied: bool, experts: Experts | None, piece_index: int
) -> Any:
    """Build one piece of this rank's part; ``piece_index`` counts from 0."""
    hf = skeleton.hf.config.get_text_config()
    stage = piece_index if layout.pieces > 1 else None
    first, count = get_transformer_layer_offset(settings, stage), get_num_layers_to_build(settings, stage)
    layers = _layer_specs(skeleton, settings, experts)[first : first + count]
    return DecoderModel(
        config=settings,
        transformer_layer_spec=TransformerBlockSubmodules(layer_specs=layers, layer_norm=RMSNorm),
        vocab_size=-(-hf.vocab_size // layout.tensor) * layout.tensor,  # padded: each rank has as many rows
        max_sequence_length=hf.max_position_embeddings,
        pre_process=piece_index == 0 and parallel_state.is_pipeline_first_stage(ignore_virtual=True),
        post_process=piece_index == layout.pieces - 1 and parallel_state.is_pipeline_last_stage(ignore_virtual=True),
        share_embeddings_and_output_weights=is_tied,
        position_embedding_type="rope",
        vp_stage=stage,
    )


def _layer_specs(skeleton: HeadedModel, settings: Any, experts: Experts | None) -> list[Any]:
    """Return the specifications of all layers of the model."""
    column, row = tensor_parallel.ColumnParallelLinear, tensor_parallel.RowParallelLinear
    norm = RMSNorm if settings.qk_layernorm else None
    attention = ModuleSpec(
        module=SelfAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=SelfAttentionSubmodules(
            linear_qkv=column, core_attention=CausalAttention, linear_proj=row, q_layernorm=norm, k_layernorm=norm
        ),
    )
    if (latent := LatentShape.from_model(skeleton.hf)) is not None:
        attention = ModuleSpec(module=LatentAttention, params={"shape": latent, "attn_mask_type": AttnMaskType.causal})
    dense = ModuleSpec(module=MLP, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row))
    hf = skeleton.hf.config.get_text_config()
    attentions = [attention] * settings.num_layers
    if hf.model_type in HYBRIDS:
        delta_net = ModuleSpec(module=GatedDeltaNet, params={"shape": DeltaShape.from_config(hf)})
        attentions = [delta_net if kind == "linear_attention" else attention for kind in hf.layer_types]

    def layer(attention: object, mlp: object) -> Any:
        return ModuleSpec(
            module=TransformerLayer if skeleton.vision is None else DeepstackLayer,
            submodules=TransformerLayerSubmodules(
                input_layernorm=RMSNorm,
                self_attention=attention,
                self_attn_bda=get_bias_dropout_add,
                pre_mlp_layernorm=RMSNorm,
                mlp=mlp,
                mlp_bda=get_bias_dropout_add,
            ),
        )

    sparse = (False,) * settings.num_layers if experts is None else experts.sparse
    return [
        layer(attention, expert_layer(experts) if experts and is_sparse else dense)
        for attention, is_sparse in zip(attentions, sparse, strict=True)
    ]


def _replace_head(module: Any, skeleton: HeadedModel, settings: Any) -> None:
    weight, bias = module.output_layer.weight, None
    if skeleton.head_name != "lm_head":
        head, dtype = skeleton.head, settings.params_dtype
        weight = nn.Parameter(torch.zeros(head.weight.shape, dtype=dtype))
        bias = None if head.bias is None else nn.Parameter(torch.zeros(head.bias.shape, dtype=dtype))
    module.output_layer = HiddenHead(weight, bias, settings.sequence_parallel)


def _set_rotation(module: Any, skeleton: HeadedModel) -> None:
    """Use the rotary frequencies of the Transformers model, so that every kind of RoPE scaling is supported."""
    decoder: Any = skeleton.hf.get_decoder()
    with torch.device("cpu"):
        rotation = type(decoder.rotary_emb)(skeleton.hf.config.get_text_config())
        frequencies, axes = rotation.inv_freq.detach().clone(), None
        if skeleton.vision is not None:
            # Transformers chooses angles of three axes; from the axes' numbers it chooses the numbers.
            indices = torch.arange(3.0).view(3, 1, 1, 1).repeat(1, 1, 1, len(frequencies))
            axes = rotation.recomposition_frequencies(indices)[0, 0, : len(frequencies)].long()
    assert rotation.attention_scaling == 1.0, "megatron_fit refuses it"
    module.rotary_pos_emb = Rotation(frequencies, axes)


def _set_windows(module: Any, hf: PretrainedConfig) -> None:
    """Set the number of tokens that the attention of each layer sees."""
    window = getattr(hf, "sliding_window", None)
    kinds = getattr(hf, "layer_types", None) or ["sliding_attention"] * hf.num_hidden_layers
    for layer in module.decoder.layers:
        if (kind := kinds[layer.layer_number - 1]) != "linear_attention":
            layer.self_attention.core_attention.set_window(window if kind == "sliding_attention" else None)


def _load(
    module: nn.Module,
    regions: list[ShardRegion],
    shapes: dict[str, tuple[int, ...]],
    files: ModelFiles | DistFiles,
    is_new_head: bool,
) -> None:
    """Fill the parameters from the files; a scalar head that they lack stays zero."""
    parameters = dict(module.named_parameters())
    with torch.no_grad():
        for weight in regions:
            name = own_name(weight.name)
            if is_new_head and name.startswith("score.") and name not in files:
                continue
            weight.write(parameters[weight.parameter], files.read(name, shapes[weight.name], weight.box))


def _fill(
    module: nn.Module,
    regions: list[ShardRegion],
    shapes: Mapping[str, tuple[int, ...]],
    config: HFModelConfig,
    seed: int,
    trained: Mapping[str, Tensor],
) -> None:
    """Fill the adapters, and a head that was saved with them."""
    values_of, parameters = first_values(config, seed, trained), dict(module.named_parameters())
    with torch.no_grad():
        for weight in regions:
            if (values := values_of(weight.name)) is not None:
                box = tuple(slice(first, first + count) for first, count in zip(*weight.box, strict=True))
                weight.write(parameters[weight.parameter], values.view(shapes[weight.name])[box])
