"""What one GPU tells about this code: correctness, training throughput and MFU, rollout, where the time goes.

    python -m benchmarks.gpu --json correctness.json --parts correctness     # about 7 minutes
    python -m benchmarks.gpu --json speed.json --parts speed                 # about 7 minutes
    python -m benchmarks.gpu --json gpu.json [--parts equality agreement rl ...] [--device cuda] [--rollout native]

The model has the shape of Qwen3-0.6B and random weights, made on the spot. Neither Ray nor vLLM is needed. Each part
runs in a process of its own with a time limit; one that fails is reported and the others go on. The result is written
after each part, so that a command that is stopped leaves what it has seen.

tests       the tests marked ``gpu``: kernels, packed bf16, resumption, snapshots, offload, checksums, determinism,
            native and hf rollout; without a GPU they are collected and skipped
rl          optimizer steps of the GRPO loss with a KL term on 16,384 tokens, once in one sequence and once in sixteen:
            packed, bf16 passes over fp32 weights, with and without gradient checkpointing
sft         the same for the supervised loss on 8,192 tokens
graphs      the same rollout with decoding passes recorded as CUDA graphs: says whether tokens and log-probs are those
            of the same passes without recording, and the command fails if they are not; seconds of both
rollout     64 responses of 512 tokens in bf16: our engine and Transformers ``generate``, in turn
equality    log-probs, loss and gradients of one update in fp32, on the device and on this machine's CPU: says whether
            they agree, and the command fails if they do not
megatron    the same update by strategy=megatron on one rank of the device: log-probs, loss and gradient norm against
            FSDP's on the CPU; skipped without megatron-core
step_profile   an RL and a supervised step under the profilers of PyTorch and Python: kernels, waits of the host for
            the device, the longest kernels, operations and functions
head        log-probs of 16,384 tokens over the whole vocabulary, forward and backward
bandwidth   a copy of 1 GiB from the device to new and to pinned host memory, into a file in shared memory, and back
agreement   log-probs of the training engine against a plain Transformers forward, and of our rollout engine against
            the training engine, in fp32 and in bf16

The yardstick of the first two is what prime-rl publishes for one H100, with recomputed activations and compiled layers:
11,896 tokens/s and 11.1 % MFU in an RL step, 26,005 tokens/s and 16.8 % in a supervised one. Both pairs fit 6 FLOP per
parameter and token plus causal attention over *one* sequence of 16,384 and of 8,192 tokens, at a peak of 989 TFLOP/s;
so a single long sequence with gradient checkpointing is the comparison. Useful FLOP/s are counted by
:class:`verl.utils.flops_counter.FlopsCounter`.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from benchmarks import shape
from benchmarks.shape import TINY, Row, Work

GPU = Work(
    hidden=1024,
    layers=28,
    heads=16,
    head_dim=128,
    key_value_heads=8,
    intermediate=3072,
    vocabulary=151936,
    prompts=8,
    prompt_length=128,
    samples=8,
    response_length=512,
)
PUBLISHED = {"rl": (11_896, 0.111), "sft": (26_005, 0.168)}
"""Tokens per second and MFU of prime-rl on one H100, with recomputed activations."""
ROLLOUT_TARGET = 8.0


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What every part is run with."""

    work: Work
    device: str
    rollout: str
    folder: str
    rl_tokens: int
    sft_tokens: int
    repeats: int

    def synchronize(self) -> None:
        """Wait for the device, or the clock lies."""
        import torch

        if self.device == "cuda":
            torch.cuda.synchronize()


# ---- training -------------------------------------------------------------------------------------


def training_engine(setting: Setting, dtype: str, checkpointing: bool = False) -> Any:
    """The trainer's engine over fp32 weights, computing in ``dtype``."""
    from verl.workers.config import FSDPEngineConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry

    engine = EngineRegistry.new(
        "language_model",
        "fsdp2",
        model_config=HFModelConfig(
            path=setting.folder, enable_gradient_checkpointing=checkpointing, use_remove_padding=True
        ),
        engine_config=FSDPEngineConfig(dtype=dtype, model_dtype="fp32"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6),
        device_name=setting.device,
    )
    engine.initialize()
    return engine


def training_batch(setting: Setting, lengths: list[int]) -> Any:
    """Random sequences, an eighth of each of them prompt, with all that the GRPO loss reads."""
    import torch

    from verl.protocol import DataProto

    longest = max(lengths)
    prompt = longest // 8
    draw = torch.Generator().manual_seed(0)
    shape_of = (len(lengths), longest)
    ids = torch.randint(shape.FIRST_ORDINARY_TOKEN, setting.work.vocabulary, shape_of, generator=draw)
    mask = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
    response_mask = mask[:, prompt:].contiguous()
    noise = torch.randn(response_mask.shape, generator=draw) * response_mask
    return DataProto.from_dict(
        tensors={
            "input_ids": ids * mask,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids[:, prompt:] * response_mask,
            "response_mask": response_mask,
            "advantages": noise,
            "old_log_probs": -11.9 + 0.1 * noise,
            "ref_log_prob": -11.9 + 0.1 * noise,
        }
    )


def train(setting: Setting, name: str, tokens: int, loss: Any) -> dict[str, Any]:
    """Throughput and MFU of whole optimizer steps, for one long and for many short sequences."""
    import gc

    import torch

    from verl.utils.flops_counter import device_peak_flops

    peak = device_peak_flops(setting.device)
    found = []
    for checkpointing in (False, True):
        found += training_runs(setting, tokens, loss, checkpointing, peak)
        gc.collect()  # the engine is gone before the next one's memory is measured
        if setting.device == "cuda":
            torch.cuda.empty_cache()
    [alike] = [run for run in found if run["sequences"] == 1 and run["gradient_checkpointing"]]
    published, mfu = PUBLISHED[name]
    row = Row(
        f"{name} step, tokens/s, one sequence of {tokens:,}, gradient checkpointing",
        f"prime-rl's published {published:,.0f} tokens/s and {mfu:.1%} MFU on one H100",
        alike["tokens_per_s"] / published,
        1.0,
        True,
        f"{alike['tokens_per_s']:,.0f} tokens/s, " + ("MFU unknown" if peak is None else f"MFU {alike['mfu']:.1%}"),
    )
    return {"peak_tflops": None if peak is None else peak / 1e12, "runs": found, "rows": [row]}


def training_runs(
    setting: Setting, tokens: int, loss: Any, checkpointing: bool, peak: float | None
) -> list[dict[str, Any]]:
    """Optimizer steps of one engine, on one sequence and on sixteen."""
    import torch
    from transformers import AutoConfig

    from verl.utils.flops_counter import FlopsCounter
    from verl.workers.engine import MicroBatchConfig

    counter = FlopsCounter(AutoConfig.from_pretrained(setting.folder))
    engine = training_engine(setting, "bfloat16", checkpointing)
    micro = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=tokens)
    found = []
    for lengths in ([tokens], [tokens // 16] * 16):
        batch = training_batch(setting, lengths)
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()

        def step(batch: Any = batch) -> None:
            with engine.train_mode():
                engine.train_batch(batch, loss, micro)

        seconds = timed(setting, {"step": step})["step"]
        median = statistics.median(seconds)
        useful = counter.training_flops(lengths, int(batch.batch["response_mask"].sum()))
        found.append(
            {
                "sequences": len(lengths),
                "tokens": tokens,
                "gradient_checkpointing": checkpointing,
                "seconds": shape.summary(seconds),
                "tokens_per_s": tokens / median,
                "useful_tflops": useful / median / 1e12,
                "mfu": None if peak is None else useful / median / peak,
                "peak_memory_gib": torch.cuda.max_memory_allocated() / 2**30 if setting.device == "cuda" else None,
            }
        )
    return found


def timed(setting: Setting, calls: dict[str, Callable[[], None]], warm_up: int = 2) -> dict[str, list[float]]:
    """As ``shape.interleaved``, to the end of the device's work."""

    def until_done(call: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            call()
            setting.synchronize()

        return run

    setting.synchronize()
    return shape.interleaved({name: until_done(call) for name, call in calls.items()}, setting.repeats, warm_up)


def rl(setting: Setting) -> dict[str, Any]:
    """Optimizer steps of reinforcement learning."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.losses import PolicyLoss

    # The engine decides how sequences are cut; the sizes here only satisfy the section.
    loss = PolicyLoss(FSDPActorConfig(use_kl_loss=True, use_dynamic_bsz=True))
    return train(setting, "rl", setting.rl_tokens, loss)


def sft(setting: Setting) -> dict[str, Any]:
    """Optimizer steps of supervised learning."""
    from verl.workers.losses import sft_loss

    return train(setting, "sft", setting.sft_tokens, sft_loss)


# ---- rollout --------------------------------------------------------------------------------------


def rollout_engine(setting: Setting, dtype: str) -> Any:
    """Our engine behind ``rollout.name``."""
    from verl.utils import hf_tokenizer
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import get_rollout_class

    work = setting.work
    config = RolloutConfig(
        name=setting.rollout,
        dtype=dtype,
        prompt_length=work.prompt_length,
        response_length=work.response_length,
        n=work.samples,
        ignore_eos=True,
        free_cache_engine=False,
        tensor_model_parallel_size=1,
        log_prob_micro_batch_size_per_gpu=work.sequences,
    )
    folder = setting.folder
    return get_rollout_class(setting.rollout)(config, HFModelConfig(path=folder), hf_tokenizer(folder), setting.device)


def prompts_of(work: Work, step: int) -> Any:
    """The prompts as the driver hands them to a worker."""
    import numpy as np
    import torch

    from verl.protocol import DataProto

    ids = torch.tensor(work.prompt_ids()).repeat_interleave(work.samples, dim=0)
    names = np.array([f"p{i // work.samples}" for i in range(work.sequences)], dtype=object)
    return DataProto.from_dict(
        tensors={
            "input_ids": ids,
            "attention_mask": torch.ones_like(ids),
            "position_ids": torch.arange(ids.shape[1]).expand_as(ids).contiguous(),
        },
        non_tensors={"uid": names, "sample_index": np.arange(work.sequences) % work.samples},
        meta_info={"global_steps": step},
    )


def rollout(setting: Setting) -> dict[str, Any]:
    """Seconds of a rollout and of ``generate`` for the same work."""
    import torch
    from transformers import AutoModelForCausalLM

    work = setting.work
    model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.bfloat16).to(setting.device).eval()
    model.generation_config.eos_token_id = None
    engine = rollout_engine(setting, "bfloat16")
    ids = torch.tensor(work.prompt_ids(), device=setting.device)
    step = iter(range(10**6))

    def ours() -> None:
        with engine.awake(model.named_parameters, version=0):
            found = engine.generate_sequences(prompts_of(work, next(step)))
        assert int(found.batch["response_mask"].sum()) == work.response_tokens

    @torch.inference_mode()
    def generate() -> None:
        found = work.generate(model, ids)
        assert found.shape == (work.sequences, work.prompt_length + work.response_length)

    small = replace(setting, repeats=min(setting.repeats, 3))
    seconds = {
        name: shape.summary(found) for name, found in timed(small, {"ours": ours, "generate": generate}, 1).items()
    }
    what = f"rollout of {work.sequences} x {work.response_length} tokens, bf16 ({setting.rollout})"
    row = shape.speed_row(what, "Transformers `generate`", seconds, "ours", "generate", ROLLOUT_TARGET)
    rates = {name: work.response_tokens / found["min"] for name, found in seconds.items()}
    return {"seconds": seconds, "tokens_per_s": rates, "rows": [row]}


def graphs(setting: Setting) -> dict[str, Any]:
    """Compare recorded decoding passes with the same passes computed one by one."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl.workers.rollout.native.graphs import DecodeGraphs

    model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=torch.bfloat16).to(setting.device).eval()
    engine = rollout_engine(setting, "bfloat16")
    passes = engine._model.graphs = DecodeGraphs(engine._model._decode_logits, [setting.work.sequences])
    drawn, seconds = {}, {}
    for name, is_recorded in (("one by one", False), ("recorded", True)):
        passes.records = is_recorded
        for _ in range(2):  # the second time is warm
            started = time.perf_counter()
            with engine.awake(model.named_parameters, version=0):
                drawn[name] = engine.generate_sequences(prompts_of(setting.work, 1))
            setting.synchronize()
            seconds[name] = time.perf_counter() - started
    recorded, reference = drawn["recorded"].batch, drawn["one by one"].batch
    same = all(bool((recorded[n] == reference[n]).all()) for n in ("responses", "rollout_log_probs"))
    return {"seconds": seconds, "recorded": passes.recorded, "agrees": same and passes.recorded > 0, "rows": []}


# ---- agreement ------------------------------------------------------------------------------------


def plain_log_probs(setting: Setting, batch: Any, dtype: str) -> Any:
    """Log-probs of the responses by the plain Transformers model, in ``dtype``; (bsz, response_length) fp32."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(setting.folder, dtype=getattr(torch, dtype)).to(setting.device).eval()
    responses = batch.batch["responses"]
    found = []
    with torch.no_grad():
        for ids, response in zip(batch.batch["input_ids"], responses, strict=True):
            logits = model(input_ids=ids[None].to(setting.device)).logits[0, -len(response) - 1 : -1].float().cpu()
            found.append(logits.log_softmax(-1).gather(-1, response[:, None]).squeeze(-1))
    return torch.stack(found)


def agreement(setting: Setting) -> dict[str, Any]:
    """Largest and mean differences of log-probs."""
    from verl.protocol import DataProto
    from verl.workers.engine import MicroBatchConfig

    work = setting.work
    short = replace(setting, work=replace(work, samples=2, response_length=min(64, work.response_length)))
    micro = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=16384)
    found: dict[str, Any] = {}
    exact = None
    for dtype in ("float32", "bfloat16"):
        engine, sampler = training_engine(short, dtype), rollout_engine(short, dtype)
        # The tokenizer of the benchmark knows 104 tokens. Engines never draw others, so their probabilities would not
        # be those of the model, which a tokenizer of the model's own size has.
        sampler.unknown_ids = []
        with engine.eval_mode(), sampler.awake(engine.get_per_tensor_param, engine.weight_version):
            drawn = sampler.generate_sequences(prompts_of(short.work, 1))
        columns = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")
        batch: Any = DataProto.from_dict(tensors={name: drawn.batch[name] for name in columns})
        with engine.eval_mode():
            trained = engine.infer_batch(batch, {"log_probs"}, micro)["log_probs"]
        plain = plain_log_probs(short, batch, dtype)
        if dtype == "bfloat16":
            exact = plain_log_probs(short, batch, "float32")
        pairs = {
            "training engine : plain forward": (trained, plain),
            f"{setting.rollout} rollout : training engine": (drawn.batch["rollout_log_probs"], trained),
        }
        if exact is not None:
            pairs |= {
                "training engine : fp32 plain forward": (trained, exact),
                "plain forward : fp32 plain forward": (plain, exact),
            }
        found[dtype] = {name: difference(a, b) for name, (a, b) in pairs.items()}
        del engine, sampler
    return {"log_prob_differences": found, "rows": []}


def difference(a: Any, b: Any) -> dict[str, float]:
    """Of two tensors of one shape."""
    gap = (a.float().cpu() - b.float().cpu()).abs()
    return {"max": float(gap.max()), "mean": float(gap.mean())}


# ---- equality -------------------------------------------------------------------------------------


LIMITS = {"log_probs": 1e-3, "loss": 1e-4, "grad_norm": 1e-3, "gradients": 1e-3}
"""Largest differences that rounding in fp32 explains: of log-probs absolute, else relative; of gradients the norm."""


def two_sequences(setting: Setting) -> Any:
    """The mini-batch of the update that is compared."""
    longest = min(256, setting.sft_tokens)
    return training_batch(setting, [longest, longest // 3])


def one_update(setting: Setting) -> dict[str, Any]:
    """Compute log-probs, loss and gradients of a mini-batch of two sequences in fp32; tensors on the CPU."""
    from verl.utils.sharded_tensor import full_tensor
    from verl.workers.config import FSDPActorConfig
    from verl.workers.engine import MicroBatchConfig
    from verl.workers.losses import PolicyLoss

    engine = training_engine(setting, "float32")
    batch, micro = two_sequences(setting), MicroBatchConfig(micro_batch_size_per_gpu=2)
    with engine.eval_mode():
        log_probs = engine.infer_batch(batch, {"log_probs"}, micro)["log_probs"]
    with engine.train_mode():
        loss = PolicyLoss(FSDPActorConfig(use_kl_loss=True, use_dynamic_bsz=True))
        metrics = engine.forward_backward_batch(batch, loss, micro)
        gradients = {
            name: full_tensor(weight.grad, engine.device).float().cpu()
            for name, weight in engine.model.named_parameters()
        }
        norm = sum(float(gradient.double().square().sum()) for gradient in gradients.values()) ** 0.5
    return {"log_probs": log_probs, "loss": metrics["actor/loss"], "grad_norm": norm, "gradients": gradients}


def _save_update(setting: Setting, path: str) -> None:
    import torch

    torch.save(one_update(setting), path)


def beside_the_cpu(setting: Setting, update: Callable[[Setting], dict[str, Any]]) -> tuple[Any, Any]:
    """Return the results of ``update`` here, and of :func:`one_update` on the CPU in a process of its own."""
    import multiprocessing

    import torch

    path = f"{setting.folder}/update_on_the_cpu.pt"
    on_cpu = multiprocessing.get_context("spawn").Process(
        target=_save_update, args=(replace(setting, device="cpu"), path)
    )
    on_cpu.start()
    own = update(setting)
    on_cpu.join()
    if on_cpu.exitcode:
        raise SystemExit(f"the update on the CPU ended with exit status {on_cpu.exitcode}")
    return own, torch.load(path, weights_only=True)


def compared(own: dict[str, Any], reference: dict[str, Any]) -> dict[str, float]:
    """Return the differences of log-probs, loss and gradient norm."""
    found = {"log_probs": difference(own["log_probs"], reference["log_probs"])["max"]}
    return found | {
        name: abs(own[name] - reference[name]) / max(abs(reference[name]), 1e-12) for name in ("loss", "grad_norm")
    }


def equality(setting: Setting) -> dict[str, Any]:
    """Compare one update on the device with the same update on the CPU."""
    own, reference = beside_the_cpu(setting, one_update)
    gaps = {
        name: float((own["gradients"][name] - gradient).norm() / gradient.norm().clamp(min=1e-12))
        for name, gradient in reference["gradients"].items()
    }
    differences = compared(own, reference)
    worst = max(gaps, key=gaps.__getitem__)
    differences["gradients"] = gaps[worst]
    agrees = all(differences[name] <= limit for name, limit in LIMITS.items())
    return {"differences": differences, "limits": LIMITS, "worst_gradient": worst, "agrees": agrees, "rows": []}


def one_megatron_update(setting: Setting) -> dict[str, Any]:
    """Compute log-probs, loss and gradient norm of the mini-batch of :func:`one_update`, and update the weights."""
    from verl.config import McoreEngineConfig
    from verl.workers.config import FSDPActorConfig, FSDPOptimizerConfig, HFModelConfig
    from verl.workers.engine import EngineRegistry, MicroBatchConfig
    from verl.workers.losses import PolicyLoss

    engine = EngineRegistry.new(
        "language_model",
        "megatron",
        model_config=HFModelConfig(path=setting.folder, use_remove_padding=True),
        engine_config=McoreEngineConfig(dtype="float32"),
        optimizer_config=FSDPOptimizerConfig(lr=1e-6),
        device_name=setting.device,
    )
    engine.initialize()
    batch, micro = two_sequences(setting), MicroBatchConfig(micro_batch_size_per_gpu=2)
    with engine.eval_mode():
        log_probs = engine.infer_batch(batch, {"log_probs"}, micro)["log_probs"]
    with engine.train_mode():
        loss = PolicyLoss(FSDPActorConfig(use_kl_loss=True, use_dynamic_bsz=True))
        metrics = engine.train_batch(batch, loss, micro)
    return {"log_probs": log_probs, "loss": metrics["actor/loss"], "grad_norm": metrics["grad_norm"]}


def megatron(setting: Setting) -> dict[str, Any]:
    """Compare one update by Megatron on the device with FSDP's on the CPU."""
    if importlib.util.find_spec("megatron") is None:
        return {"skipped": "megatron-core is not installed: pip install 'verl[megatron]'", "rows": []}
    differences = compared(*beside_the_cpu(setting, one_megatron_update))
    agrees = all(gap <= LIMITS[name] for name, gap in differences.items())
    return {"differences": differences, "limits": LIMITS, "agrees": agrees, "rows": []}


# ---- where the time of a step goes ------------------------------------------------------------------


def step_profile(setting: Setting) -> dict[str, Any]:
    """Where the time of optimizer steps goes: of the RL loss on sixteen sequences, of the supervised loss on one."""
    from verl.workers.config import FSDPActorConfig
    from verl.workers.losses import PolicyLoss, sft_loss

    engine = training_engine(setting, "bfloat16")
    rl_loss = PolicyLoss(FSDPActorConfig(use_kl_loss=True, use_dynamic_bsz=True))
    return {
        "rl": profiled(setting, engine, [setting.rl_tokens // 16] * 16, rl_loss),
        "sft": profiled(setting, engine, [setting.sft_tokens], sft_loss),
        "sft of few tokens": profiled(setting, engine, [64], sft_loss),
        "rows": [],
    }


def profiled(setting: Setting, engine: Any, lengths: list[int], loss: Any) -> dict[str, Any]:
    """Times, kernels, waits and functions of one step on sequences of these lengths."""
    import cProfile

    import torch
    from torch.profiler import ProfilerActivity, profile

    from verl.workers.engine import MicroBatchConfig

    batch = training_batch(setting, lengths)
    micro = MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=sum(lengths))

    def step() -> tuple[float, float]:
        """Seconds until the host has returned, and until the device is ready."""
        started = time.perf_counter()
        with engine.train_mode():
            engine.train_batch(batch, loss, micro)
        returned = time.perf_counter()
        setting.synchronize()
        return returned - started, time.perf_counter() - started

    step()
    seconds = min(step() for _ in range(3))
    functions = cProfile.Profile()
    functions.runcall(step)
    on_gpu = setting.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    with profile(activities=activities) as trace:
        under_profiler = step()
    events = trace.key_averages()
    kernels = [event for event in events if event.device_type == torch.autograd.DeviceType.CUDA]
    on_host = [event for event in events if event.device_type == torch.autograd.DeviceType.CPU]
    waits = ("cudaStreamSynchronize", "cudaDeviceSynchronize", "cudaEventSynchronize", "aten::_local_scalar_dense")

    def longest(found: list[Any], time_of: str) -> dict[str, list[float]]:
        ranked = sorted(found, key=lambda event: -getattr(event, time_of))[:20]
        return {event.key[:80]: [event.count, round(getattr(event, time_of) / 1e3, 2)] for event in ranked}

    return {
        "tokens": sum(lengths),
        "seconds": {"host": seconds[0], "device": seconds[1]},
        "seconds_under_the_profiler": under_profiler[1],
        "kernels": sum(event.count for event in kernels),
        "kernel_seconds": sum(event.self_device_time_total for event in kernels) / 1e6,
        "operations": sum(event.count for event in on_host if event.key.startswith("aten::")),
        "waits": {event.key: event.count for event in events if event.key in waits or "nonzero" in event.key},
        "kernels: calls, ms": longest(kernels, "self_device_time_total"),
        "operations: calls, ms on the host": longest(on_host, "self_cpu_time_total"),
        "functions of the main thread: calls, ms": longest_functions(functions),
    }


def longest_functions(functions: Any) -> dict[str, list[float]]:
    """Calls and milliseconds, own and in all, of the functions that a cProfile saw longest."""
    import pstats

    stats: Any = pstats.Stats(functions).stats  # type: ignore[attr-defined]
    ranked = sorted(stats.items(), key=lambda item: -item[1][2])[:30]
    return {
        f"{'/'.join(Path(file).parts[-3:])}:{line} {name}"[:110]: [calls, round(own * 1e3, 2), round(total * 1e3, 2)]
        for (file, line, name), (_, calls, own, total, _) in ranked
    }


def head(setting: Setting) -> dict[str, Any]:
    """Seconds of the log-probs of the output head, forward and backward."""
    import torch

    from verl.workers.engine.model.head import token_log_probs

    work, draw = setting.work, torch.Generator(setting.device).manual_seed(0)
    placed = {"device": setting.device, "dtype": torch.bfloat16, "generator": draw}
    hidden = torch.randn(setting.rl_tokens, work.hidden, **placed).requires_grad_()
    weight = torch.randn(work.vocabulary, work.hidden, **placed).mul_(0.02).requires_grad_()
    targets = torch.randint(work.vocabulary, (len(hidden),), device=setting.device, generator=draw)

    def forward() -> None:
        token_log_probs(hidden, weight, None, targets)

    def both() -> None:
        token_log_probs(hidden, weight, None, targets).log_probs.sum().backward()

    seconds = timed(setting, {"forward": forward, "forward and backward": both})
    return {
        "tokens": len(hidden),
        "seconds": {name: shape.summary(found) for name, found in seconds.items()},
        "rows": [],
    }


def divergence(setting: Setting) -> dict[str, Any]:
    """Seconds and memory of the divergences over the whole vocabulary, against log-probs and their entropy."""
    from typing import get_args

    import torch

    from verl.algorithms.distillation import DivergenceKind
    from verl.workers.engine.model.divergence import FullDivergence, OutputMatrix, vocabulary_divergence
    from verl.workers.engine.model.head import LogitRule, token_log_probs

    work, draw = setting.work, torch.Generator(setting.device).manual_seed(0)
    placed = {"device": setting.device, "dtype": torch.bfloat16, "generator": draw}
    hidden, of_teacher = (torch.randn(setting.rl_tokens, work.hidden, **placed) for _ in range(2))
    weight, teacher_weight = (torch.randn(work.vocabulary, work.hidden, **placed).mul_(0.02) for _ in range(2))
    hidden.requires_grad_(), weight.requires_grad_()
    targets = torch.randint(work.vocabulary, (len(hidden),), device=setting.device, generator=draw)
    policy, teacher = (OutputMatrix(weight=matrix, bias=None, rule=LogitRule()) for matrix in (weight, teacher_weight))

    def log_probs() -> None:
        found = token_log_probs(hidden, weight, None, targets, with_entropy=True)
        assert found.entropy is not None
        (found.log_probs.sum() + 0.1 * found.entropy.sum()).backward()

    def of(kind: DivergenceKind) -> Callable[[], None]:
        spec = FullDivergence(kind=kind, teachers=[teacher])
        return lambda: vocabulary_divergence(hidden, policy, of_teacher, None, spec).divergence.sum().backward()

    ways = {"log-probs and entropy": log_probs} | {kind: of(kind) for kind in get_args(DivergenceKind)}
    seconds, memory = timed(setting, ways), {}
    for name, way in ways.items():
        hidden.grad = weight.grad = None
        if setting.device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            way()
            memory[name] = (torch.cuda.max_memory_allocated() - before) / 2**20
    return {
        "tokens": len(hidden),
        "seconds": {name: shape.summary(found) for name, found in seconds.items()},
        "peak_mib": memory,
        "rows": [],
    }


def bandwidth(setting: Setting) -> dict[str, Any]:
    """GB/s on the way of weights from the device to an engine in another process."""
    import torch
    from safetensors.torch import save_file

    on_gpu = setting.device == "cuda"
    weights = torch.randn((2**30 if on_gpu else 2**24) // 2, device=setting.device, dtype=torch.bfloat16)
    host, pinned = weights.cpu(), torch.empty(weights.shape, dtype=weights.dtype, pin_memory=on_gpu)
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        ways = {
            "device to device": weights.clone,
            "device to new host memory": weights.cpu,
            "device to pinned memory": lambda: pinned.copy_(weights, non_blocking=True),
            "host to a file in shared memory": lambda: save_file({"w": host}, f"{folder}/weights.safetensors"),
            "host to device": lambda: host.to(setting.device),
            "pinned memory to device": lambda: weights.copy_(pinned, non_blocking=True),
        }
        seconds = timed(replace(setting, repeats=min(setting.repeats, 3)), dict(ways), 1)
    return {"gb_per_s": {name: weights.nbytes / 1e9 / min(found) for name, found in seconds.items()}, "rows": []}


# ---- tests ----------------------------------------------------------------------------------------


GPU_TESTS = ("tests/workers/test_on_gpu.py", "tests/workers/rollout/test_hf_rollout.py", "tests/backends/cuda")
"""Files with tests marked ``gpu``; to collect the others takes packages that a bare machine lacks."""


def tests(setting: Setting) -> dict[str, Any]:
    """Run the tests marked ``gpu``."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-p", "no:cacheprovider", "-rfE", "--tb=short", *GPU_TESTS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=shape.ROOT)
    return {"agrees": done.returncode == 0, "output": (done.stdout + done.stderr)[-6000:], "rows": []}


PARTS: dict[str, Callable[[Setting], dict[str, Any]]] = {
    "tests": tests,
    "equality": equality,
    "megatron": megatron,
    "rl": rl,
    "sft": sft,
    "step_profile": step_profile,
    "head": head,
    "divergence": divergence,
    "bandwidth": bandwidth,
    "graphs": graphs,
    "rollout": rollout,
    "agreement": agreement,
}
GROUPS = {
    "correctness": ("tests", "graphs", "equality", "megatron"),
    "speed": ("rl", "sft", "step_profile", "head", "divergence", "bandwidth", "rollout", "agreement"),
}
"""Parts that go together in one call, where time on a GPU is counted."""
PART_LIMIT_S = 240


# ---- the command ----------------------------------------------------------------------------------


def run_part(name: str, setting: Setting, path: str) -> None:
    """One part, in this process."""
    import torch

    started = time.monotonic()
    gpu = torch.cuda.get_device_name() if setting.device == "cuda" else None
    found = PARTS[name](setting)
    shape.write_result(
        path,
        part=name,
        **found,
        gpu=gpu,
        wall_s=time.monotonic() - started,
        versions=shape.versions("torch", "transformers"),
    )


def parts_in_turn(arguments: argparse.Namespace, folder: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each part in a process of its own; one that fails says why."""
    model = str(folder / "model")
    (TINY if arguments.tiny else GPU).save_model(model, max_position_embeddings=40960)
    for name in arguments.parts:
        path = folder / f"{name}.json"
        command = [sys.executable, "-m", "benchmarks.gpu", "--part", name, "--model", model, "--json", str(path)]
        command += ["--device", arguments.device, "--rollout", arguments.rollout, "--repeats", str(arguments.repeats)]
        command += ["--tiny"] if arguments.tiny else []
        try:
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=PART_LIMIT_S)
        except subprocess.TimeoutExpired:
            yield name, {"failed": f"no end after {PART_LIMIT_S} s"}
        else:
            yield name, json.loads(path.read_text()) if done.returncode == 0 else {"failed": done.stderr[-3000:]}


def verdict(found: dict[str, Any]) -> str:
    """PASS, or FAIL where a part could not run or did not agree."""
    return "FAIL" if "failed" in found or not found.get("agrees", True) else "PASS"


def refuse_without_gpu(device: str) -> None:
    """End with a sentence if the device is a GPU and there is none."""
    import torch

    if device == "cuda" and not torch.cuda.is_available():
        built = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
        raise SystemExit(
            f"no GPU: PyTorch {torch.__version__} ({built}) finds none here, so nothing was measured. Run this on a "
            "machine with an NVIDIA GPU; --device cpu --tiny tries the benchmark itself."
        )


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="where the result goes")
    parser.add_argument("--parts", nargs="+", choices=(*GROUPS, *PARTS), default=list(GROUPS), help="or groups of them")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--rollout", default="native", help="rollout.name of our engine")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="the smallest work, to test the benchmark itself")
    parser.add_argument("--part", choices=tuple(PARTS), help=argparse.SUPPRESS)
    parser.add_argument("--model", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        setting = Setting(
            work=TINY if arguments.tiny else GPU,
            device=arguments.device,
            rollout=arguments.rollout,
            folder=arguments.model,
            rl_tokens=256 if arguments.tiny else 16384,
            sft_tokens=128 if arguments.tiny else 8192,
            repeats=arguments.repeats,
        )
        run_part(arguments.part, setting, arguments.json)
        return
    refuse_without_gpu(arguments.device)
    arguments.parts = [part for name in arguments.parts for part in GROUPS.get(name, (name,))]
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as name:
        for part, found in parts_in_turn(arguments, Path(name)):
            results[part] = found
            Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")
            print(verdict(found), part, json.dumps(found, indent=1), flush=True)
    print("\n".join(f"{verdict(found)} {part}" for part, found in results.items()))
    if failed := [part for part, found in results.items() if verdict(found) == "FAIL"]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
