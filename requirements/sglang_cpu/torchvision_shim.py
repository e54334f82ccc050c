"""Lets PyPI's torchvision be imported beside a CPU build of PyTorch, which SGLang and vLLM need for models with images.

That torchvision is a CUDA build: its library of operators does not load here, and importing it fails where it
describes operators that nobody declared. So they are declared, without an implementation, just before the import.
SGLang needs the import to start, too. Loaded by a ``.pth`` file; it costs nothing until torchvision is imported.
"""

from __future__ import annotations

import importlib.machinery
import re
import sys
from pathlib import Path

_OPERATORS = re.compile(r'register_fake\("torchvision::(\w+)"\)|register_meta\("(\w+)"\)')
_declared = []
"""The library of declarations; they end with it."""


class _BeforeTorchvision:
    """Sees torchvision's import first, and leaves it to the others."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        if name == "torchvision":
            sys.meta_path.remove(self)
            _declare()


def _declare() -> None:
    import torch

    spec = importlib.machinery.PathFinder.find_spec("torchvision")
    if spec is None or spec.origin is None:
        return
    described = Path(spec.origin).with_name("_meta_registrations.py").read_text()
    library = torch.library.Library("torchvision", "DEF")
    for names in _OPERATORS.findall(described):
        library.define(f"{''.join(names)}(Tensor x) -> Tensor")
    _declared.append(library)


sys.meta_path.insert(0, _BeforeTorchvision())
