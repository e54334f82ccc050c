"""Merge the files of a checkpoint, by FSDP or Megatron, into one model, and compare the two."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import PretrainedConfig, PreTrainedModel

from verl.checkpoint.boxes import LAYOUT_FILE, Boxes
from verl.checkpoint.core_weights import DistFiles
from verl.checkpoint.locate import dist_checkpoint
from verl.checkpoint.shards import assemble, read_shards, saved_world_size
from verl.errors import CheckpointError, ConfigError
from verl.model_merger.lazy_weights import LazyWeights
from verl.model_merger.lora import PUBLIC_PREFIX, Adapted, PublicAdapted, base_named_in, has_adapters
from verl.model_merger.probes import probes
from verl.utils.available_memory import available_memory
from verl.utils.folder_weights import FolderWeights, stored_heads
from verl.utils.image_reward_models import sequence_classifier, token_classifier
from verl.utils.model import load_hf_config, torch_dtype, weights_folder
from verl.utils.model_code import LOADING_ERRORS, warn_if_code_runs, why_unreadable
from verl.utils.model_facts.model_files import tokenizer_problem
from verl.utils.model_facts.prediction_heads import SHARED_WITH_HEADS, head_count, head_weights
from verl.utils.transformers_private import names_on_disk, no_init_weights, write_model_code
from verl.vision.families import FAMILIES
from verl.workers.engine.model.export import copy_companions, stored_format, write_in_files
from verl.workers.engine.model.headed import own_state
from verl.workers.forward_check import is_rounding, largest_difference

logger = logging.getLogger(__name__)

_HEAD_PROJECTION = "eh_proj.weight"
_ONE_EXPERT = re.compile(r"\.experts\.\d+\.")  # in names of weights that Transformers 4 kept apart for each expert

# Ending of an architecture's name: the class of Transformers that loads it.
_AUTO = {
    "ForCausalLM": transformers.AutoModelForCausalLM,
    "LMHeadModel": transformers.AutoModelForCausalLM,
    "ForConditionalGeneration": transformers.AutoModelForImageTextToText,
    "ForTokenClassification": transformers.AutoModelForTokenClassification,
    "ForSequenceClassification": transformers.AutoModelForSequenceClassification,
}


def merge(
    local_dir: str | Path,
    target_dir: str | Path,
    tie_word_embedding: bool = False,
    trust_remote_code: bool = False,
    is_value_model: bool = False,
    base_model: str | None = None,
    dtype: str | None = None,
) -> None:
    """Write a checkpoint as safetensors with all files of its model, then read it back and compare exactly.

    Args:
        local_dir: a checkpoint's ``actor`` or ``critic`` folder.
        target_dir: the model folder; created if needed, its old safetensors files are replaced.
        tie_word_embedding: write output and input embedding as one weight; they must be equal.
        trust_remote_code: run Python code that comes with the model.
        is_value_model: refuse any architecture but a value model.
        base_model: of LoRA adapters, the model that they were trained on, if it is not where it was. Of any
            checkpoint, the folder from which heads of multi-token prediction are copied that were not trained.
        dtype: precision of the weights; by default that of the base, which the config names.
    """
    source, target = Path(local_dir).expanduser(), Path(target_dir).expanduser()
    about = _described_in(source, base_model)
    config = config_of(about, trust_remote_code)
    base = base_model
    if base is None:
        with contextlib.suppress(CheckpointError):  # raised again below, if there are adapters that need it
            base = base_named_in(source)
    _check_target(target, {"--local_dir": source, "the model of the adapters": base})
    if is_value_model and not str((config.architectures or [""])[0]).endswith("ForTokenClassification"):
        raise CheckpointError(f"{source} holds a {(config.architectures or ['?'])[0]}, not a value model.")
    weights, adapted = _weights_of(source, config, base_model, trust_remote_code)
    weights, heads = _without_heads(weights)
    if tie_word_embedding:
        head, embedding = weights.get("lm_head.weight"), weights.get("model.embed_tokens.weight")
        if head is not None and (embedding is None or not torch.equal(head, embedding)):
            raise CheckpointError("--tie-word-embedding: lm_head.weight and model.embed_tokens.weight differ.")
        weights = weights.without({"lm_head.weight"})
        config.tie_word_embeddings = True
    with torch.device("meta"):
        model = empty_model(config, trust_remote_code)
    weights = _fit_names(weights, model, config, source, trust_remote_code)
    if dtype is not None:
        config.dtype = torch_dtype(dtype)
    elif isinstance(adapted, Adapted):
        config.dtype = adapted.dtype
    weights, heads = _as_stored(weights, model, config), _as_stored(heads, model, config)
    target.mkdir(parents=True, exist_ok=True)
    heads = heads or _heads_of(base_model, config)
    written: dict[str, _Digest] = {}
    write_in_files(chain(_digested(weights, written), heads.items()), model, target)
    write_model_code(model, target, config)
    if problem := tokenizer_problem(about):
        logger.warning("%s, so the model folder has none: %s", problem, about)
    copy_companions(about, target)
    config.save_pretrained(target)
    _compare(weights, target, trust_remote_code, tolerance=0.0, written=written)
    _compare_heads(heads, target, model, tolerance=0.0)
    _compare_logits(weights, adapted, config, target, trust_remote_code)
    logger.info("wrote %s: %d weights, read back and equal", target, len(weights))


def _check_target(target: Path, read: Mapping[str, str | Path | None]) -> None:
    """Raise CheckpointError if a model cannot be written to ``target``, or would replace what it is made of."""
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"--target_dir={target} is a file. Name a folder for the merged model.")
    for what, folder in read.items():
        if folder is not None and Path(folder).expanduser().resolve() == target.resolve():
            raise CheckpointError(
                f"--target_dir={target} is the folder of {what}, whose weights the merged ones would replace. Name "
                "another folder."
            )


def compare(
    local_dir: str | Path, hf_dir: str | Path, trust_remote_code: bool = False, base_model: str | None = None
) -> None:
    """Check that a checkpoint and a model folder hold the same model.

    Weights must agree to 1e-6 and logits to rounding; the logits show a folder with another config. LoRA adapters are
    merged into ``base_model``, by default the model that they were trained on.

    Raises:
        CheckpointError: the models differ, or one cannot be read.
    """
    source, target = Path(local_dir).expanduser(), Path(hf_dir).expanduser()
    config = config_of(_described_in(source, base_model), trust_remote_code)
    weights, adapted = _weights_of(source, config, base_model, trust_remote_code)
    weights, heads = _without_heads(weights)
    with torch.device("meta"):
        empty = empty_model(config, trust_remote_code)
    weights = _fit_names(weights, empty, config, source, trust_remote_code)
    if not (target / "config.json").is_file():
        raise CheckpointError(f"{target} is no model folder: it has no config.json.")
    stored = load_hf_config(str(target), trust_remote_code=trust_remote_code)
    weights, heads = _as_stored(weights, empty, stored), _as_stored(heads, empty, stored)
    _compare(weights, target, trust_remote_code, tolerance=1e-6)
    _compare_heads(heads, target, empty, tolerance=1e-6)
    _compare_logits(weights, adapted, config, target, trust_remote_code)
    logger.info("%s and %s hold the same %d weights", local_dir, hf_dir, len(weights))


def _weights_of(
    source: Path, config: PretrainedConfig, base_model: str | None, trust_remote_code: bool
) -> tuple[LazyWeights, Adapted | PublicAdapted | None]:
    """Return the weights of the model in a checkpoint, with its adapters merged, and the adapters if there are any."""
    if (dist := dist_checkpoint(source)) is not None:
        return _weights_of_megatron_core(dist, config, trust_remote_code), None
    weights = saved_weights(source)
    if not has_adapters(weights):
        return weights, None
    if any(name.startswith(PUBLIC_PREFIX) for name in weights):
        public = PublicAdapted(dict(weights), source)
        return LazyWeights.from_tensors(public.merged_weights()), public
    adapted = Adapted(dict(weights), source, str((config.architectures or [""])[0]), base_model, trust_remote_code)
    return adapted.merged_weights(), adapted


def _as_stored(weights: LazyWeights, model: PreTrainedModel, config: PretrainedConfig) -> LazyWeights:
    """Return weights in the precision that ``config`` names; without any, as they were trained."""
    dtype = config.dtype
    if dtype is None:
        return weights
    return weights.converted(stored_format(model, getattr(torch, dtype) if isinstance(dtype, str) else dtype))


def _without_heads(weights: LazyWeights) -> tuple[LazyWeights, LazyWeights]:
    """Return the weights of a model, and those of its heads of multi-token prediction that were trained.

    With each head comes what it shares with the model, under the names that DeepSeek's files have for it.
    """
    names = head_weights(weights)
    sources = {name: name for name in names}
    for projection in [name for name in names if name.endswith(_HEAD_PROJECTION)]:
        prefix = projection.removesuffix(_HEAD_PROJECTION)
        sources |= {f"{prefix}{copy}": name for name, copy in SHARED_WITH_HEADS.items() if name in weights}
    shapes = {name: weights.shapes[source] for name, source in sources.items()}
    heads = LazyWeights(lambda name: weights[sources[name]].clone(), shapes)
    return weights.without(sources), heads


def _heads_of(base_model: str | None, config: PretrainedConfig) -> LazyWeights:
    """Return the heads of the folder ``base_model``, which were not trained; warn if there should be some."""
    if str((config.architectures or [""])[0]).endswith("Classification"):  # a value or reward model predicts no tokens
        return LazyWeights.from_tensors({})
    heads = {} if base_model is None else dict(stored_heads(weights_folder(base_model)))
    if not heads and (count := head_count(config.to_dict())):
        logger.warning(
            "the config says that the model has %d head(s) of multi-token prediction, and the shards have none, as "
            "they were not trained: the merged folder lacks them. Name the original model by --base_model to copy them",
            count,
        )
    return LazyWeights.from_tensors(heads)


def _compare_heads(heads: LazyWeights, folder: Path, model: PreTrainedModel, tolerance: float) -> None:
    """Compare heads with those in ``folder``, under the names that the files of ``model`` have."""
    if not heads:
        return
    expected, stored = names_on_disk(model, dict(heads)), dict(stored_heads(folder))
    if missing := sorted(expected.keys() - stored.keys()):
        raise CheckpointError(f"{folder} lacks {missing[0]}, which belongs to a head of multi-token prediction.")
    for name, weight in expected.items():
        gap = float((weight.float() - stored[name].float()).abs().max())
        if not gap <= tolerance:
            raise CheckpointError(f"'{name}' differs from the one in {folder} by up to {gap:.3g}.")


def _weights_of_megatron_core(folder: Path, config: PretrainedConfig, trust_remote_code: bool) -> LazyWeights:
    """Return the weights of a checkpoint of megatron-core, each read when it is looked up."""
    with torch.device("meta"):
        shapes = {n: tuple(t.shape) for n, t in own_state(empty_model(config, trust_remote_code)).items()}
    files = DistFiles(str(folder), None, config.get_text_config())
    return LazyWeights(lambda name: files.read(name, shapes[name], ((0,) * len(shapes[name]), shapes[name])), shapes)


def saved_weights(folder: Path) -> LazyWeights:
    """Return all weights of a checkpoint by their Transformers names, each assembled when it is read; tied ones once.

    The files are mapped into memory, and nothing is read yet.
    """
    if (folder / LAYOUT_FILE).is_file():
        boxes = Boxes.read(folder, "model")
        shapes = {name: boxes.shape(name) for name in boxes.names()}
        return LazyWeights(lambda name: boxes.cut(name, (0,) * len(shapes[name]), shapes[name]), shapes)
    shards = read_shards(folder, "model", saved_world_size(folder))
    shapes = {name: tuple(shape) for name, shape in shards[0]["shapes"].items()}
    return LazyWeights(lambda name: assemble(shards, name, 0, shapes[name][0] if shapes[name] else 0), shapes)


def _auto_class(config: PretrainedConfig) -> type:
    architecture = str((config.architectures or [""])[0])
    if config.model_type in FAMILIES:
        for classifier in (sequence_classifier, token_classifier):
            classifier(config.model_type)  # which Transformers' Auto class finds from here on
    for ending, auto in _AUTO.items():
        if architecture.endswith(ending):
            return auto
    raise CheckpointError(f"architecture '{architecture}' is not supported; supported are ...{', ...'.join(_AUTO)}.")


def _described_in(source: Path, base_model: str | None) -> Path:
    """Return the folder with config and tokenizer of a checkpoint; those of megatron-core alone have none."""
    folder = source / "huggingface"
    if dist_checkpoint(source) is None or (base_model is None and folder.is_dir()):
        return folder
    if base_model is None:
        raise CheckpointError(
            f"{source} is a checkpoint of megatron-core, without config.json. Name a folder that has config.json and "
            "tokenizer of its model: --base_model MODEL."
        )
    return Path(base_model).expanduser()


def config_of(folder: Path, trust_remote_code: bool) -> PretrainedConfig:
    """Read the config in ``folder``, such as ``actor/huggingface`` of a checkpoint."""
    if not (folder / "config.json").is_file():
        raise CheckpointError(f"{folder / 'config.json'} is missing; give a checkpoint's actor folder.")
    return load_hf_config(str(folder), trust_remote_code=trust_remote_code)


def empty_model(config: PretrainedConfig, trust_remote_code: bool) -> PreTrainedModel:
    """Make the model of ``config`` with weights that are not set."""
    try:
        with no_init_weights():
            model = _auto_class(config).from_config(config, trust_remote_code=trust_remote_code)
    except LOADING_ERRORS as error:
        raise CheckpointError(f"no model can be made: {why_unreadable(error, str(config.name_or_path))}") from error
    warn_if_code_runs(model, str(config.name_or_path))
    model.tie_weights()
    return model


def _fit_names(
    weights: LazyWeights, model: PreTrainedModel, config: PretrainedConfig, source: Path, trust_remote_code: bool
) -> LazyWeights:
    """Return the weights under the names of ``model``, tied ones once.

    Raises:
        CheckpointError: weights of the model are missing, some are not its own, or have other shapes.
    """
    expected = own_state(model)
    if any(_ONE_EXPERT.search(name) for name in weights.keys() - expected.keys()):
        weights = _with_joined_experts(weights, type(model), config, source, trust_remote_code)
    # verl 0.8 saves tied weights twice.
    for name in sorted(weights.keys() - expected.keys()):
        alike = [other for other in expected.keys() & weights.keys() if weights.shapes[other] == weights.shapes[name]]
        if any(torch.equal(weights[name], weights[other]) for other in alike):
            weights = weights.without({name})
    _check_names(weights, set(expected), source)
    for name, shape in weights.shapes.items():
        if shape != tuple(expected[name].shape):
            raise CheckpointError(
                f"{source}: '{name}' has shape {list(shape)} in the shards, but {list(expected[name].shape)} "
                "according to huggingface/config.json. Restore the config that the model was trained with."
            )
    return weights


def _with_joined_experts(
    weights: LazyWeights,
    model: type[PreTrainedModel],
    config: PretrainedConfig,
    source: Path,
    trust_remote_code: bool,
) -> LazyWeights:
    """Join the weights of single experts, which Transformers 4 kept apart, as Transformers does for its own files."""
    try:
        dtype = next(iter(weights.values())).dtype
        loader: Any = model
        joined, report = loader.from_pretrained(
            None,
            config=config,
            state_dict=dict(weights),
            dtype=dtype,
            output_loading_info=True,
            trust_remote_code=trust_remote_code,
        )
    except LOADING_ERRORS as error:
        raise CheckpointError(f"{source}: the experts cannot be joined: {error}") from error
    problems = {kind: sorted(map(str, names)) for kind, names in report.items() if names and kind.endswith("_keys")}
    if problems:
        raise CheckpointError(f"{source}: the experts in the shards are not those of its config: {problems}.")
    return LazyWeights.from_tensors(own_state(joined))


def _check_names(weights: Mapping[str, object], expected: set[str], source: Path) -> None:
    missing, unknown = sorted(expected - weights.keys()), sorted(weights.keys() - expected)
    if missing or unknown:
        raise CheckpointError(
            f"{source}: the shards are not those of its config: missing {missing[:3] or 'nothing'}, unknown "
            f"{unknown[:3] or 'nothing'}."
        )


@dataclass(frozen=True)
class _Digest:
    """Digest of a written weight, to compare weights without reading the file again."""

    dtype: torch.dtype
    shape: torch.Size
    sha256: bytes

    @classmethod
    def from_weight(cls, weight: Tensor) -> _Digest:
        values = weight.detach().reshape(-1).contiguous().view(torch.uint8).numpy().data
        return cls(weight.dtype, weight.shape, hashlib.sha256(values).digest())

    def fits(self, weight: Tensor) -> bool:
        """Return whether a weight has the same values, maybe in a wider format."""
        narrow = weight.to(self.dtype)
        return torch.equal(narrow.to(weight.dtype), weight) and _Digest.from_weight(narrow) == self


def _digested(weights: LazyWeights, digests: dict[str, _Digest]) -> Iterator[tuple[str, Tensor]]:
    """Iterate over weights, and add the digest of each to ``digests``."""
    for name, weight in weights.items():
        digests[name] = _Digest.from_weight(weight)
        yield name, weight


def _compare(
    weights: LazyWeights,
    folder: Path,
    trust_remote_code: bool,
    tolerance: float,
    written: Mapping[str, _Digest] = MappingProxyType({}),
) -> None:
    """Compare weights with those of the model in ``folder``, one after the other.

    Those that have the digest with which they were ``written`` are equal, and not read again from the checkpoint.
    """
    config = load_hf_config(str(folder), trust_remote_code=trust_remote_code)
    try:
        loaded = FolderWeights(_auto_class(config), str(folder), config, trust_remote_code)
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    _check_names(weights, set(own_state(loaded.model)), folder)
    for name, other in loaded:
        if name not in weights:  # another name of a tied weight
            continue
        if name in written and written[name].fits(other):
            continue
        weight = weights[name]
        if weight.shape != other.shape:
            raise CheckpointError(f"'{name}' has shape {list(weight.shape)}, and {list(other.shape)} in {folder}.")
        gap = float((weight.float() - other.float()).abs().max()) if weight.numel() else 0.0
        if not gap <= tolerance:  # so that NaN is refused too
            raise CheckpointError(f"'{name}' differs from the one in {folder} by up to {gap:.3g}.")


@torch.no_grad()
def _compare_logits(
    weights: LazyWeights,
    adapted: Adapted | PublicAdapted | None,
    config: PretrainedConfig,
    folder: Path,
    trust_remote_code: bool,
) -> None:
    """Compare the logits of the model in ``folder`` with those of the shards and their config.

    There adapters are applied beside the weights of their layers, so that an error in merging shows too. Models of
    which two copies in fp32 do not fit into half of the memory that is free are not compared, which is logged.
    """
    needed = 2 * 4 * sum(math.prod(shape) for shape in weights.shapes.values())
    if needed > (free := available_memory()) / 2:
        logger.warning(
            "every weight is compared, but no logits: two copies in fp32 take %.0f GB, and %.0f GB of memory are free "
            "(at most half is used). Compare them on a larger machine with: verl merge test",
            needed / 1e9,
            free / 1e9,
        )
        return
    target_config = load_hf_config(str(folder), trust_remote_code=trust_remote_code)
    try:
        model = _auto_class(target_config).from_pretrained(
            folder, config=target_config, dtype="auto", trust_remote_code=trust_remote_code
        )
    except LOADING_ERRORS as error:
        raise CheckpointError(f"{folder} cannot be read: {why_unreadable(error, str(folder))}") from error
    if isinstance(adapted, Adapted):
        adapted.check_logits(model, folder)
        return
    rebuilt = empty_model(config, trust_remote_code)
    dtype, cause = torch.float32, "its config.json is another one"
    rebuilt.load_state_dict(dict(weights), strict=False, assign=True)  # names were compared before
    rebuilt.tie_weights()
    rebuilt.float()
    if adapted is not None:
        dtype = model.dtype  # to which merged weights are rounded
        cause += ", or its weights are not those of the model with its adapters"
        adapted.take_apart(rebuilt)
    for probe in probes(config):
        expected, actual = (part.float().eval()(**probe).logits for part in (rebuilt, model))
        if not is_rounding(actual, expected, dtype):
            raise CheckpointError(
                f"{folder} has the weights of the checkpoint, but its logits differ by "
                f"{largest_difference(actual, expected):.3g}: {cause}."
            )
