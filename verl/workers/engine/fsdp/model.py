"""The module that is trained: a Transformers backbone and a head that is read at chosen tokens only.

Its parameters have the names that Transformers gives them (``model.layers.0...``, ``lm_head.weight``),
so checkpoints, exports and weight updates of rollout engines need no renaming.
"""

from __future__ import annotations

import importlib
import logging
from collections.abc import Mapping, Set
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.initialization import no_init_weights
from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

from verl.errors import ConfigError
from verl.utils.model import empty_causal_lm, load_causal_lm, load_hf_config, resolve_model_path
from verl.utils.model_code import LOADING_ERRORS, tell_if_code_runs, why_unreadable
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.config import HFModelConfig
from verl.workers.engine.fsdp.head import LogitRule, token_log_probs
from verl.workers.engine.fsdp.inputs import ModelInputs
from verl.workers.packed_attention import PACKED_ATTENTION

logger = logging.getLogger(__name__)

ModelType = Literal["language_model", "value_model", "reward_model"]

_CLASSIFIERS = {
    "ForTokenClassification": AutoModelForTokenClassification,
    "ForSequenceClassification": AutoModelForSequenceClassification,
}


class HeadedModel(nn.Module):
    """Backbone and head, under their Transformers names.

    Args:
        hf: the Transformers model whose parts these are; it is kept for its config and for export.
        head_name: attribute of ``hf`` that is the head, an ``nn.Linear`` on hidden states.
    """

    def __init__(self, hf: PreTrainedModel, head_name: str) -> None:
        super().__init__()
        self._hf = (hf,)  # in a tuple: not a submodule, its parts are registered below
        self.backbone_name = hf.base_model_prefix
        self.head_name = head_name
        self.add_module(self.backbone_name, hf.base_model)
        self.add_module(head_name, getattr(hf, head_name))
        self.rule = LogitRule.of(hf.config)

    @property
    def hf(self) -> PreTrainedModel:
        """The Transformers model; its parameters are this module's."""
        return self._hf[0]

    @property
    def head(self) -> nn.Linear:
        """The projection from hidden states."""
        return self.get_submodule(self.head_name)  # pyright: ignore[reportReturnType]

    def forward(self, inputs: ModelInputs, outputs: frozenset[str], temperature: float) -> dict[str, Tensor]:
        """What ``outputs`` names at the N chosen tokens, each (N,) fp32.

        ``log_probs``, ``entropy``, ``sum_pi_squared``; ``values``; or ``scores``; for the trial of a new model also
        ``hidden``, (N, hidden_size), and ``reference``, the log-probs by the Transformers model's own forward.
        """
        arguments: dict[str, Any] = {
            "input_ids": inputs.input_ids,
            "attention_mask": inputs.attention_mask,
            "position_ids": inputs.position_ids,
            "use_cache": False,
        }
        if inputs.packing is not None:
            arguments["packing"] = inputs.packing
        if "reference" in outputs:
            logits = self.hf(**arguments).logits.flatten(0, 1).index_select(0, inputs.take).float()
            return {"reference": logits.log_softmax(-1).gather(-1, inputs.targets.unsqueeze(-1)).squeeze(-1)}
        hidden = self.get_submodule(self.backbone_name)(**arguments).last_hidden_state
        chosen = hidden.flatten(0, 1).index_select(0, inputs.take)  # (N, hidden)
        if "hidden" in outputs:
            return {"hidden": chosen}
        if self.head.out_features == 1:
            scalars: dict[str, Any] = dict.fromkeys(outputs, self.head(chosen).squeeze(-1).float())
            return scalars
        found = token_log_probs(
            chosen,
            self.head.weight,
            self.head.bias,
            inputs.targets,
            temperature,
            with_entropy="entropy" in outputs,
            with_sum_pi_squared="sum_pi_squared" in outputs,
            rule=self.rule,
        )
        return {name: values for name, values in found._asdict().items() if values is not None}


def build_model(
    model_type: ModelType, config: HFModelConfig, dtype: torch.dtype, with_weights: bool, is_trained: bool = True
) -> HeadedModel:
    """The model of ``config.path`` on the CPU, in ``dtype``.

    Args:
        model_type: ``language_model``; ``value_model``, which puts a scalar head that starts at zero on a
            causal language model, or goes on with the head of a classifier with one label;
            ``reward_model``, which must have such a head, or, to be trained, gets one that starts at zero.
        config: which model, and how it runs.
        dtype: of the parameters.
        with_weights: read the weights; else they are unset memory, to be filled from another rank.
        is_trained: whether a new head has a purpose.

    Raises:
        ConfigError: the folder is missing, or holds another kind of model.
    """
    if config.external_lib:
        importlib.import_module(config.external_lib)
    hf_config = load_hf_config(config.hf_config_path or config.path, config.override_config, config.trust_remote_code)
    if model_type == "language_model":
        hf, head_name = _causal_lm(config, hf_config, dtype, with_weights), "lm_head"
    else:
        hf, head_name = _scalar_model(model_type, config, hf_config, dtype, with_weights, is_trained), "score"
    _require_parts(hf, head_name, config.path)
    return HeadedModel(hf, head_name)


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
            return _classifier(auto, architecture, config, hf_config, dtype, with_weights)
    if model_type == "reward_model":
        if is_trained:
            return _new_reward_model(architecture, config, hf_config, dtype, with_weights)
        raise ConfigError(
            f"reward_model.model.path={config.path} holds a {architecture or 'model without architectures'}, which "
            "has no trained score. A reward model is a ...ForSequenceClassification or ...ForTokenClassification "
            "with one label; python -m verl.trainer.rm_trainer makes one of a language model."
        )
    hf = _causal_lm(config, hf_config, dtype, with_weights)
    _require_parts(hf, "lm_head", config.path)
    del hf.lm_head
    # Values start at zero: no noise in the first advantages, and the same head on every rank.
    head = nn.Linear(hf_config.get_text_config().hidden_size, 1, dtype=dtype)
    nn.init.zeros_(head.weight)
    nn.init.zeros_(head.bias)
    hf.score = head
    hf.all_tied_weights_keys = {}
    return hf


def _new_reward_model(
    architecture: str, config: HFModelConfig, hf_config: PretrainedConfig, dtype: torch.dtype, with_weights: bool
) -> PreTrainedModel:
    """A causal language model's backbone under a score of zero: all pairs start undecided, on every rank alike."""
    if hf_config.model_type not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES:
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


def _name_padding(text_config: PretrainedConfig, config: HFModelConfig) -> None:
    """Let Transformers' own batches of the exported model end each row before its padding.

    It looks for the last token that is not the padding token, so one that also ends responses would hide their end.
    """
    if text_config.pad_token_id is not None:
        return
    try:
        tokenizer = hf_tokenizer(
            config.tokenizer_path or config.path, correct_pad_token=False, trust_remote_code=config.trust_remote_code
        )
    except ConfigError as error:
        logger.warning("the reward model's config names no padding token: %s", error)
        return
    if tokenizer.pad_token_id != tokenizer.eos_token_id:
        text_config.pad_token_id = tokenizer.pad_token_id


def _classifier(
    auto: Any,
    architecture: str,
    config: HFModelConfig,
    hf_config: PretrainedConfig,
    dtype: torch.dtype,
    with_weights: bool,
    new: Set[str] = frozenset(),
) -> PreTrainedModel:
    """A model with one label; its files may lack the weights ``new``."""
    if hf_config.num_labels != 1:
        raise ConfigError(
            f"{config.path} holds a {architecture} with {hf_config.num_labels} labels; a value or reward model has "
            "one (num_labels=1 in its config.json)."
        )
    if not with_weights:
        with no_init_weights():
            return auto.from_config(hf_config, dtype=dtype, trust_remote_code=config.trust_remote_code)
    path = resolve_model_path(config.path)
    try:
        hf, info = auto.from_pretrained(
            path,
            config=hf_config,
            dtype=dtype,
            trust_remote_code=config.trust_remote_code,
            output_loading_info=True,
        )
    except LOADING_ERRORS as error:
        raise ConfigError(f"model weights of '{path}' cannot be read: {why_unreadable(error, path)}") from error
    tell_if_code_runs(hf, path)
    if absent := set(info["missing_keys"]) - new:
        missing = ", ".join(sorted(absent)[:5])
        raise ConfigError(f"the files of '{path}' lack weights of {architecture}: {missing}.")
    return hf


def _require_parts(hf: PreTrainedModel, head_name: str, path: str) -> None:
    has_backbone = isinstance(getattr(hf, hf.base_model_prefix, None), nn.Module)
    if not has_backbone or not isinstance(getattr(hf, head_name, None), nn.Linear):
        raise ConfigError(
            f"{type(hf).__name__} ({path}) is not a backbone '{hf.base_model_prefix}' with a linear head "
            f"'{head_name}', which this engine needs. Use a decoder model of Transformers such as Qwen, Llama, "
            "Mistral or Gemma."
        )


def use_packed_attention(model: HeadedModel) -> bool:
    """Give the model packed attention; False (and nothing changed) if its code cannot take one."""
    if not getattr(model.hf, "_supports_attention_backend", False):
        return False
    model.hf.set_attn_implementation(PACKED_ATTENTION)
    return True


def enable_gradient_checkpointing(model: HeadedModel) -> None:
    """Keep each layer's input only, and compute the rest again in the backward pass."""
    hf = model.hf
    enable = getattr(hf, "activation_checkpointing_enable", None) or hf.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def layer_classes(model: HeadedModel) -> set[str]:
    """Class names of the repeated layers, as the Transformers model names them."""
    return set(getattr(model.hf, "_no_split_modules", None) or ())


def tied_names(model: nn.Module) -> set[str]:
    """Names of parameters that are another parameter under a second name."""
    first = {name for name, _ in model.named_parameters()}
    return {name for name, _ in model.named_parameters(remove_duplicate=False)} - first


def own_state(model: nn.Module) -> Mapping[str, Tensor]:
    """Parameters and persistent buffers by name, each once."""
    tied = tied_names(model)
    return {name: tensor for name, tensor in model.state_dict().items() if name not in tied}
