"""Prompts: rows, checks at opening, batches, and the order of reading."""

import dataclasses
import json
import logging
import threading

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from omegaconf import OmegaConf
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.config import CustomClassConfig
from verl.datasets import RLHFDataset, collate_fn, create_rl_dataset, create_rl_sampler
from verl.datasets.prompt_images import ImagePrompt, PromptImages
from verl.datasets.sampler import SeededShuffle
from verl.errors import ConfigError, DataError
from verl.testing.models import tiny_tokenizer
from verl.trainer.config import DataConfig

TOKENIZER = tiny_tokenizer()
CONFIG = DataConfig(max_prompt_length=8, seed=3)


def config(**changes):
    return dataclasses.replace(CONFIG, **changes)


def rows(count, text="q"):
    return [
        {
            "data_source": "countdown",
            "prompt": [{"role": "user", "content": f"{text}{i}"}],
            "reward_model": {"style": "rule", "ground_truth": {"target": i}},
            "extra_info": {"index": 100 + i, "split": "train"},
        }
        for i in range(count)
    ]


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


@pytest.fixture
def file(tmp_path):
    return jsonl(tmp_path / "train.jsonl", rows(10))


def test_a_row_by_hand(file):
    # <user> 2, "q" 30, "7" 11, <assistant> 3; pad 0; four of eight places are used.
    row = RLHFDataset(file, TOKENIZER, CONFIG)[7]
    assert row["input_ids"].tolist() == [0, 0, 0, 0, 2, 30, 11, 3]
    assert row["attention_mask"].tolist() == [0, 0, 0, 0, 1, 1, 1, 1]
    assert row["position_ids"].tolist() == [0, 0, 0, 0, 0, 1, 2, 3]
    assert {row[key].dtype for key in ("input_ids", "attention_mask", "position_ids")} == {torch.int64}
    assert row["raw_prompt"] == [{"role": "user", "content": "q7"}]
    assert row["index"] == 107
    assert row["row_index"] == 7
    assert row["data_source"] == "countdown"
    assert row["reward_model"] == {"style": "rule", "ground_truth": {"target": 7}}
    assert row["extra_info"] == {"index": 107, "split": "train"}
    assert row["tools_kwargs"] == row["interaction_kwargs"] == {}
    assert "prompt" not in row
    assert "raw_prompt_ids" not in row
    assert "full_prompts" not in row


def test_optional_columns(file):
    chosen = config(return_raw_chat=False, return_raw_input_ids=True, return_full_prompt=True)
    row = RLHFDataset(file, TOKENIZER, chosen)[7]
    assert "raw_prompt" not in row
    assert row["raw_prompt_ids"] == [2, 30, 11, 3]
    assert row["full_prompts"] == "<user>q7<assistant>"


def test_template_kwargs_reach_the_template(file):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ messages[0]['content'] }}{{ '!' if shout else '?' }}"
    row = RLHFDataset(file, tokenizer, config(return_full_prompt=True, apply_chat_template_kwargs={"shout": True}))[4]
    assert row["full_prompts"] == "q4!"


def test_parquet_json_and_jsonl_are_one_data_set(tmp_path):
    records = rows(6)
    pq.write_table(pa.Table.from_pylist(records[:2]), tmp_path / "a.parquet")
    (tmp_path / "b.json").write_text(json.dumps(records[2:4]))
    jsonl(tmp_path / "c.jsonl", records[4:])
    dataset = RLHFDataset([str(tmp_path / name) for name in ("a.parquet", "b.json", "c.jsonl")], TOKENIZER, CONFIG)
    assert [dataset[i]["index"] for i in range(6)] == [100, 101, 102, 103, 104, 105]
    assert [dataset[i]["reward_model"]["ground_truth"]["target"] for i in range(6)] == [0, 1, 2, 3, 4, 5]


def test_a_column_called_index_is_the_index_unless_extra_info_has_one(tmp_path):
    rows = [
        {"prompt": "a", "data_source": "x", "index": 7},
        {"prompt": "b", "data_source": "x", "index": 8, "extra_info": {"index": 80}},
    ]
    dataset = RLHFDataset(jsonl(tmp_path / "x.jsonl", rows), TOKENIZER, CONFIG)
    assert [(dataset[i]["index"], dataset[i]["row_index"]) for i in (0, 1)] == [(7, 0), (80, 1)]


def test_a_plain_string_and_a_mapped_column(tmp_path):
    path = jsonl(tmp_path / "x.jsonl", [{"question": "q7", "source": "mine"}])
    row = RLHFDataset(path, TOKENIZER, config(prompt_key="question", reward_fn_key="source"))[0]
    assert row["input_ids"].tolist() == [0, 0, 0, 0, 2, 30, 11, 3]
    assert row["data_source"] == "mine"
    assert row["index"] == 0
    assert RLHFDataset(path, TOKENIZER, config(prompt_key="question"))[0]["data_source"] == "unknown"


def test_tools_kwargs(tmp_path):
    extra = {
        "need_tools_kwargs": True,
        "tools_kwargs": {"add": {"create_kwargs": {}}},
        "interaction_kwargs": {"name": "x"},
    }
    path = jsonl(
        tmp_path / "x.jsonl",
        [{"prompt": "a", "extra_info": extra}, {"prompt": "a", "extra_info": {**extra, "tools_kwargs": {}}}],
    )
    with pytest.raises(DataError, match=r"row 1: extra_info\.need_tools_kwargs"):
        RLHFDataset(path, TOKENIZER, CONFIG)
    row = RLHFDataset(path, TOKENIZER, config(shuffle=False), max_samples=1)[0]
    assert row["tools_kwargs"] == extra["tools_kwargs"]
    assert row["interaction_kwargs"] == {"name": "x"}
    path = jsonl(tmp_path / "y.jsonl", [{"prompt": "a", "tools_kwargs": extra["tools_kwargs"]}])
    assert RLHFDataset(path, TOKENIZER, CONFIG)[0]["tools_kwargs"] == extra["tools_kwargs"]


# ---- lengths ------------------------------------------------------------------------------------


def long_file(tmp_path, lengths=(1, 9, 3, 12)):
    # The template adds two tokens: a content of n characters is n + 2 tokens.
    return jsonl(tmp_path / "long.jsonl", [{"prompt": "abcdefghijklmno"[:n]} for n in lengths])


@pytest.mark.parametrize(
    "truncation, kept",
    [
        ("left", "cdefghi<assistant>"),
        ("right", "<user>abcdefg"),
        ("middle", "<user>abcghi<assistant>"),
    ],
)
def test_truncation_of_a_long_prompt(tmp_path, truncation, kept):
    dataset = RLHFDataset(long_file(tmp_path), TOKENIZER, config(truncation=truncation, return_raw_input_ids=True))
    assert len(dataset) == 4
    assert TOKENIZER.decode(dataset[1]["raw_prompt_ids"]) == kept
    assert dataset[1]["attention_mask"].tolist() == [1] * 8
    assert dataset[1]["position_ids"].tolist() == list(range(8))


def test_a_long_prompt_is_an_error_at_opening(tmp_path):
    with pytest.raises(DataError) as caught:
        RLHFDataset(long_file(tmp_path), TOKENIZER, CONFIG)
    for part in ("2 of 4", "max_prompt_length=8", "row 1 with 11 tokens", "14", "filter_overlong_prompts"):
        assert part in str(caught.value)


@pytest.mark.parametrize("workers", [1, 2])
def test_the_filter_drops_long_prompts(tmp_path, workers, caplog):
    caplog.set_level(logging.INFO)
    chosen = config(filter_overlong_prompts=True, filter_overlong_prompts_workers=workers)
    dataset = RLHFDataset(long_file(tmp_path), TOKENIZER, chosen)
    assert [row["raw_prompt"][0]["content"] for row in dataset] == ["a", "abc"]
    assert "kept 2 of 4" in caplog.text


def test_all_prompts_too_long(tmp_path):
    with pytest.raises(DataError) as caught:
        RLHFDataset(long_file(tmp_path, (9, 12)), TOKENIZER, config(filter_overlong_prompts=True))
    for part in ("all 2 prompts", "max_prompt_length=8", "shortest has 11", "longest 14"):
        assert part in str(caught.value)


# ---- what is refused ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record, says",
    [
        ({"question": "x"}, "has no column 'prompt' (prompt_key). Its columns: question."),
        ({"prompt": [{"role": "user"}]}, "row 1: message 0 has content NoneType"),
        ({"prompt": "x", "images": ["a.png", "b.png"]}, "row 1: column 'images' holds 2 item(s)"),
        ({"prompt": "x", "videos": ["a"]}, "row 1: column 'videos'"),
        ({"prompt": "x", "audios": ["a"]}, "row 1: column 'audios'"),
        ({"prompt": "x", "input_ids": [1]}, "columns that a run makes itself: input_ids"),
        ({"prompt": "x", "uid": "a"}, "columns that a run makes itself: uid"),
        ({"prompt": "x", "responses": ["a"], "values": 1}, "columns that a run makes itself: responses, values"),
        ({"prompt": '[{"role": "user", "content": "x"}]'}, "row 1: messages are JSON text"),
        ({"prompt": "x", "extra_info": '{"index": 3}'}, "row 1: extra_info is str"),
        ({"prompt": "x", "data_source": 3}, "row 1: data_source is int 3, not text"),
    ],
)
@pytest.mark.parametrize("truncation", ["error", "left"])
def test_a_row_that_cannot_be_used(tmp_path, record, says, truncation):
    path = jsonl(tmp_path / "x.jsonl", [record if "question" in record else {"prompt": "x"}, record])
    with pytest.raises(DataError) as caught:
        RLHFDataset(path, TOKENIZER, config(truncation=truncation))
    assert says in str(caught.value)
    assert "x.jsonl" in str(caught.value)


def test_probable_mistakes_are_warnings_with_count_and_places(tmp_path, caplog):
    odd = [
        [{"role": "wizard", "content": "a"}, {"role": "user", "content": "b"}],
        [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}],
        [{"role": "system", "content": "a"}],
        " ",
        "a<eos>",
        "fine",
    ]
    rows = [{"prompt": prompt} for prompt in [*odd, "b<eos>", "c<eos>", "d<pad>"]]
    path = jsonl(tmp_path / "odd.jsonl", rows)
    RLHFDataset(path, TOKENIZER, config(max_prompt_length=40))
    said = {record.getMessage().split(":")[0]: record.getMessage().split(": ", 1)[1] for record in caplog.records}
    assert {key: value.split(". ")[0] for key, value in said.items()} == {
        "1 of 9 prompts have a message of a role that the chat template does not name": f"{path}, row 0 (wizard)",
        "1 of 9 prompts end with the assistant's turn, so the model is asked for a second answer after that one": (
            f"{path}, row 1"
        ),
        "1 of 9 prompts have no message of the user": f"{path}, row 2",
        "1 of 9 prompts have a message of the user without text": f"{path}, row 3",
        "4 of 9 prompts have the text of a special token inside a message, which stays text": (
            f"{path}, row 4 (<eos>); {path}, row 6 (<eos>); {path}, row 7 (<eos>), ..."
        ),
    }
    assert all("Take" in value or "Put" in value or "Give" in value or "rename" in value or "Leave" in value
               for value in said.values())  # fmt: skip


def test_a_section_of_public_code_with_keys_of_its_own(file, caplog):
    public = OmegaConf.create({"max_prompt_length": 8, "prompt_key": "prompt", "cache_dir": "~/x", "shuffle": False})
    dataset = RLHFDataset(data_files=file, tokenizer=TOKENIZER, config=public, processor=None)
    assert dataset[7]["input_ids"].tolist() == [0, 0, 0, 0, 2, 30, 11, 3]
    assert not caplog.text  # a composed section always has some keys that nothing reads
    RLHFDataset(file, TOKENIZER, OmegaConf.to_container(public))
    assert "DataConfig has no cache_dir; what these keys say has no effect" in caplog.text
    whole = create_rl_dataset(file, public, TOKENIZER, None, is_train=True, max_samples=2)
    assert list(create_rl_sampler(public, whole)) == [0, 1]
    with pytest.raises(ConfigError, match="max_prompt_length"):
        RLHFDataset(file, TOKENIZER, OmegaConf.create({"max_prompt_length": "long"}))


@pytest.mark.parametrize(
    "item, says",
    [
        ("[1, 2]", "an item is list, not a dict"),
        ("{'raw_prompt': [], 'uid': 3}", "no tensor input_ids, attention_mask, position_ids; it has raw_prompt, uid"),
        ("{**left_pad([5], 4, 0), 'responses': 'x'}", "an item has responses, which the run makes itself"),
    ],
)
def test_items_of_a_data_set_of_ones_own_are_prompts(tmp_path, file, item, says):
    (tmp_path / "mine.py").write_text(
        "from torch.utils.data import Dataset\n"
        "from verl.datasets.rl_dataset import left_pad\n"
        "class Mine(Dataset):\n"
        "    def __init__(self, data_files, tokenizer, config, processor, max_samples):\n"
        "        pass\n"
        "    def __len__(self):\n"
        "        return 1\n"
        "    def __getitem__(self, item):\n"
        f"        return {item}\n"
    )
    chosen = config(custom_cls=CustomClassConfig(path=str(tmp_path / "mine.py"), name="Mine"))
    with pytest.raises(DataError) as caught:
        create_rl_dataset(file, chosen, TOKENIZER)
    assert says in str(caught.value)


def test_items_of_one_batch_have_the_same_columns_and_shapes():
    with pytest.raises(DataError, match="some items of the data set have b and some do not"):
        collate_fn([{"a": 1}, {"a": 1, "b": 2}])
    with pytest.raises(DataError, match=r"column 'a' has tensors of the shapes \(1,\), \(2,\)"):
        collate_fn([{"a": torch.ones(1)}, {"a": torch.ones(2)}])


def test_empty_media_columns_are_fine(tmp_path):
    row = RLHFDataset(jsonl(tmp_path / "x.jsonl", [{"prompt": "x", "images": []}]), TOKENIZER, CONFIG)[0]
    assert "images" not in row


def test_a_tokenizer_without_template_or_pad_token(file):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="chat template"):
        RLHFDataset(file, tokenizer, CONFIG)
    tokenizer = tiny_tokenizer()
    tokenizer.pad_token = None
    with pytest.raises(DataError, match="no pad token"):
        RLHFDataset(file, tokenizer, CONFIG)


def test_columns_that_scoring_needs(file):
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)
    dataset.require_columns({"reward_model": "scorers read it"})
    with pytest.raises(DataError, match="no column 'truth'"):
        dataset.require_columns({"truth": "scorers read it"})


# ---- choice, classes, batches --------------------------------------------------------------------


def test_max_samples(file):
    def chosen(**changes):
        return [row["index"] for row in RLHFDataset(file, TOKENIZER, config(**changes), max_samples=4)]

    assert chosen(shuffle=False) == [100, 101, 102, 103]
    assert chosen(seed=1) == chosen(seed=1)
    assert len(set(chosen(seed=1))) == 4
    assert chosen(seed=1) != chosen(seed=2)


def test_source_column_follows_the_choice(file):
    dataset = RLHFDataset(file, TOKENIZER, CONFIG, max_samples=4)
    assert [info["index"] for info in dataset.source_column("extra_info")] == [row["index"] for row in dataset]
    assert list(dataset.source_column("nothing")) == [None] * 4


def test_custom_class(tmp_path, file):
    (tmp_path / "mine.py").write_text(
        "from verl.datasets.rl_dataset import RLHFDataset\n"
        "class Mine(RLHFDataset):\n"
        "    def __getitem__(self, item):\n"
        "        return super().__getitem__(item) | {'mine': item}\n"
        "def not_a_class(**kwargs): ...\n"
    )

    def build(name):
        return create_rl_dataset(
            file, config(custom_cls={"path": str(tmp_path / "mine.py"), "name": name}), TOKENIZER, max_samples=5
        )

    dataset = build("Mine")
    assert len(dataset) == 5
    assert dataset[3]["mine"] == 3
    with pytest.raises(ConfigError, match=r"'not_a_class'.*torch\.utils\.data\.Dataset"):
        build("not_a_class")
    with pytest.raises(ConfigError, match="Did you mean 'Mine'"):
        build("Mein")


def test_collate_stacks_tensors_and_keeps_lists_whole(file):
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)
    batch = collate_fn([dataset[0] | {"pair": [1, 2]}, dataset[1] | {"pair": [3, 4]}])
    assert batch["input_ids"].shape == (2, 8)
    assert batch["input_ids"][1].tolist() == dataset[1]["input_ids"].tolist()
    assert isinstance(batch["pair"], np.ndarray)
    assert batch["pair"].shape == (2,)
    assert batch["pair"].tolist() == [[1, 2], [3, 4]]
    assert batch["raw_prompt"][1] == [{"role": "user", "content": "q1"}]
    assert {value.dtype for value in batch.values() if isinstance(value, np.ndarray)} == {np.dtype(object)}


# ---- order and resuming --------------------------------------------------------------------------


def loader(dataset, workers=0, **changes):
    sampler = create_rl_sampler(config(**changes), dataset)
    return StatefulDataLoader(
        dataset, batch_size=3, sampler=sampler, drop_last=True, collate_fn=collate_fn, num_workers=workers
    )


def batches(data_loader, count):
    """The next ``count`` batches over as many epochs as it takes, and the state after the last."""
    seen = []
    while True:
        for batch in data_loader:
            seen.append(batch["index"].tolist())
            if len(seen) == count:
                return seen, data_loader.state_dict()


def test_the_order_depends_on_seed_and_epoch_alone():
    shuffle = SeededShuffle(range(20), seed=7)
    first, second = list(shuffle), list(shuffle)
    assert sorted(first) == sorted(second) == list(range(20))
    assert first != second
    again = SeededShuffle(range(20), seed=7)
    iter(again)
    iter(again)
    assert [list(again), list(again)] == [first, second]
    assert SeededShuffle(range(20), seed=8).order(0, 20) not in (first, second)
    assert shuffle.order(0, 20) == first


def test_without_shuffle_rows_come_as_they_stand(file):
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)
    seen, _ = batches(loader(dataset, shuffle=False), 4)
    assert seen == [[100, 101, 102], [103, 104, 105], [106, 107, 108], [100, 101, 102]]


def test_no_seed_is_seed_one(file):
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)
    assert batches(loader(dataset, seed=None), 5)[0] == batches(loader(dataset, seed=1), 5)[0]
    assert batches(loader(dataset, seed=None), 5)[0] != batches(loader(dataset, seed=2), 5)[0]


@pytest.mark.parametrize("shuffle", [True, False])
def test_a_resumed_run_continues_where_it_stopped(file, shuffle):
    # 10 rows in batches of 3 are 3 batches per epoch: stops in the middle and at the end of an epoch.
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)
    whole, _ = batches(loader(dataset, shuffle=shuffle), 9)
    for stop in range(1, 9):
        seen, state = batches(loader(dataset, shuffle=shuffle), stop)
        resumed = loader(dataset, shuffle=shuffle)
        resumed.load_state_dict(state)
        assert seen + batches(resumed, 9 - stop)[0] == whole


def test_resuming_after_the_end_of_an_epoch_was_seen(file):
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)
    whole, _ = batches(loader(dataset), 6)
    first = loader(dataset)
    assert len(list(first)) == 3
    resumed = loader(dataset)
    resumed.load_state_dict(first.state_dict())
    assert batches(resumed, 3)[0] == whole[3:]


@pytest.mark.parametrize("stop", [2, 3])
def test_worker_processes_change_neither_order_nor_resuming(file, stop):
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)
    whole, _ = batches(loader(dataset), 5)
    seen, state = batches(loader(dataset, workers=2), stop)
    resumed = loader(dataset, workers=2)
    resumed.load_state_dict(state)
    assert seen + batches(resumed, 5 - stop)[0] == whole


def test_custom_sampler(tmp_path, file):
    (tmp_path / "samplers.py").write_text(
        "from torch.utils.data import Sampler\n"
        "class Backwards(Sampler):\n"
        "    def __init__(self, data_source, data_config):\n"
        "        self.size = len(data_source)\n"
        "    def __iter__(self):\n"
        "        return iter(range(self.size - 1, -1, -1))\n"
        "    def __len__(self):\n"
        "        return self.size\n"
        "class Learns(Backwards):\n"
        "    def update(self, batch): ...\n"
        "def function(): ...\n"
    )
    dataset = RLHFDataset(file, TOKENIZER, CONFIG)

    def sampler(name):
        return {"class_path": str(tmp_path / "samplers.py"), "class_name": name}

    assert batches(loader(dataset, sampler=sampler("Backwards")), 2)[0] == [[109, 108, 107], [106, 105, 104]]
    with pytest.raises(ConfigError, match=r"'update' method that is never called.*AbstractCurriculumSampler"):
        loader(dataset, sampler=sampler("Learns"))
    with pytest.raises(ConfigError, match=r"torch\.utils\.data\.Sampler"):
        loader(dataset, sampler=sampler("function"))


def test_split_gives_parts_of_equal_length_in_order(file):
    whole = RLHFDataset(file, TOKENIZER, config(shuffle=False))
    parts = whole.split(num_splits=5)
    assert [[row["index"] for row in part] for part in parts] == [[100 + i, 101 + i] for i in range(0, 10, 2)]
    assert len(whole) == 10
    for count in (0, 3, 20):
        with pytest.raises(DataError, match=f"10 rows do not divide into num_splits={count} equal parts"):
            whole.split(count)


READS_A_FOLDER = """
import json
import os
import pandas
from verl.datasets.rl_dataset import RLHFDataset

class Tasks(RLHFDataset):
    def _read_files_and_tokenize(self):
        rows = [
            {"prompt": open(os.path.join(folder, name)).read(), "data_source": name, "own": {name: 3, "list": [1]}}
            for folder in self.data_files
            for name in sorted(os.listdir(folder))
        ]
        rows[0]["enable_thinking"] = True  # and no value in the other row
        pandas.DataFrame(rows).to_parquet(self.data_files[0] + ".parquet")
        self.dataframe = self.maybe_filter_out_long_prompts(pandas.read_parquet(self.data_files[0] + ".parquet"))

class Nothing(RLHFDataset):
    def _read_files_and_tokenize(self):
        pass
"""


def test_a_data_set_of_a_users_own_reads_a_folder(tmp_path):
    (tmp_path / "tasks").mkdir()
    for name in ("a", "b"):
        (tmp_path / "tasks" / name).write_text(f"q{name}")
    (tmp_path / "own.py").write_text(READS_A_FOLDER)

    def opened(name):
        chosen = config(custom_cls=CustomClassConfig(path=str(tmp_path / "own.py"), name=name))
        return create_rl_dataset([str(tmp_path / "tasks")], chosen, TOKENIZER)

    dataset = opened("Tasks")
    assert [TOKENIZER.decode(dataset[item]["input_ids"], skip_special_tokens=True) for item in range(2)] == ["qa", "qb"]
    assert (dataset.sources(), dataset.place(1)) == (["a", "b"], "Tasks.dataframe, row 1")
    assert [dataset[item]["own"] for item in range(2)] == [{"a": 3, "list": [1]}, {"b": 3, "list": [1]}]
    assert [dataset[item]["enable_thinking"] for item in range(2)] == [True, None]
    with pytest.raises(DataError, match=r"Nothing._read_files_and_tokenize .* must set self.dataframe"):
        len(opened("Nothing"))
    with pytest.raises(DataError, match="is a folder"):
        RLHFDataset(str(tmp_path / "tasks"), TOKENIZER, CONFIG)


def test_a_caller_that_fails_between_measured_rows_leaves_no_threads():
    """The rest would wait for them whenever the garbage collector runs, which may be where a thread cannot end."""
    text = [{"role": "user", "content": "2 + 2?"}]
    before = threading.active_count()
    measured = PromptImages(None, "images", "videos").measured(
        ((row, f"row {row}", ImagePrompt(text, text, [])) for row in range(3)), workers=2, most=8
    )
    assert next(measured)[0] == 0
    assert threading.active_count() == before
