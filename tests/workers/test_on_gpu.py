"""On a GPU: the branches of device_branches.md, each against the same computation on the CPU. ``pytest -m gpu``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.testing import assert_close
from transformers import PreTrainedModel

from tests.workers.rollout.test_weights import ENGINE
from tests.workers.support import make_engine, ragged_batch, weights_of
from verl.checkpoint.states import from_arrays, rng_state, set_rng_state, to_arrays
from verl.cli.doctor import examine
from verl.single_controller.base.call_times import take_call_times, timed_call
from verl.testing.models import tiny_model, tiny_model_dir
from verl.testing.rollout_conformance import PROMPTS, EngineUnderTest, request
from verl.utils.device import (
    ensure_process_group,
    get_device,
    get_device_name,
    get_nccl_backend,
    get_resource_name,
    memory_metrics,
)
from verl.utils.flops_counter import device_peak_flops
from verl.workers.adapted_weights import AdaptedWeights
from verl.workers.engine import MicroBatchConfig
from verl.workers.losses import sft_loss
from verl.workers.packed_attention import AttentionRule, Packing, attend_packed
from verl.workers.profiling import MemoryTool, TorchTool
from verl.workers.rollout.client import ENGINE_SIDE
from verl.workers.rollout.engine_side.verl_engine import checksum
from verl.workers.rollout.native.memory import KeyValueMemory
from verl.workers.rollout.native.model import NativeModel
from verl.workers.rollout.weights import DeviceBuffer, FileBuffer, check_arrival

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture(scope="module", autouse=True)
def _nccl():
    """Make the process group with NCCL, as a run on GPUs does; an engine on the CPU would make one of gloo alone."""
    if dist.is_initialized():
        dist.destroy_process_group()
    ensure_process_group(get_device("cuda"))


@pytest.mark.parametrize("packed_format", [torch.float32, torch.bfloat16])
def test_a_resumed_engine_trains_on_with_the_same_bits(tmp_path, packed_format):
    """From a checkpoint on disk and from a state in memory, whose tensors are on the CPU."""
    path, micro = tiny_model_dir(tmp_path / "model"), MicroBatchConfig(micro_batch_size_per_gpu=2)
    dtype = {"dtype": str(packed_format).removeprefix("torch.")}
    engine = make_engine(path, device_name="cuda", **dtype)
    with engine.train_mode():
        engine.train_batch(ragged_batch(), sft_loss, micro)
        assert all(parameter.grad is None for parameter in engine.model.parameters())
    engine.save_checkpoint(str(tmp_path / "step"))
    held = to_arrays(engine.state(1).states)
    with engine.train_mode():
        engine.train_batch(ragged_batch(), sft_loss, micro)
    for restore in (
        lambda other: other.load_checkpoint(str(tmp_path / "step")),
        lambda other: other.load_state(from_arrays(held)),
    ):
        other = make_engine(path, device_name="cuda", **dtype)
        restore(other)
        with other.train_mode():
            other.train_batch(ragged_batch(), sft_loss, micro)
        assert_close(weights_of(other), weights_of(engine), atol=0, rtol=0)


@pytest.mark.parametrize("window", [None, 5])
@pytest.mark.parametrize("before", [[None] * 4, [None, 0, 0, None]])
def test_kernels_for_packed_rows_compute_what_plain_attention_does(window, before):
    draw = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(1, heads, 40, 64, generator=draw) for heads in (4, 2, 2))
    lengths, rule = [7, 20, 1, 12], AttentionRule(64**-0.5, window=window)
    cpu = attend_packed(query, key, value, Packing.continuing(lengths, before, torch.device("cpu")), rule)
    states = (states.to("cuda", torch.bfloat16) for states in (query, key, value))
    gpu = attend_packed(*states, Packing.continuing(lengths, before, torch.device("cuda")), rule)
    assert_close(gpu.float().cpu(), cpu, atol=2e-2, rtol=2e-2)


def test_kernels_for_packed_rows_have_the_gradients_of_plain_attention():
    draw = torch.Generator().manual_seed(0)
    states = [torch.randn(1, heads, 40, 64, generator=draw) for heads in (4, 2, 2)]
    rule, found = AttentionRule(64**-0.5), {}
    for device, dtype in (("cpu", torch.float32), ("cuda", torch.bfloat16)):
        inputs = [x.to(device, dtype, copy=True).requires_grad_() for x in states]
        packing = Packing.continuing([7, 20, 1, 12], [None, 0, 0, None], torch.device(device))
        attend_packed(*inputs, packing, rule).float().square().sum().backward()
        found[device] = [x.grad.float().cpu() for x in inputs]
    for gpu, cpu in zip(found["cuda"], found["cpu"], strict=True):
        assert (gpu - cpu).norm() < 2e-2 * cpu.norm()


def test_a_bf16_model_runs_packed(tmp_path):
    engine = make_engine(tiny_model_dir(tmp_path / "model"), device_name="cuda", dtype="bfloat16")
    assert engine.is_packed  # else a warning above says why, and a step takes about twice its time


@pytest.mark.parametrize("packed", [True, False])
def test_the_engine_computes_what_it_does_on_a_cpu(tmp_path, packed):
    path, micro = tiny_model_dir(tmp_path / "model"), MicroBatchConfig(micro_batch_size_per_gpu=2)
    found = {}
    for device in ("cpu", "cuda"):
        engine = make_engine(path, device_name=device, use_remove_padding=packed)
        with engine.eval_mode():
            log_probs = engine.infer_batch(ragged_batch(), {"log_probs"}, micro)["log_probs"]
        with engine.train_mode():
            metrics = engine.train_batch(ragged_batch(), sft_loss, micro)
        found[device] = log_probs, torch.tensor([metrics["loss"], metrics["grad_norm"]])
    assert_close(found["cuda"], found["cpu"], atol=1e-4, rtol=1e-4)


def test_activations_off_the_device_leave_it_less_memory(tmp_path):
    path, peaks, weights = tiny_model_dir(tmp_path / "model", num_hidden_layers=8), [], []
    for offloaded in (False, True):
        settings = {"enable_activation_offload": offloaded, "enable_gradient_checkpointing": False}
        engine = make_engine(path, device_name="cuda", **settings)
        with engine.train_mode():
            engine.train_batch(ragged_batch(), sft_loss, MicroBatchConfig())  # the optimizer's state is there then
            torch.cuda.reset_peak_memory_stats()
            engine.train_batch(ragged_batch(512), sft_loss, MicroBatchConfig())
            peaks.append(torch.cuda.max_memory_allocated())
        weights.append(torch.cat([p.detach().cpu().flatten() for p in engine.model.parameters()]))
    assert peaks[1] < 0.7 * peaks[0]
    assert_close(*weights, atol=1e-5, rtol=0)


def test_weights_and_optimizer_leave_the_device_and_come_back(tmp_path):
    engine = make_engine(tiny_model_dir(tmp_path / "model"), device_name="cuda")
    with engine.train_mode():
        engine.train_batch(ragged_batch(), sft_loss, MicroBatchConfig(micro_batch_size_per_gpu=2))
        assert memory_metrics(engine.device)["perf/max_memory_allocated_gb"] > 0
    engine.to("cpu")
    assert {parameter.device.type for parameter in engine.model.parameters()} == {"cpu"}
    engine.to("cuda")
    assert {parameter.device.type for parameter in engine.model.parameters()} == {"cuda"}


def test_offloaded_weights_and_moments_train_with_the_same_bits(tmp_path):
    path, micro, found = tiny_model_dir(tmp_path / "model"), MicroBatchConfig(micro_batch_size_per_gpu=2), []
    for offload in ({}, {"param_offload": True, "optimizer_offload": True}):
        engine = make_engine(path, device_name="cuda", **offload)
        for _ in range(3):
            with engine.train_mode():
                engine.train_batch(ragged_batch(), sft_loss, micro)
        assert {p.device.type for p in engine.model.parameters()} == {"cpu" if offload else "cuda"}
        found.append(torch.cat([p.detach().cpu().flatten() for p in engine.model.parameters()]))
    assert torch.equal(*found)


@pytest.mark.parametrize("by_handle", [True, False])
def test_another_process_reads_weights_of_this_device(by_handle):
    """By a handle of memory on the device, or from a pinned file; the memory of the handle is free after an update."""
    device = get_device("cuda")
    weights = [(f"w{i}", torch.randn(2**20, device=device)) for i in range(5)]
    environment = os.environ | {"PYTHONPATH": str(ENGINE_SIDE)}
    command, pipes = [sys.executable, "-c", ENGINE, str(device)], {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, env=environment, text=True, **pipes) as engine:
        buffer = DeviceBuffer(device) if by_handle else FileBuffer([Path("/dev/shm")])
        checksum(weights[0][1])  # keeps its factors
        before = torch.cuda.memory_allocated()
        for _ in range(2):
            for part in buffer.parts(iter(weights), part_bytes=2**23):  # two weights in each
                engine.stdin.write(json.dumps(part.description()) + "\n")
                engine.stdin.flush()
                check_arrival(part.checksums, json.loads(engine.stdout.readline()), "the other process")
            del part
            assert torch.cuda.memory_allocated() == before
        assert by_handle or buffer._memory.is_pinned()
        engine.stdin.close()


@pytest.mark.parametrize("shape", [(5,), (4096, 3), (1000, 1001)])
def test_a_checksum_is_that_of_the_cpu(shape):
    weights = torch.randn(shape, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert checksum(weights.to("cuda")) == checksum(weights)


def test_full_determinism_trains_and_draws(tmp_path):
    path, found = tiny_model_dir(tmp_path / "model"), []
    asked = [request(prompt, seed=i) for i, prompt in enumerate(PROMPTS)]
    try:
        for _ in range(2):
            engine = make_engine(path, device_name="cuda", full_determinism=True)
            with engine.train_mode():
                engine.train_batch(ragged_batch(), sft_loss, MicroBatchConfig(micro_batch_size_per_gpu=2))
            drawn = EngineUnderTest("native", tmp_path, device="cuda").ready().generate(asked)
            found.append((weights_of(engine), [output.token_ids for output in drawn]))
    finally:
        torch.use_deterministic_algorithms(False)
    assert_close(found[0][0], found[1][0], atol=0, rtol=0)
    assert found[0][1] == found[1][1]


def test_weights_that_fsdp_keeps_in_host_memory_are_trained(tmp_path):
    path, micro = tiny_model_dir(tmp_path / "model"), MicroBatchConfig(micro_batch_size_per_gpu=2)
    weights = {}
    for device, settings in {"cpu": {}, "cuda": {"offload_policy": True}}.items():
        engine = make_engine(path, device_name=device, **settings)
        with engine.train_mode():
            engine.train_batch(ragged_batch(), sft_loss, micro)
        if device == "cuda":
            assert {parameter.device.type for parameter in engine.model.parameters()} == {"cpu"}
            assert all(parameter.to_local().is_pinned() for parameter in engine.model.parameters())
        weights[device] = weights_of(engine)
    assert_close(weights["cuda"], weights["cpu"], atol=1e-4, rtol=1e-4, check_device=False)


def test_megatron_computes_what_fsdp_does_on_a_cpu(tmp_path):
    """With weights, gradients and optimizer in host memory between its calls."""
    pytest.importorskip("verl.plugins.megatron.library", reason="needs megatron-core")
    from tests.plugins.megatron.support import megatron_engine

    path, micro = tiny_model_dir(tmp_path / "model"), MicroBatchConfig(micro_batch_size_per_gpu=2)
    offload = dict.fromkeys(("param_offload", "grad_offload", "optimizer_offload"), True)
    megatron = megatron_engine(path, device_name="cuda", **offload)
    assert memory_metrics(megatron.device)["perf/max_memory_allocated_gb"] > 0
    found = []
    for engine in (megatron, make_engine(path, device_name="cpu")):
        with engine.eval_mode():
            log_probs = engine.infer_batch(ragged_batch(), {"log_probs"}, micro)["log_probs"]
        with engine.train_mode():
            metrics = engine.train_batch(ragged_batch(), sft_loss, micro)
        with engine.eval_mode():
            found.append((log_probs, torch.tensor([metrics["loss"], metrics["grad_norm"]]), weights_of(engine)))
    assert_close(*found, atol=1e-4, rtol=1e-4, check_device=False)


def test_native_draws_what_the_cpu_draws(tmp_path):
    # The requests of test_a_gpu_draws_what_the_cpu_draws: none of their draws is near a boundary between tokens.
    asked = [request(p, seed=200 + i) for i, p in enumerate(PROMPTS * 4)]
    cpu, gpu = (EngineUnderTest("native", tmp_path, device=device).ready() for device in ("cpu", "cuda"))
    assert [output.token_ids for output in gpu.generate(asked)] == [output.token_ids for output in cpu.generate(asked)]


def adapted(model: PreTrainedModel, factor: float) -> AdaptedWeights:
    """An adapter of rank 2 of the first layer's queries."""
    name = "model.layers.0.self_attn.q_proj"
    rows, columns = model.get_submodule(name).weight.shape
    draw = torch.Generator("cuda").manual_seed(0)
    down, up = (torch.randn(size, generator=draw, device="cuda") * factor for size in ((2, columns), (rows, 2)))
    parts = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}
    return AdaptedWeights(lambda: (), parts.items, {name: 2.0})


def memory_of(model: NativeModel) -> KeyValueMemory:
    return model.memory(room=6, prompt_room=4, response_room=6)


def decoded(model: NativeModel, memory: KeyValueMemory) -> torch.Tensor:
    """Logits of some passes in which rows end and new ones come; the memory is empty before and after."""
    logits = []
    with torch.inference_mode():
        for count in (5, 1):
            prompts = [[2 + row + count, 7, 9 * row + 4][: 1 + row % 3] for row in range(count)]
            memory.admit([len(prompt) for prompt in prompts], [1] * count)
            model.prefill(memory, prompts)
            for step in range(3):
                logits.append(model.decode(memory, 5 + step + torch.arange(memory.rows, device="cuda")))
            memory.keep(torch.tensor([0, 2] if count == 5 else [], dtype=torch.long, device="cuda"))
    return torch.cat(logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("family", ["qwen3", "gemma2", "mistral", "qwen3_moe"])
def test_recorded_passes_have_the_bits_of_others(family, dtype):
    """With adapters; also after weights and adapters have changed in place, and other weights are loaded."""
    reference = tiny_model(family, **({} if family == "qwen3_moe" else {"sliding_window": 2})).to("cuda", dtype)
    recorded, plain = (
        NativeModel(reference.config, dtype, torch.device("cuda"), graph_sizes=(2, 3, 6)) for _ in range(2)
    )
    plain.graphs.records = False
    memories = [memory_of(model) for model in (recorded, plain)]
    for factor in (1.0, 1.01, 1.02):
        for parameter in reference.parameters():
            parameter.data.mul_(factor)
        weights = reference.state_dict()
        for model in (recorded, plain):
            assert not model.load((name, w.clone() if factor == 1.02 else w) for name, w in weights.items())
            model.load_adapters(adapted(reference, factor), version=1)
        found = [decoded(model, memory) for model, memory in zip((recorded, plain), memories, strict=True)]
        assert torch.equal(*found)
        assert family == "qwen3_moe" or recorded.graphs.recorded > 0


def test_a_pass_that_waits_for_the_device_is_not_recorded(caplog):
    reference = tiny_model().to("cuda")
    model = NativeModel(reference.config, torch.float32, torch.device("cuda"), graph_sizes=None)
    model.load(reference.state_dict().items())
    expected, stream = decoded(model, memory_of(model)), torch.cuda.current_stream()
    assert model.graphs.recorded > 0
    model.module.register_forward_hook(lambda module, arguments, output: output.logits.sum().item() and None)
    assert torch.equal(decoded(model, memory_of(model)), expected)
    assert model.graphs.recorded == 0
    assert torch.cuda.current_stream() == stream
    torch.rand(1, device="cuda")  # which a failed recording must not forbid
    assert "cannot be recorded as a CUDA graph" in caplog.text


def test_random_states_are_restored():
    state = rng_state()
    first = torch.rand(4, device="cuda")
    set_rng_state(state)
    assert torch.equal(torch.rand(4, device="cuda"), first)


def test_the_device_is_found():
    assert get_device_name() == "cuda"
    assert get_device("cuda").type == "cuda"
    assert (get_nccl_backend(), get_resource_name()) == ("nccl", "GPU")
    assert device_peak_flops("cuda") is None or device_peak_flops("cuda") > 1e13


def test_times_of_calls_have_the_memory_of_the_device():
    torch.zeros(2**20, device="cuda")
    take_call_times()
    with timed_call("work"):
        pass
    assert take_call_times()[0].device_mb > 0


def test_a_profile_has_the_kernels_of_the_device(tmp_path):
    for tool, name in ((TorchTool(), "trace"), (MemoryTool(), "memory")):
        tool.start(tmp_path / name)
        torch.ones(64, 64, device="cuda").matmul(torch.ones(64, 64, device="cuda")).sum().item()
        tool.stop()
    events = json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
    assert (tmp_path / "memory.pickle").stat().st_size > 1000


def test_the_doctor_names_the_device():
    gpus = next(finding for finding in examine() if finding.name == "GPUs")
    assert torch.cuda.get_device_name() in gpus.found
