"""From ``rollout.*`` to SGLang's own arguments."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.errors import ConfigError
from verl.utils.model import ATTN_IMPLEMENTATION, resolve_model_path, torch_dtype
from verl.workers.rollout.engine_kwargs import extra_arguments
from verl.workers.rollout.server import SERVER_KEEPALIVE_S

if TYPE_CHECKING:
    from transformers import PretrainedConfig

    from verl.workers.config import HFModelConfig, RolloutConfig

ENGINE_SIDE = Path(__file__).parent / "engine_side"
"""The folder that goes on the module path of SGLang's processes."""
_SPARE_POSITIONS = 8
"""SGLang keeps a few positions of its context for itself."""
_CPU_CACHED_TOKENS = 65536
"""On a CPU: tokens whose keys and values are kept, at least one response of full length."""


def engine_arguments(
    config: RolloutConfig,
    model_config: HFModelConfig,
    hf_config: PretrainedConfig,
    max_model_len: int,
    device: torch.device,
) -> dict[str, Any]:
    """The fields of SGLang's ``ServerArgs``.

    Raises:
        ConfigError: ``engine_kwargs.sglang`` sets what another setting decides, or a setting asks for what SGLang
            cannot do here.
    """
    _refuse(config)
    path = resolve_model_path(model_config.path)
    context = max_model_len + _SPARE_POSITIONS
    arguments: dict[str, Any] = {
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
        "dp_size": config.data_parallel_size,
        "ep_size": config.expert_parallel_size,
        "log_level": "error" if config.disable_log_stats else "info",
        # Stop texts end a response early only if SGLang has the tokenizer; it is not needed for anything else.
        "skip_tokenizer_init": not (config.stop or config.val_kwargs.stop),
        # The requests' own random numbers and log-probs: see engine_side/verl_sglang.py.
        "sampling_backend": "pytorch",
        "enable_custom_logit_processor": True,
        "custom_weight_loader": ["verl_sglang.load_weights"],
        "skip_server_warmup": True,
        # Without this the scheduler asks for requests in a busy loop, on a core that the trainer needs.
        "sleep_on_idle": True,
        "enable_memory_saver": device.type == "cuda" and config.free_cache_engine,
    }
    if config.cudagraph_capture_sizes is not None:
        arguments["cuda_graph_bs"] = list(config.cudagraph_capture_sizes)
    overrides = {k: v for k, v in model_config.override_config.items() if k != ATTN_IMPLEMENTATION}
    positions = getattr(hf_config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and positions < context:
        overrides["max_position_embeddings"] = context  # the spare ones are never used
    if overrides:
        arguments["json_model_override_args"] = json.dumps(overrides)
    extra = extra_arguments(config, decided=arguments)
    if device.type == "cpu":
        # A share of the memory would be half of the machine's; max_total_tokens is the smaller of the two.
        arguments["max_total_tokens"] = max(2 * context, min(_CPU_CACHED_TOKENS, config.max_num_seqs * context))
    return arguments | extra


def _refuse(config: RolloutConfig) -> None:
    if config.limit_images is not None:
        raise ConfigError(
            f"rollout.limit_images={config.limit_images} is not used by the sglang engine, which gets token ids only. "
            "Leave it null."
        )
    if config.pipeline_model_parallel_size > 1 or config.data_parallel_size > 1:
        raise ConfigError(
            f"rollout.pipeline_model_parallel_size={config.pipeline_model_parallel_size} and data_parallel_size="
            f"{config.data_parallel_size}: the sglang engine has one copy of the model, split by tensors alone. Set "
            "both to 1; more copies come from more workers."
        )


def process_environment(config: RolloutConfig, device: torch.device) -> dict[str, str]:
    """Variables that SGLang's processes get, unless the user has set them."""
    variables = {"SGLANG_TIMEOUT_KEEP_ALIVE": str(SERVER_KEEPALIVE_S)}
    ranks = config.tensor_model_parallel_size
    if device.type == "cpu":
        variables["SGLANG_USE_CPU_ENGINE"] = "1"
    if device.type == "cpu" and ranks > 1:  # SGLang wants to know the cores of each rank
        cores = sorted(os.sched_getaffinity(0))
        shares = [cores[rank::ranks] or cores for rank in range(ranks)]
        variables["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, share)) for share in shares)
    return {name: value for name, value in variables.items() if name not in os.environ}
