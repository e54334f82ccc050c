"""Files hold data and nothing else; whatever they hold, reading them runs no code."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import safetensors.torch
import torch
from hypothesis import HealthCheck, given, settings

from tests.protocol.batches import batches, four_rows, same
from tests.support.full_disk import files_of_at_most
from verl.errors import DataError
from verl.protocol import DataProto
from verl.protocol.files import FORMAT, TREE
from verl.protocol.shared import SharedTensors


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=batches())
def test_files_keep_everything(tmp_path: Path, data: DataProto):
    data.save_to_disk(tmp_path / "batch")
    assert same(DataProto.load_from_disk(tmp_path / "batch"), data)


def test_nested_values_keep_their_types(tmp_path: Path):
    value = {
        "tensor": torch.tensor([1.5], dtype=torch.bfloat16),
        "array": np.array([[1, 2]], dtype=">i2"),
        "texts": np.array(["a", "bcd"]),
        "scalar": np.float32(0.5),
        "text": np.str_("x"),
        "tuple": (1, [None, True]),
        "bytes": b"\x00\xff",
        "half a surrogate": "\ud800",
        "infinite": float("-inf"),
        1: "keys that are no texts",
        "$": "the mark of the format itself",
    }
    DataProto.from_dict(non_tensors={"extra_info": [value]}).save_to_disk(tmp_path / "new" / "folder" / "batch")
    read = DataProto.load_from_disk(str(tmp_path / "new" / "folder" / "batch")).extra_info[0]
    assert read.keys() == value.keys()
    assert [type(read[key]) for key in value] == [type(value[key]) for key in value]
    assert read["array"].dtype == ">i2"
    assert read["array"].tolist() == [[1, 2]]
    assert read["tensor"].dtype == torch.bfloat16
    assert read["texts"].tolist() == ["a", "bcd"]
    assert [read[key] for key in ("scalar", "tuple", "bytes", 1)] == [0.5, (1, [None, True]), b"\x00\xff", value[1]]


def test_rows_that_share_tensors_share_them_again(tmp_path: Path):
    pixels = torch.arange(200_000, dtype=torch.float32).view(2, -1)
    first, second = SharedTensors({"pixels": pixels}), SharedTensors({"pixels": pixels + 1})
    rows = {"images": [first, first, {}, second], "more": [[first], None, None, None]}
    DataProto.from_dict(non_tensors=rows).save_to_disk(tmp_path / "batch")
    read = DataProto.load_from_disk(tmp_path / "batch")
    assert read.images[0] is read.images[1] is read.more[0][0]
    assert torch.equal(read.images[1]["pixels"], pixels)
    assert torch.equal(read.images[3]["pixels"], pixels + 1)
    assert (tmp_path / "batch").stat().st_size < 2.1 * pixels.nbytes


def test_a_disk_that_takes_no_more_is_an_error_of_the_system_and_the_older_file_stays(tmp_path: Path):
    path = tmp_path / "batch"
    older = DataProto.from_dict({"ids": torch.arange(10)})
    older.save_to_disk(path)
    with files_of_at_most(100_000), pytest.raises(OSError, match="batch cannot be written"):
        DataProto.from_dict({"ids": torch.arange(100_000)}).save_to_disk(path)
    assert same(DataProto.load_from_disk(path), older)
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


def test_what_is_read_is_the_readers_own(tmp_path: Path):
    path = tmp_path / "batch"
    data = DataProto.from_dict({"ids": torch.arange(100_000)}, {"n": np.arange(2).repeat(50_000)})
    data.save_to_disk(path)
    first, second = DataProto.load_from_disk(path), DataProto.load_from_disk(path)
    first.batch["ids"] += 1
    first.non_tensor_batch["n"] += 1
    assert same(second, data)
    # also when the file is written anew while the batch read from it is in use
    first.save_to_disk(path)
    assert same(second, data)
    assert DataProto.load_from_disk(path).ids[0] == 1
    assert [file.name for file in tmp_path.iterdir()] == ["batch"]


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (DataProto.from_dict(non_tensors={"tool": [object()]}), "column 'tool' holds a builtins.object"),
        (DataProto.from_dict(non_tensors={"image": [{"a": [Path("x")]}]}), "column 'image' holds a pathlib"),
        (DataProto(meta_info={"fn": print}), "meta_info 'fn' holds a builtins.builtin_function"),
        (
            DataProto.from_dict(non_tensors={"day": np.array(["2020-01-01"], dtype="M8[D]")}),
            "column 'day' holds a numpy",
        ),
        (DataProto.from_dict({"c": torch.zeros(1, dtype=torch.complex128)}), "column 'c' holds complex128"),
    ],
)
def test_what_cannot_be_written(tmp_path: Path, data: DataProto, message: str):
    with pytest.raises(DataError, match=message):
        data.save_to_disk(tmp_path / "batch")
    assert list(tmp_path.iterdir()) == []


class Malicious:
    """Unpickling it makes a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self):
        return os.mkdir, (str(self.folder),)


def test_no_pickle_is_ever_run(tmp_path: Path):
    path, proof = tmp_path / "batch", tmp_path / "proof"
    pickle.loads(pickle.dumps(Malicious(proof)))
    assert proof.exists()
    proof.rmdir()
    torch.save(Malicious(proof), tmp_path / "saved_by_torch")
    path.write_bytes(pickle.dumps(Malicious(proof)))
    for file in (path, tmp_path / "saved_by_torch"):
        with pytest.raises(DataError, match=f"{file}: damaged, or not a file that .* Pickle files are never read"):
            DataProto.load_from_disk(file)
    assert not proof.exists()


def test_files_that_are_cut_off(tmp_path: Path):
    path = tmp_path / "batch"
    four_rows().save_to_disk(path)
    whole = path.read_bytes()
    for length in (0, 4, 40, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:length])
        with pytest.raises(DataError, match=f"{path}: damaged"):
            DataProto.load_from_disk(path)
    with pytest.raises(DataError, match="no such file"):
        DataProto.load_from_disk(tmp_path / "other")
    with pytest.raises(DataError, match="no such file"):
        DataProto.load_from_disk(tmp_path)


def array(**changes: object) -> dict:
    return {"$": "numbers", "value": "0", "dtype": "<i8", "shape": [2], **changes}


@pytest.mark.parametrize(
    "tree",
    [
        b"{",
        b"[]",
        b"[" * 100_000,
        {"batch": None},
        {"batch_size": 3},
        {"batch_size": [5], "batch": {"a": {"$": "tensor", "value": "0"}}},
        {"batch": {"a": 1}, "batch_size": [2]},
        {"non_tensor_batch": {"a": [1, 2]}},
        {"non_tensor_batch": {"a": array(dtype="O")}},
        {"non_tensor_batch": {"a": array(dtype="<i4,<i4")}},
        {"non_tensor_batch": {"a": array(shape=[3])}},
        {"non_tensor_batch": {"a": array(value="7")}},
        {"meta_info": {"a": {"$": "code", "value": "1"}}},
        {"meta_info": {"a": {"$": "objects", "value": 3, "dtype": "|O", "shape": [1]}}},
    ],
)
def test_files_with_made_up_contents(tmp_path: Path, tree: bytes | dict):
    if isinstance(tree, dict):
        tree = json.dumps({"batch_size": None, "batch": {}, "non_tensor_batch": {}, "meta_info": {}, **tree}).encode()
    path = tmp_path / "batch"
    entries = {"0": torch.tensor([1, 2]).view(torch.uint8), TREE: torch.tensor(list(tree), dtype=torch.uint8)}
    safetensors.torch.save_file(entries, path, metadata={"format": FORMAT})
    with pytest.raises(DataError, match=f"^{path}: "):
        DataProto.load_from_disk(path)


def test_other_safetensors_files(tmp_path: Path):
    safetensors.torch.save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    with pytest.raises(DataError, match=r"its format is None, not verl\.DataProto\.1"):
        DataProto.load_from_disk(tmp_path / "model.safetensors")
