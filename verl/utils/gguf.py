"""Convert a GGUF file, whose weights are mostly quantized, into a model folder."""

from __future__ import annotations

import importlib.util
import logging
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import pre_tokenizers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from verl.base.fs import make_once
from verl.base.requirements import install_command
from verl.errors import ConfigError
from verl.utils.model_code import LOADING_ERRORS
from verl.utils.model_facts.model_files import folder_of_gguf, gguf_problem
from verl.utils.transformers_private import GGUF_SPLITS, without_load_report, without_progress_bars

logger = logging.getLogger(__name__)

_FLOATS = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32}
_DIGITS_APART = pre_tokenizers.Sequence(
    [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
)
_SPLITS = {"smollm": _DIGITS_APART}
"""Rules by which text is split before merges, by their name in GGUF, which Transformers does not know."""
_USUAL_SPLITS = (None, "default", "gpt-2")
_REPAIR = "Download or convert the file again, or name a model folder in the Hugging Face format."


def converted_gguf(file: Path) -> str:
    """Return the model folder of a GGUF file: a conversion below the cache folder, which is made once.

    Raises:
        ConfigError: the file cannot be converted.
    """
    folder = folder_of_gguf(file)
    if not folder.is_dir():
        make_once(folder, file, lambda partial: convert_gguf(file, partial))
    return str(folder)


def convert_gguf(file: Path, folder: Path) -> None:
    """Write the model, tokenizer, chat template and generation config of a GGUF file as a model folder.

    The folder's format holds each value exactly: bf16 or fp16 where that suffices for all weights, else fp32.

    Raises:
        ConfigError: the package gguf is missing, the file is damaged, or Transformers cannot read this kind of model.
    """
    if problem := gguf_problem(file):
        raise ConfigError(f"model file '{file}' {problem}.")
    if importlib.util.find_spec("gguf") is None:
        raise ConfigError(f"model file '{file}' needs the package gguf: {install_command('gguf')}.")
    try:
        dtype, split = _facts(file)
    except (ValueError, IndexError, KeyError, UnicodeDecodeError, MemoryError, OverflowError) as error:
        raise ConfigError(f"model file '{file}' is cut or damaged ({_first_line(error)}). {_REPAIR}") from error
    logger.warning("converting %s into a model folder with weights in %s", file, str(dtype).removeprefix("torch."))
    source: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent.absolute()), "gguf_file": file.name}
    config_class = getattr(transformers, "GgufConfig", None)  # earlier versions always dequantize
    dequantize: dict[str, Any] = {} if config_class is None else {"quantization_config": config_class(dequantize=True)}
    try:
        with without_load_report(), without_progress_bars():
            tokenizer: Any = AutoTokenizer.from_pretrained(**source)
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                **source, **dequantize, dtype=dtype, output_loading_info=True
            )
    except (*LOADING_ERRORS, NotImplementedError) as error:
        raise ConfigError(f"model file '{file}' cannot be converted: {_first_line(error)}. {_REPAIR}") from error
    model, info = loaded
    if missing := sorted(info["missing_keys"]):
        raise ConfigError(
            f"model file '{file}' lacks {len(missing)} weights of {type(model).__name__}: {missing[:3]}. {_REPAIR}"
        )
    _set_split(tokenizer, split, file)
    model.config.__dict__.pop("_model_name_or_path", None)  # the title in the file, which is no path
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _facts(file: Path) -> tuple[torch.dtype, str | None]:
    """Return the format that holds all weights, and the name of the rules by which text is split before merges."""
    from gguf import GGUFReader

    reader = GGUFReader(file)
    formats = {tensor.tensor_type.name for tensor in reader.tensors}
    short = [_FLOATS[name] for name in ("BF16", "F16") if name in formats]
    # Files of 16-bit weights have norms in fp32, which mostly are 16-bit values too; then the short format holds all.
    fp32 = [torch.from_numpy(tensor.data.copy()) for tensor in reader.tensors if tensor.tensor_type.name == "F32"]
    is_exact = len(short) == 1 and formats <= _FLOATS.keys()
    is_exact = is_exact and all(torch.equal(weight.to(short[0]).float(), weight) for weight in fp32)
    field = reader.get_field("tokenizer.ggml.pre")
    return short[0] if is_exact else torch.float32, None if field is None else field.contents()


def _set_split(tokenizer: PreTrainedTokenizerFast, split: str | None, file: Path) -> None:
    """Split text before merges as the file names it, where Transformers does not know these rules."""
    if split in _SPLITS:
        backend: Any = tokenizer.backend_tokenizer
        backend.pre_tokenizer = _SPLITS[split]
    elif split not in (*_USUAL_SPLITS, *GGUF_SPLITS):
        logger.warning(
            "'%s' splits text before merges by the rules %r, which neither Transformers nor verl knows: some texts "
            "may become other tokens than in the model's training. Name the folder of its own tokenizer in "
            "tokenizer_path.",
            file,
            split,
        )


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
