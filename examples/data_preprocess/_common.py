"""What the scripts of this folder share: where rows come from, what they look like, where they go."""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from verl.datasets.files import SUFFIXES, open_files, require_columns
from verl.errors import DataError

Row = dict[str, Any]


def parser(description: str, default_dir: str) -> argparse.ArgumentParser:
    """Arguments that every script has."""
    arguments = argparse.ArgumentParser(description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter)
    arguments.add_argument(
        "--local_save_dir", "--local_dir", dest="local_save_dir", default=default_dir,
        help="folder for train.parquet and test.parquet",
    )  # fmt: skip
    arguments.add_argument("--train_size", type=int, default=-1, help="training rows to keep; -1 keeps all")
    arguments.add_argument("--test_size", type=int, default=-1, help="test rows to keep; -1 keeps all")
    arguments.add_argument("--seed", type=int, default=1, help="of every random choice")
    return arguments


def add_source(arguments: argparse.ArgumentParser, hub_name: str) -> None:
    """Arguments of a script that reads a published data set."""
    arguments.add_argument(
        "--local_dataset_path", default=None,
        help="a folder with train.* and test.* in jsonl, json or parquet, or one such file for both splits; "
        f"without it '{hub_name}' is loaded from the Hugging Face hub",
    )  # fmt: skip
    arguments.add_argument("--test_fraction", type=float, default=0.1, help="share held out from a single file")


def load_splits(
    args: argparse.Namespace, columns: Sequence[str], load_hub: Callable[[], dict[str, list[Row]]]
) -> dict[str, list[Row]]:
    """Rows of ``train`` and ``test``, from ``--local_dataset_path`` or the hub."""
    if args.local_dataset_path is None:
        return load_hub()
    path = Path(os.path.expandvars(args.local_dataset_path)).expanduser()
    if path.is_dir():
        return {split: _read(_split_file(path, split), columns) for split in ("train", "test")}
    rows = _read(str(path), columns)
    random.Random(args.seed).shuffle(rows)
    held_out = round(len(rows) * args.test_fraction)
    if not 0 < held_out < len(rows):
        raise DataError(
            f"{path}: --test_fraction={args.test_fraction} of {len(rows)} rows leaves a split without rows."
        )
    return {"train": rows[held_out:], "test": rows[:held_out]}


def load_hub(name: str, config: str | None = None) -> dict[str, list[Row]]:
    """Both splits of a data set on the Hugging Face hub."""
    try:
        import datasets
    except ModuleNotFoundError:
        raise SystemExit(
            f"Loading '{name}' from the hub needs the package datasets (pip install datasets). "
            "Or download the data and give --local_dataset_path."
        ) from None
    loaded = datasets.load_dataset(name, config)
    return {split: [dict(row) for row in loaded[split]] for split in ("train", "test")}


def make_splits(
    loaded: dict[str, list[Row]], make_row: Callable[[Row, str, int], Row], args: argparse.Namespace
) -> dict[str, list[Row]]:
    """``make_row(row, split, index)`` of the rows to keep: a random choice, in their order."""
    made = {}
    for split, size in (("train", args.train_size), ("test", args.test_size)):
        rows = loaded[split]
        if 0 <= size < len(rows):
            rows = [rows[number] for number in sorted(random.Random(args.seed).sample(range(len(rows)), size))]
        made[split] = [make_row(row, split, index) for index, row in enumerate(rows)]
    return made


def rl_row(
    data_source: str, prompt: str, ability: str, ground_truth: Any, split: str, index: int, **extra_info: Any
) -> Row:
    """One row as `RLHFDataset` and the scorers read it."""
    return {
        "data_source": data_source,
        "prompt": [{"role": "user", "content": prompt}],
        "ability": ability,
        "reward_model": {"style": "rule", "ground_truth": ground_truth},
        "extra_info": {"split": split, "index": index, **extra_info},
    }


def save(splits: dict[str, list[Row]], folder: str) -> None:
    """Write ``{folder}/{split}.parquet`` and show the first row of each."""
    target = Path(os.path.expandvars(folder)).expanduser()
    target.mkdir(parents=True, exist_ok=True)
    for split, rows in splits.items():
        if not rows:
            raise DataError(f"the split '{split}' has no rows.")
        pq.write_table(pa.Table.from_pylist(rows), target / f"{split}.parquet")
        print(f"{target / f'{split}.parquet'}: {len(rows)} rows; the first:")
        print(json.dumps(rows[0], indent=2, ensure_ascii=False, default=lambda value: f"{len(value)} bytes"))


def run(main: Callable[[], None]) -> None:
    """Call a script's main; what is wrong with the data is a message, not a traceback."""
    try:
        main()
    except DataError as error:
        raise SystemExit(f"error: {error}") from None


def _split_file(folder: Path, split: str) -> str:
    found = [path for path in sorted(folder.glob(f"{split}*")) if path.suffix in SUFFIXES]
    if len(found) != 1:
        there = ", ".join(path.name for path in sorted(folder.iterdir())) or "nothing"
        raise DataError(f"{folder} must hold one {split} file ({split}.jsonl, .json or .parquet); it holds: {there}.")
    return str(found[0])


def _read(path: str, columns: Sequence[str]) -> list[Row]:
    files = open_files(path, "--local_dataset_path")
    require_columns(files, dict.fromkeys(columns, "the script reads it"))
    return [file.row(number) for file in files for number in range(len(file))]
