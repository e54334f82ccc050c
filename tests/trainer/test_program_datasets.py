"""Data sets in the public style, which read a key of their own, the attributes of their base class, and make rows."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from omegaconf import OmegaConf

from tests.support.tiny_run import make_tiny_run, overrides
from verl.config import SFTConfig
from verl.datasets import MultiTurnSFTDataset, RLHFDataset, create_sft_dataset
from verl.errors import ConfigError, DataError
from verl.testing.models import tiny_tokenizer
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import data_section, load_config
from verl.trainer.ppo.rows import rl_datasets

TOKENIZER = tiny_tokenizer()
PROGRAM = '''
import pandas
from verl.utils.dataset.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.utils.dataset.rl_dataset import RLHFDataset, left_pad


class Questions(RLHFDataset):
    """Rows of its own, messages of its own, verl's items."""

    def _read_files_and_tokenize(self):
        rows = pandas.read_json(self.data_files[0], lines=True)
        self.dataframe = self.maybe_filter_out_long_prompts(rows)
        self.dataframe = self.dataframe[: self.config.get("keep", 99)]

    def _build_messages(self, example):
        number = example[self.prompt_key][0]["content"].split()[1]
        return [{"role": "user", "content": self.config.get("my_switch", "default") + number}]


class Items(RLHFDataset):
    """Verl's rows without a column of prompts; items of its own."""

    def __getitem__(self, item):
        row = dict(self.dataframe[item])
        ids = self.tokenizer.encode(self.config.get("my_switch", "default"))[: self.max_prompt_length]
        return left_pad(ids, self.max_prompt_length, self.tokenizer.pad_token_id) | {"asked": row["question"]}

    def maybe_filter_out_long_prompts(self, dataframe=None):
        return dataframe.filter(lambda row: row["question"] != "no", num_proc=1)


class Copied(RLHFDataset):
    """An ``__init__`` that does not call verl's."""

    def __init__(self, data_files, tokenizer, config, processor=None, max_samples=-1):
        self.data_files, self.tokenizer, self.processor, self.config = data_files, tokenizer, processor, config
        self.max_samples = max_samples
        self.prompt_key, self.image_key, self.video_key = config.get("prompt_key", "prompt"), "images", "videos"
        self.max_prompt_length, self.truncation = config.get("max_prompt_length", 1024), "left"
        self.return_raw_chat, self.return_full_prompt = True, False
        self.filter_overlong_prompts, self.num_workers = False, 1
        self.apply_chat_template_kwargs = {}
        self._download()
        self._read_files_and_tokenize()


class Conversations(MultiTurnSFTDataset):
    def _build_messages(self, example):
        text = self.config.get("my_switch", "default")
        return [*example[self.messages_key][:1], {"role": "assistant", "content": text}]
'''


def composed(folder: Path, name: str, *further: str) -> Any:
    (folder / "program.py").write_text(PROGRAM)
    cls = (f"data.custom_cls.path={folder / 'program.py'}", f"data.custom_cls.name={name}")
    return compose([*overrides(make_tiny_run(folder), folder / "run"), *cls, *further])


def text(item: dict[str, Any]) -> str:
    return TOKENIZER.decode(item["input_ids"], skip_special_tokens=True)


def test_a_key_of_a_program_reaches_its_data_set(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_config(composed(tmp_path, "Questions", "+data.my_switch=on", "+data.keep=3"), with_rules=False)
    assert "data.my_switch, data.keep: only the class of custom_cls reads it" in caplog.text
    train, val, _ = rl_datasets(config, TOKENIZER)
    assert [text(train[item]) for item in range(len(train))] == ["on7", "on18", "on7"]
    assert list(train.dataframe["data_source"]) == ["countdown"] * 3
    assert len(val) == 3
    with pytest.raises(ConfigError, match=r"data\.my_switch=on: there is no such key"):
        load_config(compose([*overrides(make_tiny_run(tmp_path), tmp_path), "+data.my_switch=on"]), with_rules=False)


def test_a_data_set_that_makes_its_items(tmp_path: Path) -> None:
    rows = [{"question": word, "data_source": "x"} for word in ("yes", "no", "perhaps")]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    files = f"data.train_files={tmp_path / 'rows.jsonl'}"
    config = load_config(composed(tmp_path, "Items", "+data.my_switch=on", files), with_rules=False)
    dataset: Any = rl_datasets(replace(config, data=replace(config.data, val_files=None)), TOKENIZER)[0]
    assert [dataset[item]["asked"] for item in range(len(dataset))] == ["yes", "perhaps"]
    assert text(dataset[0]) == "on"
    with pytest.raises(DataError, match="has no column 'prompt'"):
        RLHFDataset(str(tmp_path / "rows.jsonl"), TOKENIZER, {})


class InMemory(RLHFDataset):
    """Rows that are assigned after verl's ``__init__``, which gets neither files nor a tokenizer."""

    def __init__(self, rows: object) -> None:
        super().__init__([], None, OmegaConf.create({}))
        self.dataframe = rows

    def __getitem__(self, item: int) -> Any:
        return self.dataframe[item]

    def _read_files_and_tokenize(self) -> None:
        pass


def test_rows_in_memory_need_no_tokenizer() -> None:
    rows = [{"question": "1 + 1"}, {"question": "2 + 2"}]
    dataset = InMemory(rows)
    assert [dataset[item] for item in range(len(dataset))] == rows
    with pytest.raises(DataError, match=r"InMemory\._read_files_and_tokenize .* must set self\.dataframe"):
        len(InMemory(None))


def test_an_init_that_does_not_call_verls(tmp_path: Path) -> None:
    config = load_config(composed(tmp_path, "Copied", "data.max_prompt_length=6"), with_rules=False)
    dataset = rl_datasets(config, TOKENIZER)[0]
    assert len(dataset) == len(dataset.dataframe) == 16
    assert dataset[0]["input_ids"].shape == (6,)
    dataset.dataframe = dataset.dataframe.select([5, 0])
    assert [item["extra_info"]["index"] for item in (dataset[0], dataset[1])] == [5, 0]


def test_attributes_of_a_prompt_data_set(tmp_path: Path) -> None:
    section = OmegaConf.create({"prompt_key": "prompt", "image_patch_size": 16, "cache_dir": "/tmp/x"})
    dataset = RLHFDataset(make_tiny_run(tmp_path)["train"], TOKENIZER, section, max_samples=4)
    names = """data_files original_data_files tokenizer processor max_samples config cache_dir prompt_key image_key
        video_key audio_key image_patch_size max_prompt_length return_raw_chat return_full_prompt truncation
        filter_overlong_prompts apply_chat_template_kwargs tool_config_path function_tool_path tool_schemas num_workers
        use_shm chat_template_func need_tools_kwargs filter_prompts return_multi_modal_inputs mm_processor_kwargs
        shuffle seed serialize_dataset dataframe"""
    assert [name for name in names.split() if not hasattr(dataset, name)] == []
    assert (dataset.image_patch_size, dataset.cache_dir, len(dataset.dataframe)) == (16, "/tmp/x", 4)
    row = dataset.dataframe[1]
    assert dataset._build_messages(row) == row["prompt"]
    assert dataset.dataframe["prompt"][1] == row["prompt"]
    assert {"prompt", "extra_info"} <= set(dataset.dataframe.column_names)


def test_a_supervised_data_set(tmp_path: Path) -> None:
    file = tmp_path / "rows.jsonl"
    turns = [{"role": "user", "content": "2 + 2"}, {"role": "assistant", "content": "4"}]
    file.write_text("\n".join(json.dumps({"messages": turns}) for _ in range(3)))
    (tmp_path / "program.py").write_text(PROGRAM)
    cls = {"path": str(tmp_path / "program.py"), "name": "Conversations"}
    data = {"train_files": str(file), "custom_cls": cls, "my_switch": "55", "max_length": 64}
    section = data_section(load_config({"data": data}, SFTConfig, with_rules=False))
    dataset: Any = create_sft_dataset(str(file), section, TOKENIZER)
    item = dataset[2]
    assert "55" in TOKENIZER.decode(item["input_ids"][item["loss_mask"].bool()])
    names = """parquet_files tokenizer processor max_samples config pad_mode truncation max_length messages_key
        tools_key enable_thinking_key enable_thinking_default image_key video_key image_patch_size
        apply_chat_template_kwargs ignore_input_ids_mismatch shuffle seed use_shm dataframe messages tools
        enable_thinking system_prompt generation_prompt"""
    assert [name for name in names.split() if not hasattr(dataset, name)] == []
    assert list(dataset.dataframe["messages"]) == dataset.messages == [turns] * 3
    assert dataset.tools is None
    with pytest.raises(ConfigError, match=r"Mine\.sanity_check would never be called"):
        type("Mine", (MultiTurnSFTDataset,), {"sanity_check": lambda self: None})
