"""Find damaged files in a local model folder without reading its weights: sizes, headers and JSON only."""

from __future__ import annotations

import json
import struct
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from verl.base.fs import copy_to_local, name_of_state, own_copies
from verl.base.remote import is_remote
from verl.errors import ConfigError, DataError

JSON_FILES = ("config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json")
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "spiece.model", "sentencepiece.bpe.model",
    "tekken.json", "*.tiktoken", "tokenization_*.py",
)  # fmt: skip
"""A tokenizer needs one of these files; without any, Transformers makes one that turns every text into no tokens."""
GGUF = ".gguf"
"""Ending of a file that is a whole model: config, tokenizer and weights."""
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")
"""Files of a model that is in one piece; in several, ``<file>.index.json`` lists the parts."""


def tokenizer_problem(folder: Path) -> str | None:
    """Why ``folder`` holds no tokenizer; None if it has a vocabulary."""
    if any(next(folder.glob(name), None) is not None for name in VOCABULARIES):
        return None
    return f"the folder holds no tokenizer: none of {', '.join(VOCABULARIES[:-1])}"


def read_chat_template(template: str) -> str:
    """Return the Jinja text of a chat template, which ``template`` is or names a file of.

    Raises:
        ConfigError: it is neither.
    """
    if _is_jinja(template):
        return template
    reason = "the file has no Jinja expression"
    try:
        text = Path(copy_to_local(template) if is_remote(template) else template).expanduser().read_text("utf-8")
        if _is_jinja(text):
            return text
    except (OSError, ValueError, DataError) as error:
        reason = str(error)
    raise ConfigError(
        f"the chat template {template!r:.200} is neither Jinja text, which has {{{{ }}}} or {{% %}}, nor a file with "
        f"it ({reason})"
    )


def _is_jinja(text: str) -> bool:
    return "{{" in text or "{%" in text


def file_problem(folder: Path) -> str | None:
    """The first damaged file of a model folder and what is wrong with it; None if none is found."""
    return next(_problems(folder), None)


def attention_heads(folder: Path) -> int | None:
    """The number of query heads in ``config.json`` of a model folder; None if there is none to be read."""
    return _size_of_text_model(folder, "num_attention_heads")


def key_value_heads(folder: Path) -> int | None:
    """The number of key/value heads in ``config.json`` of a model folder; None if there is none to be read."""
    return _size_of_text_model(folder, "num_key_value_heads") or attention_heads(folder)


def longest_context(path: str, override: Mapping[str, object] | None = None) -> int | None:
    """Return ``max_position_embeddings`` of ``override``, else of a model's folder or name; None if unknown."""
    stated = (override or {}).get("max_position_embeddings")
    if isinstance(stated, int):
        return stated
    return _size_of_text_model(Path(path).expanduser(), "max_position_embeddings")


def vision_heads(folder: Path) -> int | None:
    """The number of heads of the vision tower in ``config.json`` of a model folder; None if there is none."""
    content = config_entries(folder)
    vision = content.get("vision_config")
    size = vision.get("num_heads") if isinstance(vision, dict) else None
    return size if isinstance(size, int) and size > 0 else None


def head_split_problem(heads: int, kv_heads: int, ranks: int) -> str | None:
    """Why so many ranks cannot split the attention heads of each layer; None if they can."""
    if heads % ranks:
        return f"each rank computes equally many of the model's {heads} attention heads"
    if kv_heads % ranks and ranks % kv_heads:
        return f"the model's {kv_heads} key/value heads can neither be dealt out to the ranks nor repeated evenly"
    return None


def config_entries(folder: Path) -> dict[str, object]:
    """The entries of ``config.json`` of a model, which may be a name on the hub; empty if there are none to be read."""
    file = model_folder(folder) / "config.json"
    return _json_object(file)[0] if file.is_file() else {}


def model_folder(model: str | Path) -> Path:
    """Return the folder of a model: that in the cache of a name on the Hugging Face hub, or of a GGUF file.

    It is there once the model was downloaded or converted.
    """
    folder = Path(model).expanduser()
    if folder.suffix == GGUF:
        return folder_of_gguf(folder)
    if folder.is_absolute() or len(folder.parts) > 2 or folder.is_dir():
        return folder
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        file = try_to_load_from_cache(folder.as_posix(), "config.json")
    except HFValidationError:  # it is no name of a model
        return folder
    return Path(file).parent if isinstance(file, str) else folder


def folder_of_gguf(file: Path) -> Path:
    """Return where the model folder that is converted from a GGUF file is, or will be."""
    return own_copies() / (name_of_state(file, [file]) if file.is_file() else "none") / file.stem


def gguf_problem(file: Path) -> str | None:
    """Why ``file`` cannot be a model in GGUF, from its first bytes; None if it can."""
    if not file.is_file():
        return "does not exist" if not file.exists() else "is a folder, not a file"
    with file.open("rb") as opened:
        start = opened.read(4)
    if start == b"GGUF":
        return None
    return _pointer(file) or f"is no GGUF file: it begins with {start!r}, not with b'GGUF'"


def _size_of_text_model(folder: Path, name: str) -> int | None:
    content = config_entries(folder)
    text = content.get("text_config")
    size = (text if isinstance(text, dict) else content).get(name)
    return size if isinstance(size, int) and size > 0 else None


def model_type(folder: Path) -> str | None:
    """The ``model_type`` in ``config.json`` of a model folder; None if there is none to be read."""
    content = config_entries(folder)
    kind = content.get("model_type")
    return kind if isinstance(kind, str) else None


def layer_types(folder: Path) -> list[str]:
    """The ``layer_types`` of the text model in ``config.json`` of a model folder; empty if all are full attention.

    Published files of Qwen3-Next, DeepSeek-V3.2 and GLM-5 have another entry in its place, which then says which kinds
    of layers there are, each of them once.
    """
    content = config_entries(folder)
    text = content["text_config"] if isinstance(content.get("text_config"), dict) else content
    assert isinstance(text, dict)
    if isinstance(kinds := text.get("layer_types"), list):
        return [str(kind) for kind in kinds]
    if text.get("full_attention_interval"):
        return ["linear_attention", "full_attention"]
    return ["indexed_attention"] if text.get("index_topk") else []


def quantization_problem(folder: Path) -> str | None:
    """Why the weights of ``folder`` cannot be trained or handed over; None if its config names no quantization."""
    content = config_entries(folder)
    text = content.get("text_config")
    parts = (content, text if isinstance(text, dict) else {})
    return quantized_by(next((part["quantization_config"] for part in parts if part.get("quantization_config")), None))


def quantized_by(about: object) -> str | None:
    """Say how weights are quantized by the ``quantization_config`` of their config; None if they are not."""
    if not about:
        return None
    method = about.get("quant_method") if isinstance(about, dict) else getattr(about, "quant_method", None)
    method = getattr(method, "value", method)
    return (
        f"its weights are quantized ({method or 'quantization_config in its config.json'}), and training, log-probs "
        "and weight updates need all their bits"
    )


DEQUANTIZE = (
    "name a folder with weights in bf16, fp16 or fp32; Transformers' model.dequantize() and save_pretrained make one"
)
"""Remedy for quantized weights."""


def weights_problem(folder: Path) -> str | None:
    """Why ``folder`` has no weights; None if a file of them is there, damaged or not."""
    if any((folder / f"{name}{end}").exists() for name in WEIGHT_FILES for end in ("", ".index.json")):
        return None
    if next(folder.glob("*.safetensors"), None) or next(folder.glob("*.bin"), None):
        return None  # named in a way that this module does not know
    return "the folder holds no weights: neither model.safetensors nor pytorch_model.bin, in one piece or with an index"


def weight_bytes(folder: Path) -> int:
    """Return the size of the weight files of a model folder; where there are two formats, of the larger."""
    sizes = (sum(file.stat().st_size for file in folder.glob(f"*.{end}")) for end in ("safetensors", "bin"))
    return max(sizes)


def _problems(folder: Path) -> Iterator[str]:
    for name in JSON_FILES:
        if (folder / name).exists() and (problem := _json_object(folder / name)[1]):
            yield problem
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).exists():
            yield from _weight_file(folder / name)
            return  # Transformers reads no other
        if index.exists():
            yield from _parts(folder, index)
            return


def _parts(folder: Path, index: Path) -> Iterator[str]:
    content, problem = _json_object(index)
    places = content.get("weight_map")
    if problem or not isinstance(places, dict) or not all(isinstance(file, str) for file in places.values()):
        yield problem or f"{index} is damaged: it has no weight_map from weights to files"
        return
    for file in sorted(set(places.values())):
        if not (folder / file).is_file():
            yield f"{folder / file} is missing, which {index.name} names"
        else:
            yield from _weight_file(folder / file)


def _weight_file(path: Path) -> Iterator[str]:
    try:
        problem = _safetensors_problem(path) if path.suffix == ".safetensors" else _torch_problem(path)
    except OSError as error:
        problem = f"cannot be read ({error.strerror})"
    if problem:
        yield f"{path} {problem}. Copy or download it again"


def _safetensors_problem(path: Path) -> str | None:
    """Compare the file's length with what its header announces."""
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else 0
        if not 0 < length <= size - 8:
            return _pointer(path) or f"is cut or no safetensors file: {size} bytes do not hold its header"
        header = file.read(length)
    try:
        tensors = {name: entry for name, entry in json.loads(header).items() if name != "__metadata__"}
        needed = 8 + length + max((int(entry["data_offsets"][1]) for entry in tensors.values()), default=0)
    except (ValueError, KeyError, TypeError, AttributeError, IndexError):
        return "is damaged: its header is not that of a safetensors file"
    if size != needed:
        return f"is {'cut' if size < needed else 'damaged'}: it has {size} bytes, and its header announces {needed}"
    return None


def _torch_problem(path: Path) -> str | None:
    """A zip archive has its directory at the end, so a cut one is none; older pickles are left to PyTorch."""
    with path.open("rb") as file:
        start = file.read(4)
    if not start:
        return "is empty"
    if start.startswith(b"PK") and not zipfile.is_zipfile(path):
        return f"is cut: its {path.stat().st_size} bytes do not hold the whole archive"
    return _pointer(path)


def _pointer(path: Path) -> str | None:
    """A file of Git LFS that was never downloaded is a few lines of text."""
    with path.open("rb") as file:
        is_pointer = file.read(12) == b"version http"
    return "is only a pointer of Git LFS, not the file itself (run git lfs pull)" if is_pointer else None


def _json_object(path: Path) -> tuple[dict[str, object], str | None]:
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        return {}, f"{path} is damaged: it is no JSON ({str(error) or type(error).__name__})"
    except OSError as error:
        return {}, f"{path} cannot be read ({error.strerror})"
    if not isinstance(content, dict):
        return {}, f"{path} is damaged: it holds a {type(content).__name__}, not an object"
    return content, None
