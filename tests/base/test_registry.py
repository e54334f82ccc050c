"""Registries of any kind forget what was registered for a while."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

import pytest

from verl.base.registry import Registry, scoped_registrations


def test_all_registries_forget_what_others_registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that registered something is imported anew by the next who wants it; verl's own names stay."""
    shapes, colours = Registry("shape"), Registry("colour")
    monkeypatch.setitem(sys.modules, "shapes_of_a_test", sys.modules[__name__])
    monkeypatch.setattr(sys.modules[__name__], "shapes", shapes, raising=False)
    (tmp_path / "my_square.py").write_text(
        "from shapes_of_a_test import shapes\n@shapes.register('square')\nclass Square: ...\n"
    )
    (tmp_path / "my_circle.py").write_text("class Circle: ...\n")
    monkeypatch.syspath_prepend(tmp_path)

    class Blue: ...

    class Own: ...

    Own.__module__ = "verl.of_its_own"
    colours.add("blue", Blue)
    for _ in range(2):
        with scoped_registrations():
            importlib.import_module("my_square")
            importlib.import_module("my_circle")
            colours.remove("blue")
            colours.add("sea", Blue)
            colours.add("own", Own)
            assert (shapes.names(), colours.names()) == (["square"], ["own", "sea"])
        assert (shapes.names(), colours.names()) == ([], ["blue", "own"])
        assert ("my_square" in sys.modules, "my_circle" in sys.modules) == (False, True)
    sys.modules.pop("my_circle")
