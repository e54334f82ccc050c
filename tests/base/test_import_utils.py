"""Users' code by path."""

import importlib
import sys

import pytest

from verl.base.import_utils import load_module, load_object, prepare_process
from verl.errors import ConfigError

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
        ("nowhere/code.py", "x", "a.path='nowhere/code.py': there is no file"),
        ("no_such_module_anywhere", "x", "there is no module 'no_such_module_anywhere'"),
        ("json.no_such_part", "x", "there is no module 'json.no_such_part'"),
        ("math", "flor", "a.name='flor': math has no such name. Did you mean 'floor'?"),
    ],
)
def test_what_is_not_there(path, name, says):
    with pytest.raises(ConfigError) as caught:
        load_object(path, name, "a.path", "a.name")
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("code", "line", "error"),
    [
        (
            "x = 1\nimport no_such_module_anywhere\n",
            "2: import no_such_module_anywhere",
            "ModuleNotFoundError: No",
        ),
        ("def score(:\n", "1: def score(:", "SyntaxError: invalid syntax"),
        ("def f():\n    return 1 / 0\n\nf()\n", "2: return 1 / 0", "ZeroDivisionError: division by zero"),
        ("import json\njson.loads('{')\n", "2: json.loads('{')", "JSONDecodeError: Expecting property name"),
        ("import sys\nsys.exit('usage')\n", "2: sys.exit('usage')", "SystemExit: usage"),
    ],
    ids=["import", "syntax", "error", "error in a library", "exit"],
)
def test_an_error_of_the_users_code_shows_the_users_line(tmp_path, monkeypatch, code, line, error):
    path = tmp_path / "breaks_here.py"
    path.write_text(code)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "breaks_here")
    ways = {
        f"custom='{path}' cannot be imported": lambda: load_module(str(path), "custom"),
        "custom='breaks_here' cannot be imported": lambda: load_module("breaks_here", "custom"),
        "VERL_USE_EXTERNAL_MODULES='breaks_here' cannot be imported": prepare_process,
    }
    for problem, way in ways.items():
        with pytest.raises(ConfigError) as caught:
            way()
        assert str(caught.value).startswith(f"{problem}:\n  {path}:{line}\n  {error}")
        assert len(str(caught.value).splitlines()) == 3
    assert not [one for one in list(sys.modules.values()) if getattr(one, "__file__", None) == str(path)]
    path.write_text("fine = 1")
    assert load_object(str(path), "fine", "custom") == 1


def test_a_module_of_the_environment_that_does_not_exist_is_named(monkeypatch):
    monkeypatch.setenv("VERL_USE_EXTERNAL_MODULES", "no_such_idea")
    with pytest.raises(ConfigError, match=r"VERL_USE_EXTERNAL_MODULES.*there is no module 'no_such_idea'.*PYTHONPATH"):
        prepare_process()


def test_plugins_are_started_by_name(tmp_path, monkeypatch):
    """A plugin is an entry point of an installed package: here a package of one file and its metadata."""
    (tmp_path / "my_plugin.py").write_text("started = []\ndef start(): started.append(1)\n")
    metadata = tmp_path / "my_plugin-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: my_plugin\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[verl.plugins]\nmine = my_plugin:start\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "mine")
    prepare_process()
    assert importlib.import_module("my_plugin").started == [1]
    monkeypatch.setenv("VERL_USE_EXTERNAL_PLUGINS", "mein")
    with pytest.raises(ConfigError, match=r"names 'mein', and no installed package has such an entry point.*mine"):
        prepare_process()
