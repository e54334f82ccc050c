"""The command that looks at data: numbers by hand, what it calls unusable, colours and exit codes."""

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console

from tests.datasets.templates import QWEN, tokenizer_with
from tests.forks import run
from verl.datasets import MultiTurnSFTDataset, RLHFDataset, RMDataset
from verl.plugins.inspect.data import KINDS, _sample_text
from verl.plugins.inspect.report import Sample, histogram, inspect_dataset, mask_runs, quantiles
from verl.testing.models import tiny_tokenizer
from verl.trainer.config import DataConfig, PreferenceDataConfig, SFTDataConfig

TOKENIZER = tiny_tokenizer()


def jsonl(path, records):
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return str(path)


def prompts(path):
    return jsonl(
        path,
        [
            {"data_source": "x", "prompt": "a", "ability": "m"},  # 3 tokens: <user> a <assistant>
            {"data_source": "y", "prompt": "abcd", "ability": None},  # 6
            {"data_source": "x", "prompt": "a"},  # 3, a duplicate of row 0
            {"data_source": "x", "prompt": "abcdefgh", "ability": "m"},  # 10
        ],
    )


def talk(*contents):
    return [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]


# ---- the findings --------------------------------------------------------------------------------


@pytest.mark.parametrize("filters, unusable", [(True, []), (False, [3])])
def test_prompts_by_hand(tmp_path, filters, unusable):
    file = prompts(tmp_path / "x.jsonl")
    dataset = RLHFDataset(file, TOKENIZER, DataConfig(truncation="right"))
    dataset.use_settings(DataConfig(max_prompt_length=6))
    report = inspect_dataset(dataset, "data.train_files", limit=6, filters=filters)
    assert report.rows == 4
    assert report.lengths == [3, 6, 3, 10]
    assert report.sources == {"x": 3, "y": 1}
    assert report.gaps == {"ability": 2}
    assert report.too_long == [3]
    assert report.duplicates == [(2, 0)]
    assert [item for item, _ in report.unusable] == unusable
    assert report.places[3] == f"{file}, row 3"
    assert [sample.runs for sample in report.samples] == [
        [(False, "<user>a<assistant>")],
        [(False, "<user>abcd<assistant>")],
        [(False, "<user>a<assistant>")],
    ]


def test_a_column_that_a_file_lacks_is_a_gap(tmp_path):
    files = [jsonl(tmp_path / f"{n}.jsonl", [{"prompt": "a"} | extra] * 2) for n, extra in enumerate([{}, {"b": 1}])]
    report = inspect_dataset(RLHFDataset(files, TOKENIZER, DataConfig()), "x", 512, filters=False)
    assert report.gaps == {"b": 2}
    assert report.sources == {"unknown": 4}


def test_conversations_by_hand(tmp_path):
    tokenizer = tokenizer_with(QWEN)
    tokenizer.add_tokens(["\n\n"])
    records = [{"messages": talk(*turns)} for turns in (("a", "bc"), ("a", "\nb"), ("a", "d"))]
    config = SFTDataConfig(max_length=200)
    dataset = MultiTurnSFTDataset(jsonl(tmp_path / "x.jsonl", records), tokenizer, config)
    report = inspect_dataset(dataset, "data.train_files", 200, filters=False)
    # The answer of row 1 melts into its header, at which a run would stop when it comes to it.
    [(item, words)] = report.unusable
    assert item == 1
    assert "ignore_input_ids_mismatch" in words
    sequences = [dataset.sequences(row)[0] for row in (0, 2)]
    learned, tokens = sum(sum(mask) for _, mask in sequences), sum(len(ids) for ids, _ in sequences)
    assert report.trained == pytest.approx(learned / tokens)
    assert report.samples[0].runs == [
        (False, "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"),
        (True, "bc<|im_end|>"),
        (False, "\n"),
    ]
    assert len(report.samples) == 2


def test_a_cut_that_leaves_nothing_to_learn(tmp_path):
    # <user> a <assistant> 0 <eos> is cut to 4 of 5 tokens, 1 of them learned; of the other row the prompt is left
    records = [{"messages": talk(*turns)} for turns in (("a", "0"), ("abcd", "0"))]
    config = SFTDataConfig(max_length=4, truncation="right")
    dataset = MultiTurnSFTDataset(jsonl(tmp_path / "x.jsonl", records), TOKENIZER, config)
    report = inspect_dataset(dataset, "data.train_files", 4, filters=False)
    assert report.untrained == [1]
    assert report.trained == 1 / 8
    assert report.unusable == []


def test_pairs_by_hand(tmp_path):
    records = [
        {"prompt": "a", "chosen": "01", "rejected": "2"},  # 6 and 5 tokens
        {"prompt": "a", "chosen": "0123", "rejected": "0124"},  # 8: cut at 6 they agree
        {"prompt": "a", "chosen": "3333", "rejected": "4444"},  # 8: cut at 6 they differ
    ]
    dataset = RMDataset(jsonl(tmp_path / "x.jsonl", records), TOKENIZER, PreferenceDataConfig(max_length=100))
    dataset.use_settings(PreferenceDataConfig(max_length=6, truncation="right"))
    report = inspect_dataset(dataset, "data.train_files", 6, filters=False)
    assert report.lengths == [6, 8, 8]
    assert [item for item, _ in report.unusable] == [1]
    assert [(s.title.rpartition(", ")[2], s.tokens, s.trained) for s in report.samples] == [
        ("chosen", 6, 3),
        ("rejected", 5, 2),
    ]
    # rows 0 and 2: 3 + 2 of 6 + 5 tokens; cut at 6, of which 3 are the prompt, 3 + 3 of 6 + 6
    assert report.trained == pytest.approx(11 / 23)


def test_quantiles_by_hand():
    assert quantiles([4, 1, 3, 2]) == {"min": 1, "median": 2.5, "mean": 2.5, "p95": 4, "max": 4}
    # 95% of 40 are 38: the 38th smallest
    assert quantiles(range(1, 41))["p95"] == 38


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 5000), min_size=1, max_size=60), st.integers(1, 12))
def test_a_histogram_counts_every_value_once(values, bins):
    made = histogram(values, bins)
    assert len(made) <= bins
    assert made[0][0] == min(values)
    assert made[-1][1] >= max(values)
    assert all(after[0] == before[1] + 1 for before, after in itertools.pairwise(made))
    assert [count for _, _, count in made] == [sum(a <= v <= b for v in values) for a, b, _ in made]


def test_runs_keep_characters_of_several_tokens_whole():
    tokenizer = tokenizer_with(QWEN)
    ids = tokenizer("é€", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5  # bytes
    assert mask_runs(ids, [0, 0, 1, 1, 1], tokenizer) == [(False, "é"), (True, "€")]


# ---- colours -------------------------------------------------------------------------------------


def rendered(is_plain):
    sample = Sample(title="here", runs=[(False, "[red]q"), (True, "a[b]")], tokens=9, trained=4)
    console = Console(force_terminal=True, color_system="standard", width=80, _environ={})
    with console.capture() as capture:
        console.print(_sample_text(sample, KINDS["sft"], is_plain))
    return capture.get()


def test_trained_tokens_are_green_and_context_is_dim():
    assert "\x1b[2m[red]q\x1b[0m\x1b[32ma[b]\x1b[0m" in rendered(is_plain=False)


def test_without_colour_trained_tokens_stand_in_brackets():
    assert "[red]q[[a[b]]]" in rendered(is_plain=True)
    assert "\x1b" not in rendered(is_plain=True)


# ---- the command ---------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def tokenizer_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    TOKENIZER.save_pretrained(folder)  # and no model: none is loaded
    return str(folder)


def command(tmp_path, *arguments):
    return run(["-m", "verl.trainer.inspect_data", *arguments], tmp_path, CUDA_VISIBLE_DEVICES="")


def test_prompts_of_a_run(tmp_path, tokenizer_folder):
    file = prompts(tmp_path / "x.jsonl")
    settings = (f"data.train_files={file}", f"data.val_files={file}", "data.max_prompt_length=6")
    settings += (f"actor_rollout_ref.model.path={tokenizer_folder}", "data.train_batch_size=2", "data.truncation=left")
    settings += ("data.source_weights={x: 1, y: 3}", "actor_rollout_ref.rollout.n=4")
    done = command(tmp_path, *settings)
    assert done.returncode == 0, done.stderr
    for part in (
        "data.train_files: 4 rows",
        "min 3  median 4  mean 6  p95 10  max 10",
        "1 rows (25.0%) are longer than data.max_prompt_length=6 and are cut, 4 tokens in all",
        "ability in 2 rows",
        f"{file}, row 2 repeats {file}, row 0",
        # 2 · 4 · (3 + 6 + 3 + 6) / 4 prompt tokens; 2 · 4 · 512 response tokens
        "2 prompts x 4 responses: about 36 prompt tokens and at most 4,096 response tokens; 2 steps an epoch",
        "<user>abcd<assistant>[[…]]",
        "ground truths: none; the files have no column reward_model",
        "overlap: 3 of 3 different validation rows are training rows too",
    ):
        assert part in done.stdout, part
    assert "\x1b" not in done.stdout
    assert next(line.split("│")[1:5] for line in done.stdout.splitlines() if "│ y " in line)[2:] == [
        " 25.0%             ",
        " 75.0%            ",
    ]


def test_a_ground_truth_that_no_answer_could_equal_in_training_files_alone(tmp_path, tokenizer_folder):
    truths = ["#### 5", 73.0, "five"]
    rows = [{"prompt": "a", "data_source": "openai/gsm8k", "reward_model": {"ground_truth": each}} for each in truths]
    file = jsonl(tmp_path / "x.jsonl", rows)
    done = command(tmp_path, f"data.train_files={file}", f"actor_rollout_ref.model.path={tokenizer_folder}")
    assert done.returncode == 1, done.stderr
    assert "ground truths: 1 rows cannot be read by their scorer and stop the run" in done.stdout
    assert f"{file}, row 2, openai/gsm8k: gsm8k: ground_truth is 'five'; expected a whole number" in done.stdout
    assert "data.val_files" not in done.stdout


@pytest.mark.parametrize(("arguments", "code"), [(["--help"], 0), (["--no-color", "sft", "data.train_files"], 2)])
def test_command_lines_without_a_run(tmp_path, arguments, code):
    done = command(tmp_path, *arguments)
    assert done.returncode == code
    assert ("python -m verl.trainer.inspect_data sft" in done.stdout) == (code == 0)


def test_a_row_at_which_the_run_would_stop(tmp_path, tokenizer_folder):
    file = jsonl(tmp_path / "x.jsonl", [{"messages": talk("a", "0" * n)} for n in (1, 9)])
    done = command(
        tmp_path, "sft", f"data.train_files={file}", f"model.path={tokenizer_folder}", "data.max_length=8", "--no-color"
    )
    assert done.returncode == 1, done.stderr
    assert "1 rows (50.0%) are longer than data.max_length=8 and stop the run" in done.stdout
    assert "row 1 has 13 tokens, more than max_length=8" in done.stdout
    assert "<user>a<assistant>[[0<eos>]]" in done.stdout


@pytest.mark.parametrize(
    "record, arguments, says",
    [
        ({"prompt": "a", "chosen": "0", "rejected": "0"}, ["rm"], "row 0: chosen and rejected are the same"),
        ({"prompt": "a"}, ["grpo"], "'grpo' is no kind of run; there are ppo, sft, rm, dpo"),
    ],
)
def test_data_that_cannot_be_used(tmp_path, tokenizer_folder, record, arguments, says):
    file = jsonl(tmp_path / "x.jsonl", [record])
    done = command(tmp_path, *arguments, f"data.train_files={file}", f"model.path={tokenizer_folder}")
    assert done.returncode == 2
    assert says in done.stderr
    assert "Traceback" not in done.stderr
