"""Checkpoints of torch.distributed.checkpoint are read by boxes, and run no code."""

import os
import pickle
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

from verl.checkpoint.torch_dist import TorchDistFiles
from verl.errors import CheckpointError

VALUES = torch.arange(12.0).view(4, 3)


@pytest.fixture(scope="module")
def written(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dcp")
    state = {"a": VALUES, "half": torch.tensor([1.5, 2.5], dtype=torch.bfloat16), "step": 7}
    dcp.save(state, checkpoint_id=folder, no_dist=True)
    return folder


@pytest.fixture
def copied(written, tmp_path) -> Path:
    for file in written.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def test_boxes_are_read_by_name(written):
    files = TorchDistFiles(written)
    assert files.shapes == {"a": (4, 3), "half": (2,)}
    assert files.read("a", (1, 1), (2, 2)).tolist() == [[4.0, 5.0], [7.0, 8.0]]
    half = files.read("half", (0,), (2,))
    assert (half.tolist(), half.dtype) == ([1.5, 2.5], torch.bfloat16)


class Hostile:
    """Its pickle makes a folder when it is read as pickle reads."""

    def __init__(self, marker: Path, call=os.mkdir) -> None:
        self.marker, self.call = marker, call

    def __reduce__(self):
        return self.call, (str(self.marker),)


def test_an_index_that_calls_anything_else_is_refused_and_runs_nothing(copied):
    marker = copied / "ran"
    content = pickle.dumps(Hostile(marker))
    pickle.loads(content)
    assert marker.is_dir()  # so it does what a hostile file would
    marker.rmdir()
    (copied / ".metadata").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"it calls (posix|nt)\.mkdir, which no index .*No code of it was run"):
        TorchDistFiles(copied)
    for name in ("builtins\neval", "torch\nload", "torch.serialization\nload", "torch\n_utils", "os\nsystem"):
        (copied / ".metadata").write_bytes(f"c{name}\n(S'1'\ntR.".encode())
        with pytest.raises(CheckpointError, match=r"it calls .*which no index"):
            TorchDistFiles(copied)
    assert not marker.exists()


def test_a_tensor_that_calls_anything_is_refused_and_runs_nothing(copied):
    marker = copied / "ran"
    index = pickle.loads((copied / ".metadata").read_bytes())
    (file,) = copied.glob("*.distcp")
    torch.save(Hostile(marker), file)
    for info in index.storage_data.values():
        info.offset, info.length = 0, file.stat().st_size
    (copied / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match=r"cannot be read at the box of 'a' \(UnpicklingError"):
        TorchDistFiles(copied).read("a", (0, 0), (4, 3))
    assert not marker.exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda index: index.state_dict_metadata.clear() or index.storage_data.clear(), None),
        (lambda index: setattr(info_of(index), "relative_path", "../secret"), "which is no file of the folder"),
        (lambda index: setattr(info_of(index), "transform_descriptors", ["zstd"]), "is compressed"),
        (lambda index: setattr(info_of(index), "offset", -1), "does not lie in it"),
        (lambda index: setattr(info_of(index), "length", 2**70), "it would end at byte"),
        (lambda index: set_dtype(index, torch.int32), "it is torch.float32, and torch.int32 in the index"),
        (lambda index: index.storage_data.clear(), "KeyError"),
        (lambda index: setattr(index, "state_dict_metadata", 3), "AttributeError"),
        (lambda index: index.state_dict_metadata["a"].chunks.clear(), "do not contain all parts of 'a'"),
    ],
)
def test_a_damaged_index_is_an_error(copied, change, message):
    index = pickle.loads((copied / ".metadata").read_bytes())
    change(index)
    (copied / ".metadata").write_bytes(pickle.dumps(index))
    if message is None:
        assert TorchDistFiles(copied).shapes == {}
        return
    with pytest.raises(CheckpointError, match=message):
        TorchDistFiles(copied).read("a", (0, 0), (4, 3))


def set_dtype(index, dtype):
    index.state_dict_metadata["a"].properties.dtype = dtype


def test_a_view_that_claims_more_numbers_than_the_file_has_is_refused(copied):
    index = pickle.loads((copied / ".metadata").read_bytes())
    (file,) = copied.glob("*.distcp")
    torch.save(torch.zeros(4, 1).expand(4, 3), file)
    for info in index.storage_data.values():
        info.offset, info.length = 0, file.stat().st_size
    (copied / ".metadata").write_bytes(pickle.dumps(index))
    with pytest.raises(CheckpointError, match="it has fewer numbers than its shape"):
        TorchDistFiles(copied).read("a", (0, 0), (4, 3))


def info_of(index):
    return next(info for key, info in index.storage_data.items() if key.fqn == "a")


def test_what_is_no_checkpoint_or_is_cut_off(copied):
    with pytest.raises(CheckpointError, match=r"has no file \.metadata\. Below it are .*Name the folder that has it"):
        TorchDistFiles(copied.parent)
    whole = (copied / ".metadata").read_bytes()
    (copied / ".metadata").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(CheckpointError, match="is not the index of a checkpoint"):
        TorchDistFiles(copied)
    (copied / ".metadata").write_bytes(whole)
    info = info_of(pickle.loads(whole))
    file = copied / info.relative_path
    content = file.read_bytes()
    file.write_bytes(content[: info.offset] + bytes(info.length) + content[info.offset + info.length :])
    with pytest.raises(CheckpointError, match=r"cannot be read at the box of 'a'"):
        TorchDistFiles(copied).read("a", (0, 0), (4, 3))
    assert TorchDistFiles(copied).read("half", (1,), (1,)).tolist() == [2.5]  # what lies elsewhere is not read
