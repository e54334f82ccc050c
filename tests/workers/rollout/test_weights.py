"""Weights on their way to an engine with a copy of its own: names, shapes, ties, files, checksums."""

from __future__ import annotations

import base64
import errno
import inspect
import itertools
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections import namedtuple
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.multiprocessing import reductions
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tests.workers.rollout.damage import handles_for_strangers, turn_a_bit
from tests.workers.support import make_engine, run_ranks
from verl.errors import RolloutError
from verl.testing.models import tiny_model, tiny_model_dir
from verl.utils.sharded_tensor import DividedTensor
from verl.workers.rollout.client import ENGINE_SIDE
from verl.workers.rollout.engine_side import verl_engine
from verl.workers.rollout.engine_side.verl_engine import MACHINE_VARIABLE, checksum, weights_in_part, with_checksums
from verl.workers.rollout.file_names import FileNames
from verl.workers.rollout.ranks import MachineRanks, machine_identity
from verl.workers.rollout.weights import (
    DeviceBuffer,
    ExpectedWeights,
    FileBuffer,
    SharedPart,
    buffer_for,
    check_arrival,
    in_files,
    save_tensors,
    signed_term,
)

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


def test_buffers_of_model_folders_go_as_they_are() -> None:
    model = tiny_model("deepseek_v3")
    bias = "model.layers.1.mlp.gate.e_score_correction_bias"
    model.get_buffer(bias).fill_(1 + 2**-20)
    sent = dict(expected_of(model, torch.bfloat16).checked(iter(model.state_dict().items()), version=1))
    assert sent.keys() == model.state_dict().keys()
    assert torch.equal(sent[bias], model.get_buffer(bias))


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


# ---- in which parts


def numbered(*sizes: int) -> list[tuple[str, Tensor]]:
    """Float tensors of so many elements of 4 bytes."""
    return [(f"w{i}", torch.arange(size, dtype=torch.float32) + 100 * i) for i, size in enumerate(sizes)]


def test_parts_hold_as_much_as_fits_and_a_larger_tensor_is_alone(tmp_path: Path) -> None:
    # Bytes 64 64 32 | 256 | 64 96 0: each tensor begins at a multiple of 64.
    weights, found, sizes = numbered(16, 16, 8, 64, 16, 24, 0), [], []
    buffer = FileBuffer([tmp_path])
    for update in range(2):
        found.clear()
        sizes.clear()
        sent = [(name, tensor + update) for name, tensor in weights]
        for part in buffer.parts(iter(sent), part_bytes=160):
            views = dict(weights_in_part(json.loads(json.dumps(part.description()))))
            found.append({name: tensor.clone() for name, tensor in views.items()})
            sizes.append(part.nbytes)
        assert [list(part) for part in found] == [["w0", "w1", "w2"], ["w3"], ["w4", "w5", "w6"]]
        assert sizes == [160, 256, 160]
        arrived = {name: tensor for part in found for name, tensor in part.items()}
        assert all(torch.equal(arrived[name], tensor) for name, tensor in sent)
        assert not list(tmp_path.iterdir())  # the file has no name, so that a killed process leaves none
    assert list(buffer.parts(iter(()), part_bytes=104)) == []


def test_a_new_file_of_the_same_path_is_read_anew(tmp_path: Path) -> None:
    """A buffer that found no room for a tensor makes another file, which may get the number of the old one."""
    paths = []
    for update in range(2):
        tensor = torch.full((16,), float(update))
        for part in FileBuffer([tmp_path]).parts(iter([("w", tensor)]), part_bytes=64):
            assert torch.equal(dict(weights_in_part(part.description()))["w"], tensor)
            paths.append(part.location["path"])
        del part
    assert paths[0] == paths[1]


def test_any_format_and_layout_arrives_as_it_reads(tmp_path: Path) -> None:
    weights = {
        "odd": torch.tensor([1, 2, 3], dtype=torch.int8),
        "transposed": torch.arange(6.0).view(2, 3).T,
        "expanded": torch.ones(1, 3, dtype=torch.bfloat16).expand(2, 3),
        "scalar": torch.tensor(2.5, dtype=torch.float64),
    }
    [(part, back)] = [
        (part, dict(weights_in_part(part.description())))
        for part in FileBuffer([tmp_path]).parts(iter(weights.items()), part_bytes=1000)
    ]
    for name, tensor in weights.items():
        assert back[name].dtype == tensor.dtype
        assert torch.equal(back[name], tensor)
        assert part.checksums[name] == str(checksum(back[name]))


def small_disk(monkeypatch: pytest.MonkeyPatch, room: dict[Path, int]) -> None:
    """Give folders file systems with room for so many bytes."""
    allocate = os.posix_fallocate

    def limited(number: int, start: int, size: int) -> None:
        if start + size > room[folder_of(f"/proc/self/fd/{number}")]:
            raise OSError(errno.ENOSPC, "No space left on device")
        allocate(number, start, size)

    monkeypatch.setattr(os, "posix_fallocate", limited)


def folder_of(path: str) -> Path:
    """The folder of a file without a name."""
    return Path(os.readlink(path)).parent


def test_a_part_ends_where_its_folder_is_full_and_the_next_folder_takes_what_fits_nowhere_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for folder in (memory, disk):
        folder.mkdir()
    weights = numbered(16, 16, 16, 40, 16)  # bytes 64 64 | 64 | 160 | 64
    with monkeypatch.context() as patch:
        small_disk(patch, {memory: 130, disk: 1000})
        parts = [
            (folder_of(part.location["path"]).name, list(part.tensors))
            for part in FileBuffer([memory, disk]).parts(iter(weights), part_bytes=1000)
        ]
    assert parts == [("memory", ["w0", "w1"]), ("memory", ["w2"]), ("disk", ["w3", "w4"])]
    assert not list(memory.iterdir())
    small_disk(monkeypatch, {memory: 130, disk: 100})
    with pytest.raises(RolloutError, match=r"cannot be written to .*disk: No space left on device\. Make room"):
        list(FileBuffer([memory, disk]).parts(iter(weights), part_bytes=1000))


def test_files_of_adapters_and_images_pass_over_a_folder_without_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    for folder in (memory, disk):
        folder.mkdir()
    free = {memory: 2**20 + 50, disk: 2**30, Path("/proc/self"): 2**30}  # a MiB stays spare
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: Usage(2**40, 0, free[folder]))
    for size, folder in ((10, memory), (15, disk)):
        assert save_tensors(dict(numbered(size)), [memory, disk], "w", "images").parent == folder
    # One that was filled since its free space was read.
    path = save_tensors(dict(numbered(4)), [Path("/proc/self"), disk], "w", "images")
    assert load_file(path).keys() == {"w0"}
    with pytest.raises(RolloutError, match=r"MiB of images could not be written to /proc/self/w: .*Make room there"):
        save_tensors(dict(numbered(4)), [Path("/proc/self")], "w", "images")
    free[disk] = 2**20
    with pytest.raises(
        RolloutError, match=r"fit into none of .*memory \(1 MiB free\), .*disk \(1 MiB free\)\. Make room"
    ):
        save_tensors(dict(numbered(15)), [memory, disk], "w", "images")


# ---- several ranks


def fill_together(rank: int, world_size: int, folder: Path) -> None:
    """Both ranks write every second tensor; each has an engine, and that of the second is lost after the first part."""
    memory, disk = folder / "memory", folder / "disk"
    buffer, read = FileBuffer([memory, disk], MachineRanks()), []
    weights = numbered(16, 16, 16, 40, 16)  # bytes 64 64 | 64 | 160 | 64
    written = [{"w0", "w2", "w3"}, {"w1", "w4"}][rank]
    own = [(name, tensor if name in written else torch.zeros_like(tensor)) for name, tensor in weights]
    with pytest.MonkeyPatch.context() as patch:
        small_disk(patch, {memory: 130, disk: 1000})
        parts = buffer.parts(iter(own), part_bytes=1000)
        for part in parts:
            arrived: dict[str, str] = {}
            views = with_checksums(weights_in_part(part.description()), arrived)
            read += [(folder_of(part.location["path"]).name, name, tensor.clone()) for name, tensor in views]
            check_arrival(part.checksums, arrived, "the engine")
            if rank == 1:
                break
        for _ in parts:  # the other rank waits for what this one writes
            pass
        expected = weights if rank == 0 else weights[:2]
        assert [(name, tensor.tolist()) for _, name, tensor in read] == [(n, t.tolist()) for n, t in expected]
        folders = ["memory", "memory", "memory", "disk", "disk"]
        assert [name for name, _, _ in read] == folders[: len(expected)]
        pids = [os.getpid()] * world_size
        dist.all_gather_object(pids, os.getpid())
        assert part.location["path"].startswith(f"/proc/{pids[0]}/fd/")
        small_disk(patch, {memory: 0, disk: 0})
        with pytest.raises(RolloutError, match=r"cannot be written to .*disk: No space left"):
            list(FileBuffer([memory, disk], MachineRanks()).parts(iter(weights), part_bytes=1000))


def fill_in_step(rank: int, folder: Path) -> None:
    """Each rank is a machine, and the second has one folder only, with more room: the same parts, in a file on each."""
    memory, disk = folder / "memory", folder / "disk"
    weights = numbered(16, 16, 16, 40, 16)  # bytes 64 64 | 64 | 160 64
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_RAYLET_PID", f"node-{rank}")
        ranks = MachineRanks(in_step=True)
        assert (ranks.rank, ranks.size) == (0, 1)
        small_disk(patch, {memory: (130, 1000)[rank], disk: 1000})
        read, paths = [], []
        folders = [[memory, disk], [memory]][rank]
        for part in FileBuffer([*folders], ranks).parts(iter(weights), part_bytes=1000):
            description = part.description()
            machine_arguments = cast("dict[str, str]", description["paths"])
            assert [machine.split()[-1] for machine in machine_arguments] == ["node-0", "node-1"]
            patch.setenv(MACHINE_VARIABLE, machine_identity())
            read.append([(name, tensor.clone()) for name, tensor in weights_in_part(description)])
            paths.append([folder_of(machine_arguments[machine_identity()]).name, *machine_arguments.values()])
        assert [[name for name, _ in part] for part in read] == [["w0", "w1"], ["w2"], ["w3", "w4"]]
        assert all(torch.equal(tensor, dict(weights)[name]) for part in read for name, tensor in part)
        assert [path[0] for path in paths] == ["memory", "memory", ("disk", "memory")[rank]]
        assert all(len({*path[1:]}) == 2 for path in paths)
        # The first could go on in its other folder, but the second cannot: both are told.
        small_disk(patch, {memory: 0, disk: 1000})
        with pytest.raises(RolloutError, match=r"cannot be written to .*memory: No space left"):
            list(FileBuffer(folders, ranks).parts(iter(weights), part_bytes=1000))


def fill_as_one_and_as_two_machines(rank: int, world_size: int, folder: Path) -> None:
    fill_together(rank, world_size, folder)
    fill_in_step(rank, folder)


def test_the_ranks_of_a_machine_fill_one_file_for_all_their_engines(tmp_path: Path) -> None:
    for folder in ("memory", "disk"):
        (tmp_path / folder).mkdir()
    run_ranks(fill_as_one_and_as_two_machines, 2, tmp_path)
    assert not [*(tmp_path / "memory").iterdir(), *(tmp_path / "disk").iterdir()]


def divided(weight: Tensor, rows: Sequence[int], columns: Sequence[int]) -> Iterator[DividedTensor]:
    """Boxes between the bounds of rows and columns, those of ranks that together have the weight."""
    for row, end in itertools.pairwise(rows):
        for column, last in itertools.pairwise(columns):
            yield DividedTensor(weight.shape, weight[row:end, column:last], (row, column) + (0,) * (weight.dim() - 2))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("shape", "rows", "columns"),
    [
        ((7, 3), (0, 2, 2, 5, 7), (0, 3)),  # words of 64 bits that two ranks share, and an incomplete last one
        ((5, 9), (0, 3, 5), (0, 4, 9)),
        ((300, 123), (0, 1, 200, 300), (0, 123)),  # several rows of 4096 words
        ((256, 128), (0, 64, 256), (0, 64, 128)),  # the last word begins a row
        ((64, 511, 3), (0, 33, 64), (0, 511)),
    ],
)
def test_terms_of_boxes_add_up_to_the_checksum(dtype: torch.dtype, shape, rows, columns) -> None:
    weight = torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(dtype)
    terms = [int(signed_term(box)) for box in divided(weight, rows, columns)]
    assert sum(terms) % 2**64 == checksum(weight)


def fill_from_parts(rank: int, world_size: int, folder: Path, path: str, others: Sequence[str]) -> None:
    """What a machine's engines read of divided weights, as one machine and as machines that lack a part."""
    names = FileNames(AutoModelForCausalLM.from_pretrained(path))
    for tensor in (2, 1):
        engine = make_engine(path, tensor_parallel_size=tensor, trained=False)
        for nodes in (["-"] * world_size, others):
            with pytest.MonkeyPatch.context() as patch:
                patch.setenv("RAY_RAYLET_PID", nodes[rank])
                ranks = MachineRanks()
                sent = engine.weights_for_rollout(torch.bfloat16, divided=True)
                weights = ((name, weight.detach().to(torch.bfloat16)) for name, weight in sent)
                given = list(in_files(weights, names, ranks.ranks_of_machines, engine.device))
                parts_of = [weight for _, weight in given if isinstance(weight, DividedTensor)]
                if nodes[0] == "-":
                    assert len(parts_of) == len(given)
                else:  # norms of heads are whole on each rank that divides matrices
                    assert all(part.box.shape == part.shape for part in parts_of)
                read, sums = {}, {}
                for part in FileBuffer(ranks=ranks).parts(iter(given), part_bytes=100_000):
                    views = weights_in_part(part.description())
                    read |= {name: tensor.clone() for name, tensor in with_checksums(views, sums)}
                    check_arrival(part.checksums, {name: sums[name] for name in part.tensors}, "the engine")
        whole = ((n, w.to(torch.bfloat16)) for n, w in engine.get_per_tensor_param())
        expected = {name: tensor.clone() for n, w in whole for name, tensor in names.convert(n, w)}
        assert read.keys() == expected.keys()
        assert all(torch.equal(tensor, expected[name]) for name, tensor in read.items())


def test_ranks_write_their_parts_of_divided_weights(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model", "qwen3_moe", num_hidden_layers=1)
    run_ranks(fill_from_parts, 2, tmp_path, path, ["a", "b"])


@pytest.mark.slow
def test_four_ranks_write_their_parts_of_divided_weights(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model", "qwen3", vocab_size=105)
    run_ranks(fill_from_parts, 4, tmp_path, path, ["a", "a", "b", "b"])


ENGINE = """
import collections, json, sys, torch
from verl_engine import weights_in_part, with_checksums
for line in sys.stdin:
    found = {}
    device = torch.device(sys.argv[1])
    weights = with_checksums(weights_in_part(json.loads(line), device), found, device)
    collections.deque(weights, maxlen=0)  # keeps no tensor, so the memory is closed
    print(json.dumps(found), flush=True)
"""


def test_another_process_reads_the_memory_of_a_handle() -> None:
    """On a CPU the handle is of shared memory; what comes before and after it is the same on a GPU."""
    environment = os.environ | {"PYTHONPATH": str(ENGINE_SIDE)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    buffer, names = DeviceBuffer(torch.device("cpu")), []
    with subprocess.Popen([sys.executable, "-c", ENGINE, "cpu"], env=environment, **pipes) as engine:

        def arrived(part: SharedPart) -> dict[str, str]:
            engine.stdin.write(json.dumps(part.description()) + "\n")
            engine.stdin.flush()
            return json.loads(engine.stdout.readline())

        with handles_for_strangers():
            for part in buffer.parts(iter(numbered(16, 16, 100, 8)), part_bytes=160):  # 64 64 | 400 | 32
                if "w2" in part.tensors:
                    turn_a_bit(part)
                    with pytest.raises(RolloutError, match="1 of 1 weights did not arrive"):
                        check_arrival(part.checksums, arrived(part), "the engine")
                else:
                    check_arrival(part.checksums, arrived(part), "the engine")
                names.append(list(part.tensors))
        engine.stdin.close()
    assert names == [["w0", "w1"], ["w2"], ["w3"]]
    assert part.memory.data_ptr() != buffer._memory.data_ptr() == 0  # training needs it


class GPU(NamedTuple):
    uuid: str


def test_weights_go_by_handles_if_all_of_the_engine_is_on_the_trainers_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: GPU(f"uuid-{device.index}"))
    gpu = torch.device("cuda", 3)
    assert isinstance(buffer_for(gpu, ["uuid-3"]), DeviceBuffer)
    for engine in (["uuid-2"], ["uuid-3", "uuid-4"], [None]):
        assert isinstance(buffer_for(gpu, engine), FileBuffer)
    assert isinstance(buffer_for(torch.device("cpu"), [None]), FileBuffer)


def test_the_index_of_a_gpu_in_a_handle_is_that_of_the_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The trainer may see all GPUs of a machine and the engine one: the same GPU has another index."""
    fields = [*inspect.signature(rebuild_cuda_tensor).parameters]
    arguments = {**dict.fromkeys(fields), "storage_device": 3}
    handle = base64.b64encode(pickle.dumps((rebuild_cuda_tensor, tuple(arguments.values())))).decode()
    opened: list[dict[str, Any]] = []

    def rebuild(*arguments: Any) -> Tensor:
        opened.append(dict(zip(fields, arguments, strict=True)))
        return torch.zeros(0, dtype=torch.uint8)

    monkeypatch.setattr(reductions, "rebuild_cuda_tensor", rebuild)
    monkeypatch.setattr(verl_engine, "rebuild_cuda_tensor", rebuild)
    part = {"handle": handle, "size": 0, "tensors": []}
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    assert list(weights_in_part(part, torch.device("cuda", 0))) == []
    assert [one["storage_device"] for one in opened] == [0]
    assert fields[-4:-2] == ["ref_counter_handle", "ref_counter_offset"]  # which DeviceBuffer replaces


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


def test_the_processes_of_an_engine_share_the_check_and_read_no_more_than_their_loaders_ask_for(tmp_path: Path) -> None:
    """Two ranks of one engine, each with half of the rows of four weights, by the pages that each has mapped."""
    size = 2**22
    for part in FileBuffer([tmp_path]).parts(iter(numbered(*[size // 4] * 4)), part_bytes=10**9):
        description, arrived, mapped = json.dumps(part.description()), [], []
        for rank in range(2):
            run = [sys.executable, "-c", RANK, str(rank), description]
            environment = os.environ | {"PYTHONPATH": str(ENGINE_SIDE)}
            report = json.loads(subprocess.run(run, env=environment, capture_output=True, check=True).stdout)
            arrived.append(report["arrived"])
            mapped.append(report["mapped"])
            check_arrival(part.share(rank, 2), arrived[rank], "the rank")
        assert [list(one) for one in arrived] == [["w0", "w2"], ["w1", "w3"]]
        # Whole are two that it verifies, and half of the two others: three quarters.
        assert mapped == pytest.approx([3 * size] * 2, rel=0.05)


RANK = """
import json, os, sys, torch
from verl_engine import Share, weights_in_part, with_checksums
rank, part, found = int(sys.argv[1]), json.loads(sys.argv[2]), {}
for _, tensor in with_checksums(weights_in_part(part), found, share=Share(rank, 2)):
    torch.empty(len(tensor) // 2).copy_(tensor.narrow(0, rank * len(tensor) // 2, len(tensor) // 2))
maps = open("/proc/self/smaps").read().split(os.readlink(part["path"]))[1]
kilobytes = int(maps.split("Rss:")[1].split()[0])
print(json.dumps({"arrived": found, "mapped": kilobytes * 1024}))
"""


def test_a_damaged_part_is_noticed_by_name(tmp_path: Path) -> None:
    def arrived(part: SharedPart) -> dict[str, str]:
        """What an engine's worker reports of a part that it was told to load."""
        found: dict[str, str] = {}
        for _ in with_checksums(weights_in_part(part.description()), found):
            pass
        return found

    for part in FileBuffer([tmp_path]).parts(iter(numbered(10, 10, 1000)), part_bytes=10**6):
        check_arrival(part.checksums, arrived(part), "vLLM (worker 0)")
        turn_a_bit(part)
        with pytest.raises(RolloutError, match=r"1 of 3 weights did not arrive in vLLM \(worker 1\) .*: w2\. Their"):
            check_arrival(part.checksums, arrived(part), "vLLM (worker 1)")
        sent = {name: part.checksums[name] for name in ("w0", "w1")}
        with pytest.raises(RolloutError, match=r"1 of 2 weights did not arrive .*: w2\."):  # a weight that nobody sent
            check_arrival(sent, part.checksums, "vLLM (worker 1)")
        with pytest.raises(RolloutError, match=r"1 of 3 weights did not arrive .*: w2\."):
            check_arrival(part.checksums, sent, "vLLM (worker 1)")
