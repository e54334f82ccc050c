"""Users' code by path."""

import sys

import pytest

from verl.errors import ConfigError
from verl.utils.import_utils import load_module, load_object

CODE = "from dataclasses import dataclass\n@dataclass\nclass Thing:\n    x: int = 1\ndef hello():\n    return 'hi'\n"


def test_a_file_is_loaded_once(tmp_path, monkeypatch):
    (tmp_path / "code.py").write_text(CODE)
    monkeypatch.setenv("HERE", str(tmp_path))
    assert load_object(str(tmp_path / "code.py"), "hello", "custom")() == "hi"
    assert load_object("$HERE/code.py", "Thing", "custom") is load_object(str(tmp_path / "code.py"), "Thing", "custom")


def test_two_files_of_one_name_are_two_modules(tmp_path):
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "code.py").write_text(f"where = '{folder}'")
    assert [load_object(str(tmp_path / f / "code.py"), "where", "custom") for f in "ab"] == ["a", "b"]


@pytest.mark.parametrize("path", ["math", "pkg://math"])
def test_modules(path):
    assert load_object(path, "floor", "custom")(1.5) == 1


@pytest.mark.parametrize(
    "path, name, says",
    [
        ("nowhere/code.py", "x", "custom.path='nowhere/code.py': there is no file"),
        ("no_such_module_anywhere", "x", "there is no module 'no_such_module_anywhere'"),
        ("json.no_such_part", "x", "there is no module 'json.no_such_part'"),
        ("math", "flor", "custom.name='flor': math has no such name. Did you mean 'floor'?"),
    ],
)
def test_what_is_not_there(path, name, says):
    with pytest.raises(ConfigError) as caught:
        load_object(path, name, "custom")
    assert says in str(caught.value)


def test_errors_inside_the_users_code_are_the_users(tmp_path, monkeypatch):
    path = tmp_path / "breaks_here.py"
    path.write_text("import no_such_module_anywhere")
    monkeypatch.syspath_prepend(tmp_path)
    for way in (str(path), "breaks_here"):
        with pytest.raises(ModuleNotFoundError, match="no_such_module_anywhere") as caught:
            load_module(way, "custom")
        assert not isinstance(caught.value, ConfigError)
    assert not [name for name in sys.modules if "breaks_here" in name]
    path.write_text("fine = 1")
    assert load_object(str(path), "fine", "custom") == 1
