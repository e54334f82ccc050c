"""OmegaConf reads and writes YAML by libyaml as it does by itself."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError

from verl.trainer.config.omegaconf_private import (
    parsed_once,
    plain_dumper,
    plain_loader,
    use_faster_parsers,
    yaml_loader,
)

FILES = sorted((Path(__file__).parents[3] / "verl/trainer/config").rglob("*.yaml"))
TEXTS = [
    "a: 1e-6\nb: 012\nc: 1:30\nd: 2020-01-01\ne: 1_000\nf: .5\ng: '1e-6'\nh: -.inf\ni: 0x1F\nj: on\nk: ~\nl: ???",
    "a: [k: v, http://x:1]\nb: ${c}\nc: 'it''s # no comment' # one\nd: |\n  two\n  lines\n",
    "base: &b {x: 1}\nmore: {<<: *b, y: 2}\né: 🎉",
    "a: !!python/object/apply:pathlib.PosixPath [b]",
    "",
]


def test_the_same_values_are_read():
    use_faster_parsers()
    assert "CParser" in [base.__name__ for base in yaml_loader().__mro__]  # PyYAML's wheels have libyaml
    for text in [*TEXTS, *(file.read_text() for file in FILES)]:
        plain = yaml.load(text, Loader=plain_loader())
        assert repr(yaml.load(text, Loader=yaml_loader())) == repr(plain)
        assert not plain or repr(OmegaConf.create(text)) == repr(OmegaConf.create(plain))  # ${now:...} changes
    assert OmegaConf.create("a: 1e-6") == {"a": 0.000001}  # a text in YAML 1.1, a number for OmegaConf


def test_it_is_the_parser_that_omegaconf_takes(monkeypatch, tmp_path):
    use_faster_parsers()
    monkeypatch.delattr(yaml.parser.Parser, "parse_stream_start")  # of the parser in Python
    file = tmp_path / "a.yaml"
    file.write_text("a: [1, 2]")
    assert OmegaConf.load(file) == OmegaConf.create("a: [1, 2]") == {"a": [1, 2]}


def test_the_same_text_is_written(monkeypatch):
    use_faster_parsers()
    options = {"default_flow_style": False, "allow_unicode": True, "sort_keys": False}
    texts = ["on", "1e-6", "a: b", "# no comment", "two\nlines\n", " ", "${a.b}", "\u202e\x07", "word " * 40, "é"]
    documents = [text.replace("🎉", "") for text in [*TEXTS, *(file.read_text() for file in FILES)]]
    configs = [OmegaConf.create(text) for text in documents]
    configs.append(
        OmegaConf.create({"texts": texts, "none": None, "nested": {"numbers": [1, 2.5, True, float("inf")]}})
    )
    plain = [yaml.dump(OmegaConf.to_container(config), Dumper=plain_dumper(), **options) for config in configs]
    monkeypatch.delattr(yaml.emitter.Emitter, "emit")  # of the emitter in Python
    assert [OmegaConf.to_yaml(config) for config in configs] == plain
    assert OmegaConf.create(OmegaConf.to_yaml(OmegaConf.create({"a": "🎉"}))) == {"a": "🎉"}  # written as its code


@pytest.mark.parametrize("text", ["a: 1\na: 2", "a:\n\t- 1", "a: b: c", "a: !!python/object/apply:os.system [ls]"])
def test_what_cannot_be_read_is_told_in_the_words_of_the_plain_parser(tmp_path, text):
    use_faster_parsers()
    file = tmp_path / "a.yaml"
    file.write_text(text)
    with file.open() as stream, pytest.raises(yaml.YAMLError) as plain:
        yaml.load(stream, Loader=plain_loader())
    with pytest.raises(yaml.YAMLError) as told:
        OmegaConf.load(file)
    assert str(told.value) == str(plain.value)
    assert f'"{file}", line 2' in str(plain.value) or "line 1, column" in str(plain.value)


def test_interpolations_are_parsed_once_and_resolved_each_time(monkeypatch):
    use_faster_parsers()
    monkeypatch.setenv("WORD", "one")
    texts = {
        "at": "${a}",
        "relative": "${.a}",
        "sentence": "the ${a} of ${oc.env:WORD}",
        "list": "${oc.select:b,[1, x]}",
    }
    config = OmegaConf.create({"a": 1, **texts})
    assert OmegaConf.to_container(config, resolve=True) == {
        "a": 1, "at": 1, "relative": 1, "sentence": "the 1 of one", "list": [1, "x"],
    }  # fmt: skip
    parsed = parsed_once.cache_info().misses
    config.a, config.b = "two", 3
    monkeypatch.setenv("WORD", "three")
    other = OmegaConf.create({"below": {"a": "four", **texts}, "a": 5})
    assert (config.at, config.relative, config.sentence, config.list) == ("two", "two", "the two of three", 3)
    assert (other.below.at, other.below.relative, other.below.sentence) == (5, "four", "the 5 of three")
    assert parsed_once.cache_info().misses == parsed
    for _ in range(2):
        with pytest.raises(GrammarParseError):
            OmegaConf.to_container(OmegaConf.create({"a": "${b"}), resolve=True)


def test_numbers_of_texts_stay_as_they_are_written(tmp_path):
    use_faster_parsers({"trainer.experiment_name", "data.train_files"}.__contains__)
    file = tmp_path / "a.yaml"
    file.write_text(
        "trainer: {experiment_name: 2026_11_28, steps: 1_0}\ndata: {train_files: [007, 1e3, ~, on]}\nseed: 1_0"
    )
    assert OmegaConf.load(file) == {
        "trainer": {"experiment_name": "2026_11_28", "steps": 10},
        "data": {"train_files": ["007", "1e3", None, True]},
        "seed": 10,
    }
