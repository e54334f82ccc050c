"""Translate ``rollout.*`` to vLLM's arguments and environment variables."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Mapping
from typing import Any

import torch

from verl.config import HFModelConfig, RolloutConfig
from verl.config.distillation import VLLM_MAX_LOGPROBS
from verl.errors import ConfigError
from verl.utils.model import ATTN_IMPLEMENTATION, resolve_model_path
from verl.workers.rollout.engine_kwargs import applies_adapters, extra_arguments, largest_rank
from verl.workers.rollout.engine_process import SERVER_KEEPALIVE_S
from verl.workers.rollout.engine_side.verl_engine import MACHINE_VARIABLE
from verl.workers.rollout.machines import EngineMachines
from verl.workers.rollout.ranks import machine_identity

ADAPTER_ID = 1
"""Number of the only adapters in vLLM."""
METRICS = {
    "requests_running": "vllm:num_requests_running",
    "requests_waiting": "vllm:num_requests_waiting",
    "memory_use": "vllm:kv_cache_usage_perc",
    "prompt_tokens": "vllm:prompt_tokens_total",
    "prefix_hit_tokens": "vllm:prefix_cache_hits_total",
    "response_tokens": "vllm:generation_tokens_total",
    "proposed_tokens": "vllm:spec_decode_num_draft_tokens_total",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens_total",
    "preemptions": "vllm:num_preemptions_total",
}
"""Field of an engine's state → vLLM's own metric."""
_NO_NEGATIVE = ("trust_remote_code", "skip_tokenizer_init", "disable_log_stats")
"""Arguments without a ``--no-`` form, which are false by default."""
_CPU_KV_CACHE_BYTES = 2**30
_LOADER, _LOADER_ON_CPU = "verl_vllm.WeightLoader", "verl_vllm_cpu.CPUWeightLoader"
_EIGHT_BITS = {"num_bits": 8, "type": "int", "symmetric": True}
_INT8 = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "linear": {
            "targets": ["Linear"],
            "weights": _EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": _EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}
"""Settings as in a model folder of compressed-tensors: q and s of linear layers, whose inputs are rounded by token."""
_LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # those that vLLM 0.32 takes as max_lora_rank
_KV_CACHE_BYTES, _KV_CACHE_VARIABLE = "kv_cache_memory_bytes", "VLLM_CPU_KVCACHE_SPACE"


def engine_arguments(
    config: RolloutConfig,
    model_config: HFModelConfig,
    max_model_len: int,
    device: torch.device,
    has_images: bool = False,
) -> dict[str, object]:
    """Return vLLM's engine arguments by their Python names; ``has_images`` if the model is one with images.

    Raises:
        ConfigError: ``engine_kwargs.vllm`` sets an argument that another setting determines, or vLLM applies no
            adapters of that rank.
    """
    path = resolve_model_path(model_config.path)
    arguments: dict[str, Any] = {
        "model": path,
        "trust_remote_code": model_config.trust_remote_code,
        "dtype": config.dtype,
        "load_format": config.load_format,
        "seed": config.seed % 2**32,
        "max_model_len": max_model_len,
        "max_num_seqs": config.max_num_seqs,
        "max_num_batched_tokens": max(config.max_num_batched_tokens, config.max_num_seqs),
        "gpu_memory_utilization": config.gpu_memory_utilization,
        "enforce_eager": config.enforce_eager,
        "enable_prefix_caching": config.enable_prefix_caching,
        "enable_chunked_prefill": config.enable_chunked_prefill,
        "scheduling_policy": config.scheduling_policy,
        "disable_log_stats": config.disable_log_stats and not config.prometheus.enable,  # else it counts nothing
        "tensor_parallel_size": config.tensor_model_parallel_size,
        "pipeline_parallel_size": config.pipeline_model_parallel_size,
        "data_parallel_size": config.data_parallel_size if config.shares_experts else 1,
        "enable_expert_parallel": config.expert_parallel_size > 1,
        "logprobs_mode": config.logprobs_mode,
        # Runs in the workers.
        "worker_extension_cls": _LOADER_ON_CPU if device.type == "cpu" else _LOADER,
        # Ignore sampling defaults of the model folder (generation_config.json): requests set all parameters.
        "generation_config": "vllm",
        # vLLM gets and returns token ids only; verl detects stop texts.
        "skip_tokenizer_init": True,
    }
    if model_config.hf_config_path:
        arguments["hf_config_path"] = resolve_model_path(model_config.hf_config_path)
    if overrides := _overrides(config, model_config):
        arguments["hf_overrides"] = overrides
    if config.cudagraph_capture_sizes is not None:
        arguments["compilation_config"] = {"cudagraph_capture_sizes": list(config.cudagraph_capture_sizes)}
    if config.quantization == "fp8":
        arguments["quantization"] = "fp8"
    arguments |= _proposals(config, model_config, device)
    if config.limit_images is not None:
        arguments["limit_mm_per_prompt"] = {"image": config.limit_images}
    if has_images:
        # vLLM starts no model with images without its tokenizer and processor, but gets tokens and normalized
        # pixels from here, of which it keeps no copy.
        arguments |= {
            "skip_tokenizer_init": False,
            "tokenizer": resolve_model_path(model_config.tokenizer_path or path),
        }
        arguments |= {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0}
        if device.type == "cpu":
            arguments["skip_mm_profiling"] = True  # of GPU memory
    if applies_adapters(config, model_config):
        rank = _max_lora_rank(model_config)
        arguments |= {"enable_lora": True, "max_loras": 1, "max_cpu_loras": 1, "max_lora_rank": rank}
    if device.type == "cpu":
        # After a partial prefill vLLM rewinds the request's random generator, which CPU generators do not support.
        arguments["enable_chunked_prefill"] = False
        arguments["max_num_batched_tokens"] = max(arguments["max_num_batched_tokens"], max_model_len)
    if device.type == "cuda" and config.free_cache_engine:
        arguments["enable_sleep_mode"] = True
    extra = extra_arguments(config, decided=arguments)
    if device.type == "cpu" and _KV_CACHE_VARIABLE not in os.environ:  # overrides the argument in vLLM
        # Without a size vLLM takes half of the machine's memory.
        extra.setdefault(_KV_CACHE_BYTES, _CPU_KV_CACHE_BYTES)
    most_likely = max(config.kept_ids_width + 1, VLLM_MAX_LOGPROBS)  # a request may ask for
    # Else the other requests decide how many tokens are proposed at once, so which random numbers a request gets.
    in_step: dict[str, object] = {"async_scheduling": False} if model_config.mtp.is_in_rollout else {}
    return {"max_logprobs": most_likely} | in_step | arguments | extra


def _proposals(config: RolloutConfig, model_config: HFModelConfig, device: torch.device) -> dict[str, object]:
    """Return the arguments by which the model's heads propose tokens; the model still draws as without them."""
    mtp = model_config.mtp
    if not mtp.is_in_rollout:
        return {}
    proposals: dict[str, object] = {"method": mtp.method, "num_speculative_tokens": mtp.num_speculative_tokens}
    if device.type == "cpu":
        # A table with one entry. Without it vLLM adds proposals, which it rejects, to a prompt with one token left to
        # compute, for its graphs, if other requests run: these would decide which random numbers a request gets.
        token_count = mtp.num_speculative_tokens
        proposals["num_speculative_tokens_per_batch_size"] = [[1, config.max_num_seqs, token_count]]
    # Updates of heads that are not trained go to the model alone: random ones would stay random, and lost ones lost.
    if config.load_format == "dummy":
        proposals["draft_load_config"] = {"load_format": "auto"}
    return {"speculative_config": proposals, "sleep_preserve_parameter_names": ["draft.*"]}


def _overrides(config: RolloutConfig, model_config: HFModelConfig) -> dict[str, Any]:
    """Return what of the model's config.json vLLM is told otherwise."""
    overrides = {k: v for k, v in model_config.override_config.items() if k != ATTN_IMPLEMENTATION}
    return overrides | ({"quantization_config": _INT8} if config.quantization == "int8" else {})


def _max_lora_rank(model_config: HFModelConfig) -> int:
    """Return the smallest rank that vLLM has room for and the adapters fit into."""
    rank = largest_rank(model_config)
    allowed = [size for size in _LORA_RANKS if size >= rank]
    if not allowed:
        raise ConfigError(
            f"adapters of rank {rank} are too large for vLLM, which applies at most rank {_LORA_RANKS[-1]}. Set "
            "rollout.merge_adapters=true."
        )
    return allowed[0]


def command_line(arguments: Mapping[str, object]) -> list[str]:
    """Convert arguments to flags: true is ``--name``, false ``--no-name``, a mapping JSON, a list several values."""
    flags: list[str] = []
    for name, value in arguments.items():
        flag = "--" + name.replace("_", "-")
        if value is True:
            flags.append(flag)
        elif value is False:
            flags += [] if name in _NO_NEGATIVE else ["--no-" + flag[2:]]
        elif isinstance(value, Mapping):
            flags += [flag, json.dumps(dict(value))]
        elif isinstance(value, list | tuple):
            flags += [flag, *map(str, value)]
        else:
            flags += [flag, str(value)]
    return flags


def machine_arguments(machines: EngineMachines | None) -> dict[str, object]:
    """Return the arguments of this machine's processes of an engine that has several."""
    if machines is None:
        return {}
    assert machines.meeting is not None
    return {
        "distributed_executor_backend": "mp",
        "nnodes": machines.placement.nodes,
        "node_rank": machines.placement.node_rank,
        "master_addr": machines.meeting.address,
        "master_port": machines.meeting.port,
        "data_parallel_rpc_port": machines.meeting.second_port,
    }


def process_environment(device: torch.device, machines: EngineMachines | None = None) -> dict[str, str]:
    """Environment variables for vLLM's processes, without those that the user has set."""
    variables = {
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1",  # enables the route that loads adapters, which requires the token
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPALIVE_S),
    }
    if device.type == "cpu":
        # Otherwise vLLM pins its threads to cores that other processes use too.
        variables["VLLM_CPU_OMP_THREADS_BIND"] = "nobind"
    ranks = os.environ.get("WORLD_SIZE", "1")
    if int(ranks) > int(os.environ.get("LOCAL_WORLD_SIZE", ranks)):
        # Machines that share a home folder would compile into the same one at once.
        caches = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
        variables["VLLM_CACHE_ROOT"] = os.path.expanduser(f"{caches}/vllm/{socket.gethostname()}")
    if machines is not None:
        variables |= {MACHINE_VARIABLE: machine_identity(), "VLLM_HOST_IP": machines.address}
    return {name: value for name, value in variables.items() if name not in os.environ}
