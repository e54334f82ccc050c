"""Imports without garbage collection, and in a thread."""

from __future__ import annotations

import gc
import sys

import pytest

from verl.base.lazy import importing, importing_meanwhile


@pytest.fixture(autouse=True)
def unfrozen():
    yield
    gc.unfreeze()


def test_collection_is_off_in_the_block_and_on_again_after_it():
    with importing():
        kept = [[]]
        assert not gc.isenabled()
    assert gc.isenabled()
    assert not any(kept is thing for thing in gc.get_objects())  # what the block made is not looked at again


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        with importing():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_modules_are_imported_when_the_block_ends_and_an_unusable_one_does_not_end_it(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "imported_meanwhile.py").write_text("value = 7")
    (tmp_path / "raises_meanwhile.py").write_text("1 / 0")
    with importing_meanwhile(["imported_meanwhile", "raises_meanwhile"]):
        pass
    assert sys.modules["imported_meanwhile"].value == 7
    with pytest.raises(ZeroDivisionError):
        import raises_meanwhile  # noqa: F401  # pyright: ignore[reportMissingImports]
