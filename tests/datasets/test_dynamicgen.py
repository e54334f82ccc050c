"""A data set that grows: which rows are taken, when they are drawn, and that a resumed run has them."""

import io
import json

import pytest
import torch
from torchdata.stateful_dataloader import StatefulDataLoader

from verl.config import DatagenConfig
from verl.datasets import RLHFDataset, collate_fn, create_rl_dataset, create_rl_sampler
from verl.datasets.dynamicgen_dataset import DynamicGenDataset
from verl.errors import ConfigError, DataError
from verl.testing.models import tiny_tokenizer
from verl.trainer.config import DataConfig
from verl.trainer.config.load import load_config

TOKENIZER = tiny_tokenizer()
GENERATORS = '''
from verl.datasets.dynamicgen_dataset import AbstractDataGenerator


def row(text, **changes):
    return {"data_source": "made", "prompt": [{"role": "user", "content": text}], "reward_model": {"ground_truth": "1"},
            "extra_info": {"of": text}} | changes


class Echo(AbstractDataGenerator):
    """Two rows for each batch, named after the first row of the batch and a count of its own."""

    def __init__(self, config):
        super().__init__(config)
        self.calls = 0

    def generate(self, dataset):
        self.calls += 1
        first = dataset.last_batch["index"][0]
        return (row(f"{self.calls}.{first}"), row(f"{len(dataset)}"))

    def state_dict(self):
        return {"calls": self.calls}

    def load_state_dict(self, state):
        self.calls = state["calls"]


class Nothing(AbstractDataGenerator):
    def generate(self, dataset):
        return []


class NoGenerator:
    pass
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "generators.py").write_text(GENERATORS)
    rows = [
        {
            "data_source": "given",
            "prompt": [{"role": "user", "content": f"q{i}"}],
            "reward_model": {"ground_truth": str(i)},
            "extra_info": {"index": 100 + i},
        }
        for i in range(7)
    ]
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return tmp_path


def make(folder, name="Echo", **changes):
    settings = {"max_prompt_length": 12, "train_batch_size": 3, "dataloader_num_workers": 0, "seed": 2} | changes
    config = DataConfig(datagen=DatagenConfig(path=str(folder / "generators.py"), name=name), **settings)
    return create_rl_dataset(str(folder / "train.jsonl"), config, TOKENIZER), config


def generated(text, **changes):
    base = {"data_source": "made", "prompt": text, "reward_model": {"ground_truth": "1"}, "extra_info": None}
    return base | changes


def test_rows_are_put_behind_the_others_and_read_like_them(folder):
    dataset, _ = make(folder, "Nothing")
    assert isinstance(dataset, DynamicGenDataset)
    before = [dataset[i]["raw_prompt"] for i in range(7)]
    dataset.append([generated("ab")])
    assert len(dataset) == 8
    assert [dataset[i]["raw_prompt"] for i in range(7)] == before
    row = dataset[7]
    # <user> 2, "a" 14, "b" 15, <assistant> 3
    assert row["input_ids"].tolist() == [0] * 8 + [2, 14, 15, 3]
    assert (row["row_index"], row["index"], row["data_source"]) == (7, 7, "made")
    assert row["reward_model"] == {"ground_truth": "1"}
    assert dataset.sources() == ["given"] * 7 + ["made"]
    assert list(row) == list(dataset[0])


def test_the_hook_gives_the_batch_to_the_generator(folder):
    dataset, _ = make(folder)
    dataset.on_batch_end({"index": [104, 101]})
    dataset.on_batch_end({"index": [9]})
    made = [dataset[i]["raw_prompt"][0]["content"] for i in range(7, len(dataset))]
    assert made == ["1.104", "7", "2.9", "9"]
    assert dataset.last_batch is None


def test_a_generator_may_make_nothing(folder):
    dataset, _ = make(folder, "Nothing")
    dataset.on_batch_end({})
    assert len(dataset) == 7


@pytest.mark.parametrize(
    "row, says",
    [
        ({"prompt": "a"}, "row 1: it lacks data_source, reward_model"),
        (generated("a", more=1), "row 1: it has the unknown column more"),
        (generated([]), r"row 1: the prompt is list \[\]"),
        (generated("a" * 20), r"longer than max_prompt_length=12.*row 1 with 22 tokens"),
        (generated("a", reward_model={"ground_truth": {1, 2}}), "row 1: it cannot be kept in a checkpoint"),
        (generated("a", reward_model={"ground_truth": float("nan")}), "row 1: it cannot be kept in a checkpoint"),
        ("text", "row 1: expected a mapping of columns, got str"),
    ],
)
def test_a_row_that_cannot_be_used_leaves_the_data_as_it_was(folder, row, says):
    dataset, _ = make(folder, "Nothing")
    dataset.append([generated("a")])
    with pytest.raises(DataError, match=says):
        dataset.append([row, generated("b")])
    assert len(dataset) == 8
    dataset.append([generated("c")])
    assert [dataset[i]["raw_prompt"][0]["content"] for i in (7, 8)] == ["a", "c"]


def test_the_filter_holds_for_generated_rows(folder):
    dataset, _ = make(folder, "Nothing", filter_overlong_prompts=True)
    dataset.append([generated("a" * 20), generated("b"), generated("c" * 20)])
    assert len(dataset) == 8
    assert dataset[7]["raw_prompt"][0]["content"] == "b"
    dataset.append([generated("d" * 20)])
    assert len(dataset) == 8


def loader(folder, **changes):
    dataset, config = make(folder, **changes)
    sampler = create_rl_sampler(config, dataset)
    batches = StatefulDataLoader(dataset, batch_size=3, sampler=sampler, drop_last=True, collate_fn=collate_fn)
    return batches, dataset


def train(batches, dataset, count):
    seen = []
    while True:
        for batch in batches:
            seen.append([message[0]["content"] for message in batch["raw_prompt"]])
            dataset.on_batch_end(batch)
            if len(seen) == count:
                return seen


@pytest.mark.parametrize("order", [{}, {"shuffle": False}])
def test_a_resumed_run_is_the_same_run(folder, order):
    expected = train(*loader(folder, **order), 10)
    assert any("." in text for batch in expected[2:] for text in batch)
    for stop in range(1, 9):
        first, data = loader(folder, **order)
        train(first, data, stop)
        file = io.BytesIO()
        torch.save(first.state_dict(), file)
        second, data = loader(folder, **order)
        second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
        assert train(second, data, 10 - stop) == expected[stop:], stop


def test_a_generated_source_needs_a_weight(folder):
    batches, dataset = loader(folder, source_weights={"given": 1.0})
    with pytest.raises(ConfigError, match="has no weight for made"):
        train(batches, dataset, 4)


def test_other_files_than_the_checkpoint(folder):
    dataset, _ = make(folder)
    state = dataset.state_dict()
    lines = (folder / "train.jsonl").read_text().splitlines(keepends=True)
    (folder / "train.jsonl").write_text("".join(lines[:5]))
    dataset, _ = make(folder)
    with pytest.raises(DataError, match="have 5 usable rows, and had 7"):
        dataset.load_state_dict(state)


def test_validation_prompts_do_not_grow(folder):
    _, config = make(folder)
    assert type(create_rl_dataset(str(folder / "train.jsonl"), config, TOKENIZER, is_train=False)) is RLHFDataset


def test_what_is_no_generator(folder):
    with pytest.raises(ConfigError, match="AbstractDataGenerator"):
        make(folder, "NoGenerator")


def test_rows_are_read_in_the_driver_unless_processes_are_asked_for():
    grows = {"datagen": {"path": "generator.py", "name": "Harder"}}
    assert load_config({"data": grows}, with_rules=False).data.dataloader_num_workers == 0
    assert load_config({"data": {"sampler": {"class_name": "X"}}}, with_rules=False).data.dataloader_num_workers == 0
    assert load_config({}, with_rules=False).data.dataloader_num_workers == 8
    asked = load_config({"data": {**grows, "dataloader_num_workers": 3}}, with_rules=False)
    assert [problem.key for problem in asked.data.problems("data")] == ["data.dataloader_num_workers"]
