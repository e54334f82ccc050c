"""Translate ``rollout.*`` to SGLang's arguments and environment variables."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterable, Mapping

import torch
from transformers import PretrainedConfig

from verl.base.registry import suggest
from verl.config import HFModelConfig, RolloutConfig
from verl.errors import ConfigError
from verl.utils.model import ATTN_IMPLEMENTATION, has_experts, resolve_model_path, torch_dtype
from verl.vision.families import VisionConfig
from verl.workers.rollout.client import ENGINE_SIDE
from verl.workers.rollout.engine_kwargs import (
    Launch,
    adapted_modules,
    applies_adapters,
    extra_arguments,
    largest_rank,
)
from verl.workers.rollout.engine_process import SERVER_KEEPALIVE_S
from verl.workers.rollout.engine_side.verl_engine import MACHINE_VARIABLE
from verl.workers.rollout.machines import EngineMachines
from verl.workers.rollout.ranks import machine_identity
from verl.workers.rollout.sglang_rollout.adapters import ATTENTION, LAYERS, check_layers

# SGLang reserves a few positions of its context for itself.
_SPARE_POSITIONS = 8
# Size of the cache of keys and values on a CPU, in tokens; it is larger for very long contexts.
_CPU_CACHED_TOKENS = 65536
# Numbers of a patch of Qwen2.5-VL; SGLang takes patches of another size for features of the vision tower.
_PATCH_VALUES = 1176
_SPECULATIVE = (
    "speculative_algorithm",
    "speculative_num_steps",
    "speculative_eagle_topk",
    "speculative_num_draft_tokens",
)
# Attempts to list SGLang's arguments, because the process that lists them may be killed from outside.
_ATTEMPTS = 3


def engine_arguments(
    config: RolloutConfig,
    model_config: HFModelConfig,
    hf_config: PretrainedConfig,
    max_model_len: int,
    device: torch.device,
) -> dict[str, object]:
    """Return the fields of SGLang's ``ServerArgs``.

    Raises:
        ConfigError: ``engine_kwargs.sglang`` sets an argument that another setting determines, or a setting is not
            supported with SGLang.
    """
    vision = VisionConfig.from_config(hf_config)
    _refuse(config, hf_config.model_type, vision)
    path = resolve_model_path(model_config.path)
    context = max_model_len + _SPARE_POSITIONS
    arguments: dict[str, object] = {
        "model_path": path,
        "tokenizer_path": resolve_model_path(model_config.tokenizer_path or path),
        "trust_remote_code": model_config.trust_remote_code,
        "dtype": str(torch_dtype(config.dtype)).removeprefix("torch."),
        "load_format": config.load_format,
        "device": device.type,
        "context_length": context,
        "max_running_requests": config.max_num_seqs,
        "max_prefill_tokens": config.max_num_batched_tokens,
        "chunked_prefill_size": config.max_num_batched_tokens if config.enable_chunked_prefill else -1,
        "disable_radix_cache": not config.enable_prefix_caching,
        "mem_fraction_static": config.gpu_memory_utilization,
        "disable_cuda_graph": config.enforce_eager,
        "schedule_policy": config.scheduling_policy,
        "tp_size": config.tensor_model_parallel_size,
        "pp_size": config.pipeline_model_parallel_size,
        "ep_size": config.expert_parallel_size,
        "log_level": "error" if config.disable_log_stats else "info",
        # Stop texts end a response early only if SGLang has the tokenizer; it is not needed for anything else.
        # Of a model with images SGLang gets pictures only where it has the tokenizer and the processor.
        "skip_tokenizer_init": not (config.stop or config.val_kwargs.stop or vision),
        "enable_multimodal": vision is not None,
        # verl's sampler and weight loader: see engine_side/verl_sglang.py.
        "sampling_backend": "pytorch",
        "enable_custom_logit_processor": True,
        "custom_weight_loader": ["verl_sglang.load_weights"],
        "skip_server_warmup": True,
        # Otherwise the scheduler polls for requests in a busy loop, on a core that the trainer needs.
        "sleep_on_idle": True,
        "enable_memory_saver": device.type == "cuda" and config.free_cache_engine,
    }
    if config.cudagraph_capture_sizes is not None:
        arguments["cuda_graph_bs_decode"] = list(config.cudagraph_capture_sizes)
    if model_config.mtp.is_in_rollout:
        if device.type == "cpu":
            raise ConfigError(
                "model.mtp.enable_rollout=true: where SGLang verifies proposals of heads on a CPU, it takes the most "
                "likely token whatever the temperature, and the kernels for it have no build on PyPI. Set it to "
                "false, or set rollout.name=vllm."
            )
        arguments |= {name: model_config.mtp[name] for name in _SPECULATIVE}
        # Updates go to the model alone: random heads would stay random, and lost ones lost.
        arguments["speculative_draft_load_format"] = "auto" if config.load_format == "dummy" else config.load_format
        arguments["enable_draft_weights_cpu_backup"] = arguments["enable_memory_saver"]
    if applies_adapters(config, model_config):
        arguments |= _adapter_arguments(model_config, has_experts(hf_config), device)
        # Adapters alone come with an update: the base must be there again after a sleep.
        arguments["enable_weights_cpu_backup"] = arguments["enable_memory_saver"]
    overrides = {k: v for k, v in model_config.override_config.items() if k != ATTN_IMPLEMENTATION}
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < context:
        overrides["max_position_embeddings"] = context  # the model never sees the spare positions
    if overrides:
        arguments["json_model_override_args"] = json.dumps(overrides)
    extra = extra_arguments(config, decided=arguments)
    if device.type == "cpu":
        # mem_fraction_static would take half of the machine's memory; SGLang uses the smaller of the two limits.
        arguments["max_total_tokens"] = max(2 * context, min(_CPU_CACHED_TOKENS, config.max_num_seqs * context))
    return arguments | extra


def _adapter_arguments(model_config: HFModelConfig, has_experts: bool, device: torch.device) -> dict[str, object]:
    """Arguments with which SGLang applies LoRA adapters by itself; adapters of experts are not among them."""
    allowed = ATTENTION if has_experts else LAYERS
    modules = adapted_modules(model_config)
    if not isinstance(modules, str):  # the layers of an expression are checked with the first update
        check_layers(modules, allowed)
    arguments: dict[str, object] = {
        "enable_lora": True,
        "max_lora_rank": largest_rank(model_config),
        "lora_target_modules": list(allowed),
        "max_loras_per_batch": 1,
        "lora_strict_loading": True,
    }
    return arguments | ({"lora_backend": "torch_native"} if device.type == "cpu" else {})


def _refuse(config: RolloutConfig, model_type: str, vision: VisionConfig | None) -> None:
    if model_type == "qwen2_5_vl" and vision is not None and vision.patch_values != _PATCH_VALUES:
        raise ConfigError(
            f"rollout.name=sglang takes pictures for qwen2_5_vl in patches of {_PATCH_VALUES} numbers (14 x 14 pixels, "
            f"two frames, three colours), and this model's have {vision.patch_values}. Set rollout.name=native or vllm."
        )
    if config.limit_images is not None:
        raise ConfigError(
            f"rollout.limit_images={config.limit_images} is not used by the sglang engine, which gets all images of a "
            "prompt as one. Leave it null, or set rollout.name=vllm."
        )
    if config.pipeline_model_parallel_size > 1:
        raise ConfigError(
            f"rollout.pipeline_model_parallel_size={config.pipeline_model_parallel_size}: verl loads new weights into "
            "all of SGLang's ranks at once, and its pipeline stages get them one after another. Set it to 1, and "
            "tensor_model_parallel_size to all ranks of the engine, or set rollout.name=vllm."
        )


def machine_arguments(machines: EngineMachines | None) -> dict[str, object]:
    """Return the arguments of this machine's processes of an engine that has several."""
    if machines is None:
        return {}
    assert machines.meeting is not None
    return {
        "nnodes": machines.placement.nodes,
        "node_rank": machines.placement.node_rank,
        "dist_init_addr": f"{machines.meeting.address}:{machines.meeting.port}",
    }


def process_environment(
    config: RolloutConfig, device: torch.device, machines: EngineMachines | None = None
) -> dict[str, str]:
    """Environment variables for SGLang's processes, without those that the user has set."""
    variables = {
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPALIVE_S),
        # A health check is not to generate a token: it comes during updates and while memory is released, too.
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false",
    }
    ranks = config.tensor_model_parallel_size
    if device.type == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    if device.type == "cpu" and ranks > 1:  # SGLang requires a list of cores for each rank
        cores = sorted(os.sched_getaffinity(0))
        local_ranks = ranks // (1 if machines is None else machines.placement.nodes)
        shares = [cores[rank::local_ranks] or cores for rank in range(local_ranks)]
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    if machines is not None:
        variables |= {MACHINE_VARIABLE: machine_identity(), "SGLANG_HOST_IP": machines.address}
    return {name: value for name, value in variables.items() if name not in os.environ}


def check_names(names: Iterable[str], launch: Launch, environment: Mapping[str, str]) -> None:
    """Check that the names given in ``engine_kwargs.sglang`` are fields of SGLang's ``ServerArgs``.

    The fields are listed by a subprocess of ``launch.python``, with ``environment`` added to this process's.

    Raises:
        ConfigError: there is no such field, or SGLang cannot be imported there.
    """
    names = list(names)
    if not names:  # importing SGLang takes seconds
        return
    known_names = _known_names(launch, environment)
    unknown = [name for name in names if name not in known_names]
    if unknown:
        hints = "".join(suggest(name, known_names) for name in unknown)
        raise ConfigError(
            f"rollout.engine_kwargs.sglang: this SGLang has no argument {', '.join(unknown)}.{hints} `{launch.python} "
            "-m sglang.launch_server --help` lists what it has, with dashes in place of underscores."
        )


def _known_names(launch: Launch, environment: Mapping[str, str]) -> list[str]:
    python, timeout_s = launch.python, launch.start_timeout_s
    command = [python, str(ENGINE_SIDE / "verl_sglang_server.py"), "names"]
    try:
        for _ in range(_ATTEMPTS):
            result = subprocess.run(
                command, env=os.environ | environment, capture_output=True, text=True, timeout=timeout_s, check=False
            )
            if result.returncode >= 0:  # negative: killed by a signal
                break
    except subprocess.TimeoutExpired:
        raise ConfigError(
            f"rollout.name=sglang: {python} did not import SGLang within {timeout_s:g} s. If its disk is only slow, "
            "raise rollout.engine_kwargs.sglang.start_timeout_s."
        ) from None
    if result.returncode:
        last = (result.stderr.strip().splitlines() or [f"exit status {result.returncode}"])[-1]
        raise ConfigError(
            f"rollout.name=sglang: {python} cannot import SGLang: {last}. Install it there (requirements/sglang.txt), "
            "or name the interpreter of another environment in rollout.engine_kwargs.sglang.python."
        )
    return json.loads(result.stdout.splitlines()[-1])
