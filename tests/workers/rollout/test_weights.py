"""Weights on their way to an engine with a copy of its own: names, shapes, ties, files, checksums."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from verl.errors import RolloutError
from verl.testing.models import tiny_model
from verl.workers.rollout.engine_side.verl_engine import checksum, weights_in_files, with_checksums
from verl.workers.rollout.weights import ExpectedWeights, buckets, check_arrival, write_weight_files

Usage = namedtuple("Usage", "total used free")


def expected_of(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> ExpectedWeights:
    return ExpectedWeights(model, dtype)


# ---- which weights


def test_every_parameter_once_converted_and_detached() -> None:
    model = tiny_model("qwen3")
    given = dict(model.named_parameters())
    found = list(expected_of(model, torch.bfloat16).checked(iter(given.items()), version=1))
    assert [name for name, _ in found] == list(given)
    for name, tensor in found:
        assert torch.equal(tensor, given[name].detach().to(torch.bfloat16))
        assert not tensor.requires_grad


def test_a_tied_weight_may_come_under_one_name_or_both_and_goes_once() -> None:
    model = tiny_model("qwen3", tie_word_embeddings=True)
    names = [name for name, _ in model.named_parameters()]
    both = dict(model.state_dict())
    assert torch.equal(both["lm_head.weight"], both["model.embed_tokens.weight"])
    assert "lm_head.weight" not in names
    other = {name: tensor for name, tensor in both.items() if name != "model.embed_tokens.weight"}
    for given in (both, other, {name: both[name] for name in names}):
        found = dict(expected_of(model).checked(iter(given.items()), version=1))
        assert sorted(found) == sorted(names)
        assert torch.equal(found["model.embed_tokens.weight"], both["lm_head.weight"])


def test_buffers_may_come_and_do_not_go() -> None:
    model = tiny_model("qwen3")
    buffers = dict(model.named_buffers())
    assert buffers
    given = [*buffers.items(), *model.named_parameters()]
    assert not buffers.keys() & dict(expected_of(model).checked(iter(given), version=1)).keys()


def test_all_that_does_not_fit_is_said_after_the_last_weight() -> None:
    model = tiny_model("qwen3")
    given = dict(model.state_dict())
    given["model.norm.wait"] = given.pop("model.norm.weight")
    given["lm_head.weight"] = given["lm_head.weight"][:100]
    seen: list[str] = []

    def weights():
        for name, tensor in given.items():
            seen.append(name)
            yield name, tensor

    with pytest.raises(RolloutError) as error:
        for _ in expected_of(model).checked(weights(), version=7):
            pass
    assert seen == list(given)
    assert str(error.value) == (
        "weights of version 7 do not fit Qwen3ForCausalLM: lm_head.weight has shape [100, 64] where [104, 64] is "
        "needed; model.norm.wait is unknown; model.norm.weight is missing. Trainer and rollout must be built from the "
        "same model.path and override_config."
    )


def test_of_many_problems_eight_are_named_and_the_rest_counted() -> None:
    model = tiny_model("qwen3")
    count = len(list(model.parameters()))
    with pytest.raises(RolloutError, match=rf"; and {count - 8} more\. Trainer and rollout must"):
        list(expected_of(model).checked(iter(()), version=1))


# ---- in which files


def numbered(*sizes: int) -> list[tuple[str, Tensor]]:
    """Float tensors of so many elements of 4 bytes."""
    return [(f"w{i}", torch.arange(size, dtype=torch.float32) + 100 * i) for i, size in enumerate(sizes)]


def test_files_hold_as_much_as_fits_and_a_larger_tensor_is_alone(tmp_path: Path) -> None:
    weights = numbered(10, 10, 6, 50, 10, 15, 0)  # bytes 40 40 24 | 200 | 40 60 0
    written = list(write_weight_files(iter(weights), [tmp_path], "step-3", file_bytes=104))
    assert [path.name for path, _ in written] == [f"step-3-{i}.safetensors" for i in range(3)]
    assert [list(part) for _, part in written] == [["w0", "w1", "w2"], ["w3"], ["w4", "w5", "w6"]]
    for path, part in written:
        back = load_file(path)
        assert back.keys() == part.keys()
        assert all(torch.equal(back[name], part[name]) for name in part)
    assert list(write_weight_files(iter(()), [tmp_path], "none", file_bytes=104)) == []


def test_a_file_is_complete_when_it_is_handed_out_and_the_next_not_begun(tmp_path: Path) -> None:
    for number, (path, _) in enumerate(write_weight_files(iter(numbered(4, 4, 4)), [tmp_path], "w", file_bytes=16)):
        assert len(load_file(path)) == 1
        assert sorted(tmp_path.iterdir()) == [tmp_path / f"w-{i}.safetensors" for i in range(number + 1)]


def test_transposed_and_expanded_tensors_arrive_as_they_read(tmp_path: Path) -> None:
    weights = {"transposed": torch.arange(6.0).view(2, 3).T, "expanded": torch.ones(1, 3).expand(2, 3)}
    [(path, _)] = write_weight_files(iter(weights.items()), [tmp_path], "w", file_bytes=1000)
    back = load_file(path)
    assert back["transposed"].tolist() == [[0.0, 3.0], [1.0, 4.0], [2.0, 5.0]]
    assert back["expanded"].tolist() == [[1.0] * 3] * 2


def test_a_folder_that_takes_no_file_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # As when another engine has filled it since its free space was read.
    full = Path("/proc/self")
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 0, 2**30))
    [(path, part)] = write_weight_files(iter(numbered(4)), [full, tmp_path], "w", file_bytes=50)
    assert path == tmp_path / "w-0.safetensors"
    assert load_file(path).keys() == part.keys()
    with pytest.raises(RolloutError, match=r"could not be written to /proc/self/w-0\.safetensors: .*Make room there"):
        list(write_weight_files(iter(numbered(4)), [full], "w", file_bytes=50))


def test_a_full_folder_is_passed_over_and_none_with_room_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for folder in (memory, disk):
        folder.mkdir()
    free = {memory: 2**20 + 50, disk: 2**30}  # a MiB stays spare
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 0, free[folder]))
    written = list(write_weight_files(iter(numbered(10, 15, 12)), [memory, disk], "w", file_bytes=50))
    assert [path.parent for path, _ in written] == [memory, disk, memory]
    free[disk] = 2**20
    with pytest.raises(
        RolloutError, match=r"fit into none of .*memory \(1 MiB free\), .*disk \(1 MiB free\)\. Make room"
    ):
        list(write_weight_files(iter(numbered(15)), [memory, disk], "w", file_bytes=50))


def test_buckets_are_copies_of_bounded_size():
    weights = {name: torch.full((4,), float(i)) for i, name in enumerate("abcd")}  # 16 bytes each
    parts = list(buckets(weights.items(), 32, torch.clone))
    assert [list(part) for part in parts] == [["a", "b"], ["c", "d"]]
    weights["a"].fill_(9.0)
    assert parts[0]["a"].tolist() == [0.0] * 4


# ---- what arrived


def test_checksum_by_hand():
    # One word and a rest: 1 (word) + 5 (rest) · (2·0 + 3) + 3 elements of int32 = 1·1 + 15 + 3 = 19.
    assert checksum(torch.tensor([1, 0, 5], dtype=torch.int32)) == 19
    assert checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
def test_a_checksum_sees_one_bit_and_swapped_rows(dtype):
    tensor = torch.arange(3 * 2**15 + 5).remainder(100).to(dtype)
    found = checksum(tensor)
    assert checksum(tensor.reshape(1, -1)) == found  # the shape travels beside it
    for place in (0, 2**15, len(tensor) - 1):
        changed = tensor.clone()
        changed.view(torch.uint8)[place * tensor.element_size()] ^= 1
        assert checksum(changed) != found
    rows = tensor[: 2**15 * 3].reshape(3, -1)
    assert checksum(rows[[1, 0, 2]]) != checksum(rows)


def arrived(paths: list[str]) -> dict[str, str]:
    """What vLLM's worker reports of files that it was told to load."""
    found: dict[str, str] = {}
    for _ in with_checksums(weights_in_files(paths), found):
        pass
    return found


def test_a_damaged_file_is_noticed_by_name(tmp_path: Path) -> None:
    weights = numbered(10, 10, 1000)
    written = list(write_weight_files(iter(weights), [tmp_path], "w", file_bytes=100))
    paths, sent = [str(path) for path, _ in written], {name: str(checksum(tensor)) for name, tensor in weights}
    check_arrival(sent, arrived(paths), "vLLM (worker 0)")
    read = dict(weights_in_files(paths))
    assert all(torch.equal(read[name], tensor) for name, tensor in weights)
    last = Path(paths[-1])
    data = bytearray(last.read_bytes())
    data[-1] ^= 1
    last.write_bytes(data)
    with pytest.raises(RolloutError, match=r"1 of 3 weights did not arrive in vLLM \(worker 1\) .*: w2\. Their"):
        check_arrival(sent, arrived(paths), "vLLM (worker 1)")
    with pytest.raises(RolloutError, match=r"1 of 3 weights did not arrive .*: w2\."):
        check_arrival(sent, arrived(paths[:1]), "vLLM (worker 1)")
    with pytest.raises(RolloutError, match=r"1 of 2 weights did not arrive .*: w2\."):  # a weight that nobody sent
        check_arrival({name: sent[name] for name in ("w0", "w1")}, sent, "vLLM (worker 1)")
