"""The trained module, a Transformers backbone and a head that is computed at chosen tokens only, and how to build it.

Parameters keep their Transformers names (``model.layers.0...``, ``lm_head.weight``), so that checkpoints, exports and
weight updates of rollout engines need no renaming.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)

from verl.config import HFModelConfig
from verl.errors import ConfigError
from verl.utils.folder_weights import FolderWeights
from verl.utils.image_reward_models import sequence_classifier, token_classifier
from verl.utils.model import (
    auto_of,
    empty_causal_lm,
    eos_token_ids,
    hf_config_of,
    load_causal_lm,
    load_hf_config,
    load_pretrained,
    rope_types,
    switch_off_dropout,
    torch_dtype,
)
from verl.utils.model_facts.config_fields import layers_beyond_attention
from verl.utils.tokenizer import tokenizer_of
from verl.utils.transformers_private import (
    forget_ties,
    from_config,
    layer_class_names,
    no_init_weights,
    sequence_classifier_of,
)
from verl.utils.ulysses import validate_ulysses_config
from verl.vision.families import FAMILIES, VisionConfig
from verl.vision.model import hidden_states
from verl.workers.engine.model.adapters import adapter_layers, add_adapters, merged, targets_of, with_adapters
from verl.workers.engine.model.divergence import (
    DivergenceStatistics,
    FullDivergence,
    OutputMatrix,
    vocabulary_divergence,
)
from verl.workers.engine.model.head import (
    NO_TOP,
    LogitRule,
    TokenStatistics,
    TopTokens,
    over_kept,
    token_log_probs,
)
from verl.workers.engine.model.inputs import ModelInputs
from verl.workers.engine.model.outputs import language_outputs
from verl.workers.engine.model.vocab_parallel import vocab_parallel_log_probs, vocabulary_rows, with_summed_gradient

logger = logging.getLogger(__name__)

ModelType = Literal["language_model", "value_model", "reward_model"]

# Ending of an architecture's name: the class of Transformers that loads it.
_CLASSIFIERS = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}


class HeadedModel(nn.Module):
    """Backbone and head of a Transformers model, under their Transformers names.

    Args:
        hf: the Transformers model; also kept for its config and for export.
        head_name: attribute of ``hf`` that is the head, an ``nn.Linear`` on hidden states.
        stored_dtype: precision of exported weights; by default that of ``hf``.
        unused_dropout: rates of the model's config that are not used here, but are exported.
    """

    def __init__(
        self,
        hf: PreTrainedModel,
        head_name: str,
        stored_dtype: torch.dtype | None = None,
        unused_dropout: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        super().__init__()
        self.stored_dtype = stored_dtype or hf.dtype
        self.unused_dropout = unused_dropout
        self._hf = (hf,)  # in a tuple, so that it is no submodule; its parts are registered below
        self.backbone_name = hf.base_model_prefix
        self.head_name = head_name
        self.add_module(self.backbone_name, hf.base_model)
        self.add_module(head_name, getattr(hf, head_name))
        self.rule = LogitRule.from_config(hf.config)
        self.vision = VisionConfig.from_config(hf.config)
        """Settings for passes with images; None for a model of text."""

    @property
    def hf(self) -> PreTrainedModel:
        """The Transformers model, which shares its parameters with this module."""
        return self._hf[0]

    @property
    def head(self) -> nn.Linear:
        """The projection from hidden states to logits or to a scalar."""
        return self.get_submodule(self.head_name)  # pyright: ignore[reportReturnType]

    def forward(
        self,
        inputs: ModelInputs,
        outputs: frozenset[str],
        temperature: float,
        top: TopTokens = NO_TOP,
        divergence: FullDivergence | None = None,
    ) -> dict[str, Tensor]:
        """Compute ``outputs`` at the N chosen tokens, each (N,) fp32 if nothing else is said.

        Language models have those of :func:`~verl.workers.engine.model.outputs.language_outputs`, and scalar heads
        ``values`` or ``scores``. Checks of a model use ``reference``, the log-probs by the Transformers model's own
        forward, alone.
        """
        arguments: dict[str, object] = {
            "input_ids": inputs.input_ids,
            "attention_mask": inputs.attention_mask,
            "position_ids": inputs.position_ids,
            "use_cache": False,
        }
        if inputs.packing is not None:
            arguments["packing"] = inputs.packing
        if inputs.padding is not None:
            arguments["padding"] = inputs.padding
        if "reference" in outputs:
            logits = self.hf(**arguments).logits.flatten(0, 1).index_select(0, inputs.take).float()
            return {"reference": logits.log_softmax(-1).gather(-1, inputs.targets.unsqueeze(-1)).squeeze(-1)}
        backbone = self.get_submodule(self.backbone_name)
        if inputs.images is None:
            hidden = backbone(**arguments).last_hidden_state
        else:
            hidden = hidden_states(backbone, arguments, inputs.images)
        states = hidden.flatten(0, 1).index_select(0, inputs.take)  # (N, hidden), or this rank's of them
        columns = self._at(states, inputs, outputs, temperature, top, divergence)
        return columns if inputs.share is None else {name: inputs.share.collect(x) for name, x in columns.items()}

    def _at(
        self,
        states: Tensor,
        inputs: ModelInputs,
        outputs: frozenset[str],
        temperature: float,
        top: TopTokens,
        divergence: FullDivergence | None,
    ) -> dict[str, Tensor]:
        """Compute ``outputs`` from the hidden states of the chosen tokens, (n, hidden)."""
        head, rule = self.head, self.rule
        if head.out_features == 1 and outputs != {"hidden"}:
            scalars: dict[str, Any] = dict.fromkeys(outputs, head(states).squeeze(-1).float())
            return scalars

        weight, bias, group = head.weight, head.bias, None
        size = min(head.out_features, top.below or head.out_features)
        hidden = states
        if isinstance(weight, DTensor):  # divided over tensor-parallel ranks
            group, hidden = weight.device_mesh.get_group(), with_summed_gradient(states, weight.device_mesh)
            weight, bias = vocabulary_rows(weight), vocabulary_rows(bias) if isinstance(bias, DTensor) else None

        elif size < len(weight):
            weight, bias = weight[:size], None if bias is None else bias[:size]

        def statistics(**settings: Any) -> TokenStatistics:
            if inputs.kept_ids is not None:
                settings |= {"candidates": inputs.kept_ids.clamp(min=0)}
            settings |= {"bias": bias, "rule": rule, "temperature": temperature}
            if group is None:
                full = token_log_probs(hidden, weight, targets=inputs.targets, **settings)
            else:
                full = vocab_parallel_log_probs(hidden, weight, inputs.targets, group, size, **settings)
            return full if inputs.kept_ids is None else over_kept(full, inputs.kept_ids)

        def from_teachers() -> DivergenceStatistics:
            policy = OutputMatrix(weight=weight, bias=bias, rule=rule, temperature=temperature)
            teachers = inputs.teacher_hidden, inputs.teacher_index
            return vocabulary_divergence(hidden, policy, *teachers, divergence, group=group, vocab_size=size)

        return language_outputs(outputs, states, statistics, inputs.topk_ids, top, from_teachers)


def check_sequence_sharing(config: PretrainedConfig, ranks: int) -> None:
    """Check, from its config alone, that ``ranks`` ranks can share the sequences of a model.

    Raises:
        ConfigError: ``ranks`` does not divide its query heads; or its layers carry a state from token to token, or its
            rotary embedding depends on the longest sequence of a pass, of which each rank sees only a part.
    """
    text = config.get_text_config()
    if other := layers_beyond_attention(getattr(text, "layer_types", None)):
        raise ConfigError(
            f"ulysses_sequence_parallel_size={ranks}: the model has layers ({', '.join(other)}) that read a sequence "
            "from its first token on, and each rank would see only a part of it. Use 1 for this model."
        )
    validate_ulysses_config(text.num_attention_heads, ranks)
    kinds = rope_types(config) & {"dynamic", "longrope"}
    if kinds:
        raise ConfigError(
            f"ulysses_sequence_parallel_size={ranks}: the model's rotary embedding ({', '.join(sorted(kinds))}) "
            "changes with the longest sequence of a pass, of which each rank would see only a part. Use 1 for this "
            "model."
        )


def build_model(
    model_type: ModelType,
    config: HFModelConfig,
    dtype: torch.dtype,
    with_weights: bool,
    is_trained: bool = True,
    frozen: Sequence[str] = (),
    with_adapters: bool = False,
    seed: int = 0,
    backbone_class: type[PreTrainedModel] | None = None,
) -> HeadedModel:
    """Build the model in the folder ``config.path`` on the CPU.

    Args:
        model_type: ``language_model``; ``value_model``, which takes the head of a classifier with one label or puts a
            zero-initialised scalar head on a causal language model; or ``reward_model``, which must have a head
            unless ``is_trained``, when it too gets a zero-initialised one.
        config: model folder and how the model is run.
        dtype: number format of the parameters.
        with_weights: read the weights; otherwise they are uninitialised memory, to be filled from another rank.
        is_trained: whether weights get gradients, or adapters where ``config`` has them; a reward model without a
            trained head is acceptable then.
        frozen: parts of module names, such as ``visual``, whose weights are not trained.
        with_adapters: read trained adapters, or draw new ones, also without the weights.
        seed: of new adapters.
        backbone_class: another implementation of the backbone, with the weights of Transformers' own.

    Raises:
        ConfigError: the folder is missing, or holds another kind of model.
    """
    if config.external_lib:
        importlib.import_module(config.external_lib)
    hf_config = load_hf_config(config.hf_config_path or config.path, config.override_config, config.trust_remote_code)
    stored_dtype = torch_dtype(hf_config.dtype) if hf_config.dtype else None
    rates = switch_off_dropout(hf_config, config.override_config) if is_trained else {}
    if model_type == "language_model":
        hf, head_name = _causal_lm(config, hf_config, dtype, with_weights), "lm_head"
    else:
        hf, head_name = _scalar_model(model_type, config, hf_config, dtype, with_weights, is_trained), "score"
    _require_parts(hf, head_name, config.path)
    if backbone_class is not None:
        _replace_backbone(hf, backbone_class, dtype)
    hf.requires_grad_(is_trained)
    _freeze(hf, frozen)
    if is_trained and config.has_adapters:
        add_adapters(hf, head_name, config, with_weights or with_adapters, seed)
    return HeadedModel(hf, head_name, stored_dtype, rates)


def _replace_backbone(hf: PreTrainedModel, backbone_class: type[PreTrainedModel], dtype: torch.dtype) -> None:
    """Let another class compute what the backbone of ``hf`` computes, with the same parameters."""
    with no_init_weights():
        backbone = from_config(backbone_class, hf.config, dtype)
    try:
        backbone.load_state_dict(hf.base_model.state_dict(keep_vars=True), assign=True)
    except RuntimeError as error:
        name = f"{backbone_class.__module__}.{backbone_class.__name__}"
        raise ConfigError(f"{name} has other weights than {type(hf.base_model).__name__}: {error}") from error
    setattr(hf, hf.base_model_prefix, backbone.eval())


def _freeze(hf: PreTrainedModel, parts: Sequence[str]) -> None:
    """Exclude the weights of modules from training whose names have one of ``parts``."""
    for part in parts:
        weights = [weight for name, weight in hf.named_parameters() if part in name.split(".")]
        if not weights:
            raise ConfigError(
                f"{type(hf).__name__} has no '{part}' whose weights could be frozen: it is a model of text. Set "
                "freeze_vision_tower=false."
            )
        for weight in weights:
            weight.requires_grad_(False)


def folder_weights(model_type: ModelType, config: HFModelConfig, hf_config: PretrainedConfig) -> FolderWeights:
    """Return the weights in the folder ``config.path`` of a model that :func:`build_model` builds without them.

    Weights of a new head are not among them.
    """
    auto, new = auto_of(hf_config), frozenset[str]()
    if model_type != "language_model":
        architecture = (hf_config.architectures or [""])[0]
        classifiers = [auto for ending, auto in _CLASSIFIERS.items() if architecture.endswith(ending)]
        if classifiers:
            auto = classifiers[0]
        elif model_type == "reward_model" and hf_config.model_type not in FAMILIES:
            auto, new = AutoModelForSequenceClassification, frozenset({"score.weight"})
    return FolderWeights(auto, config.path, hf_config, config.trust_remote_code, new)


def pretrained_weights(config: HFModelConfig, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Read the weights of a causal language model, with the adapters of ``lora_adapter_path`` merged into them.

    They are read one layer after the other, and converted to ``dtype``, except buffers.
    """
    hf_config = hf_config_of(config)
    folder = folder_weights("language_model", config, hf_config)
    buffers = {name for name, _ in folder.model.named_buffers()}
    weights = ((name, tensor if name in buffers else tensor.to(dtype)) for name, tensor in folder)
    if config.lora_adapter_path is None:
        yield from weights
        return
    hf = empty_causal_lm(hf_config, dtype, torch.device("cpu"), config.trust_remote_code)
    add_adapters(hf, "lm_head", config, with_weights=True)
    targets = targets_of(adapter_layers(hf))
    yield from merged(with_adapters(weights, trained_parameters(hf), targets), targets)


def _causal_lm(
    config: HFModelConfig, hf_config: PretrainedConfig, dtype: torch.dtype, with_weights: bool
) -> PreTrainedModel:
    if with_weights:
        return load_causal_lm(config.path, hf_config, dtype, config.trust_remote_code)
    return empty_causal_lm(hf_config, dtype, torch.device("cpu"), config.trust_remote_code)


def _scalar_model(
    model_type: ModelType,
    config: HFModelConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    with_weights: bool,
    is_trained: bool,
) -> PreTrainedModel:
    architecture = (hf_config.architectures or [""])[0]
    for ending, auto in _CLASSIFIERS.items():
        if architecture.endswith(ending):
            hf = _classifier(auto, architecture, config, hf_config, dtype, with_weights)
            if model_type == "reward_model" and is_trained:
                _name_padding(hf.config.get_text_config(), config)
            return hf
    if model_type == "reward_model":
        if is_trained:
            return _new_reward_model(architecture, config, hf_config, dtype, with_weights)
        raise ConfigError(
            f"reward_model.model.path={config.path} holds a {architecture or 'model without architectures'}, which "
            "has no trained score. A reward model is a ...ForSequenceClassification or ...ForTokenClassification "
            "with one label; python -m verl.trainer.rm_trainer makes one of a language model."
        )
    # A new head is zero, so that the first advantages have no noise and every rank has the same one.
    if hf_config.model_type in FAMILIES:
        return _new_classifier_with_images(token_classifier, config, hf_config, dtype, with_weights)
    hf = _causal_lm(config, hf_config, dtype, with_weights)
    _require_parts(hf, "lm_head", config.path)
    del hf.lm_head
    head = nn.Linear(hf_config.get_text_config().hidden_size, 1, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    hf.score = head
    forget_ties(hf)
    return hf


def _new_reward_model(
    architecture: str, config: HFModelConfig, hf_config: PretrainedConfig, dtype: torch.dtype, with_weights: bool
) -> PreTrainedModel:
    """Build a reward model with a zero-initialised head on the backbone of a causal language model."""
    if hf_config.model_type in FAMILIES:
        hf = _new_classifier_with_images(sequence_classifier, config, hf_config, dtype, with_weights)
        _name_padding(hf.config.get_text_config(), config)
        return hf
    if sequence_classifier_of(hf_config.model_type) is None:
        raise ConfigError(
            f"{config.path} holds a {architecture or hf_config.model_type}, for which Transformers has no "
            "...ForSequenceClassification. Start from a Qwen, Llama, Mistral or Gemma model."
        )
    hf_config.num_labels = 1
    hf = _classifier(
        AutoModelForSequenceClassification, architecture, config, hf_config, dtype, with_weights, new={"score.weight"}
    )
    _require_parts(hf, "score", config.path)
    nn.init.zeros_(hf.get_parameter("score.weight"))
    _name_padding(hf.config.get_text_config(), config)
    return hf


def _new_classifier_with_images(
    classifier: Callable[[str], type[PreTrainedModel]],
    config: HFModelConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    with_weights: bool,
) -> PreTrainedModel:
    """Build a classifier with one label and a zero-initialised head on the backbone of a vision-language model."""
    source = _causal_lm(config, hf_config, dtype, with_weights)
    source.config.num_labels = 1
    # The files have the names of the whole model, which Transformers knows for its own classes alone.
    with torch.device("meta"), no_init_weights():
        hf: Any = classifier(hf_config.model_type)(source.config)
    hf.model = source.base_model
    hf.score = nn.Linear(hf.score.in_features, 1, bias=hf.score.bias is not None, dtype=dtype)
    for parameter in hf.score.parameters():
        nn.init.zeros_(parameter)
    return hf


def _name_padding(text_config: PretrainedConfig, config: HFModelConfig) -> None:
    """Set a padding token in the config that ends no response, with which Transformers reads the score where we do.

    Transformers reads it at the last token that is not padding: a token too early if responses end with that token.
    """
    try:
        tokenizer = tokenizer_of(config, correct_pad_token=False)
        ends = eos_token_ids(config.path, tokenizer)
    except ConfigError as error:
        logger.warning("the reward model's config names no padding token: %s", error)
        return
    usable = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special and index not in ends}
    bos: Any = tokenizer.bos_token_id
    preferred: tuple[Any, ...] = (tokenizer.pad_token_id, text_config.pad_token_id, *sorted(usable - {bos}), bos)
    text_config.pad_token_id = next((index for index in preferred if index in usable), None)
    if text_config.pad_token_id is None:
        logger.warning(
            "every special token of %s ends a response, so that none can pad: Transformers scores one row at a time",
            config.path,
        )


def _classifier(
    auto: Any,
    architecture: str,
    config: HFModelConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    with_weights: bool,
    new: Set[str] = frozenset(),
) -> PreTrainedModel:
    """Build a classifier with one label; the weights ``new`` may be missing in its files."""
    if hf_config.num_labels != 1:
        raise ConfigError(
            f"{config.path} holds a {architecture} with {hf_config.num_labels} labels; a value or reward model has "
            "one (num_labels=1 in its config.json)."
        )
    if hf_config.model_type in FAMILIES:
        for classifier in (sequence_classifier, token_classifier):
            classifier(hf_config.model_type)  # which Transformers' Auto class finds from here on
    if not with_weights:
        with no_init_weights():
            return auto.from_config(hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code)
    return load_pretrained(auto, config.path, hf_config, dtype, config.trust_remote_code, new)


def _require_parts(hf: PreTrainedModel, head_name: str, path: str) -> None:
    has_backbone = isinstance(getattr(hf, hf.base_model_prefix, None), nn.Module)
    if not has_backbone or not isinstance(getattr(hf, head_name, None), nn.Linear):
        raise ConfigError(
            f"{type(hf).__name__} ({path}) is not a backbone '{hf.base_model_prefix}' with a linear head "
            f"'{head_name}', which this engine needs. Use a decoder model of Transformers such as Qwen, Llama, "
            "Mistral or Gemma."
        )


def enable_gradient_checkpointing(model: HeadedModel) -> None:
    """Keep only each layer's input for the backward pass, which computes the layer again."""
    hf = model.hf
    # The reentrant variant computes no gradients of a layer none of whose inputs has one, as over frozen embeddings.
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def layer_classes(model: HeadedModel) -> set[str]:
    """Return the class names of the repeated layers that the Transformers model declares."""
    return layer_class_names(model.hf)


def tied_names(model: nn.Module) -> set[str]:
    """Return all names of tied parameters except the first name of each."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters with gradients by name."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def own_state(model: nn.Module) -> Mapping[str, Tensor]:
    """Return parameters and persistent buffers by name, tied ones under their first name only."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
