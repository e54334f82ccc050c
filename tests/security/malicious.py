"""Files that run code where somebody trusts them: each would leave a file behind, which tells that it did."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import torch


class Bomb:
    """Unpickling it makes the folder ``path``."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.path,)


def pickle_bomb(file: Path, mark: Path) -> Path:
    """A plain pickle."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(pickle.dumps({"x": Bomb(mark)}, protocol=2))
    return file


def torch_bomb(file: Path, mark: Path, **around: Any) -> Path:
    """What ``torch.save`` writes, with the bomb among honest entries."""
    file.parent.mkdir(parents=True, exist_ok=True)
    torch.save({**around, "bomb": Bomb(mark)}, file)
    return file


def code_bomb(mark: Path) -> str:
    """Python source that leaves the mark when it is imported."""
    return f"import os\nos.makedirs({str(mark)!r}, exist_ok=True)\n"


def with_remote_code(folder: Path, mark: Path, model_type: str | None = "evil") -> Path:
    """Make a model folder name Python files of its own, for config, model and tokenizer.

    Args:
        folder: a model folder.
        mark: what the files leave behind.
        model_type: one that Transformers does not know, so that it cannot do without the files; None keeps the own.
    """
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {
        "AutoConfig": "configuration_evil.EvilConfig",
        "AutoModelForCausalLM": "modeling_evil.EvilForCausalLM",
        "AutoModelForTokenClassification": "modeling_evil.EvilForCausalLM",
    }
    if model_type is not None:
        config["model_type"] = model_type
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "configuration_evil.py").write_text(
        code_bomb(mark) + "from transformers import Qwen3Config\n\n\nclass EvilConfig(Qwen3Config):\n"
        f"    model_type = {config['model_type']!r}\n"
    )
    (folder / "modeling_evil.py").write_text(
        code_bomb(mark)
        + "from transformers import Qwen3ForCausalLM\n\nfrom .configuration_evil import EvilConfig\n\n\n"
        "class EvilForCausalLM(Qwen3ForCausalLM):\n    config_class = EvilConfig\n"
    )
    return folder


def with_tokenizer_code(folder: Path, mark: Path) -> Path:
    """Make a tokenizer's folder name a Python file of its own."""
    path = folder / "tokenizer_config.json"
    config = json.loads(path.read_text())
    config |= {
        "tokenizer_class": "EvilTokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_evil.EvilTokenizer", None]},
    }
    path.write_text(json.dumps(config))
    (folder / "tokenization_evil.py").write_text(
        code_bomb(mark) + "from transformers import PreTrainedTokenizerFast\n\n\n"
        "class EvilTokenizer(PreTrainedTokenizerFast):\n    pass\n"
    )
    return folder
