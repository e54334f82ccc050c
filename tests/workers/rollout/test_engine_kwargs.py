"""Settings of engines of other libraries: the keys that verl reads, what goes on to the engine, and variables."""

from __future__ import annotations

import socket
from pathlib import Path
from typing import Any

import pytest
import torch

from verl.config import HFModelConfig, RolloutConfig
from verl.errors import ConfigError
from verl.testing.models import tiny_model_dir
from verl.utils import hf_tokenizer
from verl.workers.rollout.base import get_rollout_class
from verl.workers.rollout.engine_kwargs import extra_arguments, launch_settings
from verl.workers.rollout.vllm_rollout import VLLMRollout
from verl.workers.rollout.vllm_rollout.settings import engine_arguments, process_environment


def settings(**kwargs: object) -> RolloutConfig:
    return RolloutConfig(name="vllm", engine_kwargs={"vllm": kwargs, "sglang": {"python": "/other"}})


def test_keys_of_verl_are_read_and_the_rest_goes_on(tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.touch()
    link = tmp_path / "linked"
    link.symlink_to(python)
    config = settings(python=str(link), start_timeout_s=5, swap_space=4, unset=None)
    assert extra_arguments(config, decided=("dtype",)) == {"swap_space": 4}
    assert launch_settings(config, 600.0).python == str(link)  # not what it points to
    assert launch_settings(config, 600.0).start_timeout_s == 5.0
    assert launch_settings(settings(), 600.0).start_timeout_s == 600.0
    assert extra_arguments(RolloutConfig(name="vllm", engine_kwargs={"vllm": None}), decided=()) == {}
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm sets dtype, swap_space, which other settings decide"):
        extra_arguments(settings(swap_space=4, dtype="half"), decided=("dtype", "swap_space"))
    with pytest.raises(ConfigError, match=r"engine_kwargs.vllm.python=/no/python: there is no such file"):
        launch_settings(settings(python="/no/python"), 600.0)


def test_variables_of_the_user_reach_the_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("VLLM_CPU_OMP_THREADS_BIND", raising=False)
    cpu = torch.device("cpu")
    assert process_environment(cpu)["VLLM_CPU_OMP_THREADS_BIND"] == "nobind"
    assert "VLLM_CPU_OMP_THREADS_BIND" not in process_environment(torch.device("cuda"))
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0-3")
    assert "VLLM_CPU_OMP_THREADS_BIND" not in process_environment(cpu)  # what is in the environment stays


def test_machines_that_share_a_home_folder_compile_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, variable = torch.device("cuda"), "VLLM_CACHE_ROOT"
    for name in (variable, "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert variable not in process_environment(gpu)
    monkeypatch.setenv("WORLD_SIZE", "16")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert process_environment(gpu)[variable].endswith(f"/vllm/{socket.gethostname()}")
    monkeypatch.setenv(variable, "/cache")
    assert variable not in process_environment(gpu)


def test_on_a_cpu_vllm_does_not_take_half_of_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM goes by its variable first, then by the argument: one GiB, unless either is given."""
    monkeypatch.delenv("VLLM_CPU_KVCACHE_SPACE", raising=False)
    model = HFModelConfig(path=tiny_model_dir(tmp_path / "model"))

    def size(device: str, **kwargs: object) -> object:
        arguments = engine_arguments(settings(**kwargs), model, 64, torch.device(device))
        return arguments.get("kv_cache_memory_bytes")

    assert size("cpu") == 2**30
    assert size("cpu", kv_cache_memory_bytes=2**26) == 2**26
    assert size("cuda") is None
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "4")
    assert size("cpu") is None


def test_vllm_is_told_of_heads_that_propose_tokens(tmp_path: Path) -> None:
    path, cpu, gpu = tiny_model_dir(tmp_path / "model"), torch.device("cpu"), torch.device("cuda")
    mtp: Any = {"enable": True, "enable_rollout": True, "num_speculative_tokens": 2}
    model = HFModelConfig(path=path, mtp=mtp)
    proposals: dict[str, object] = {"method": "mtp", "num_speculative_tokens": 2}
    real = RolloutConfig(name="vllm", load_format="safetensors")
    assert engine_arguments(real, model, 64, gpu)["speculative_config"] == proposals
    # So that requests have the same random numbers in any company; vLLM's graphs need another way.
    with_table = proposals | {"num_speculative_tokens_per_batch_size": [[1, 256, 2]]}
    assert engine_arguments(real, model, 64, cpu)["speculative_config"] == with_table
    assert not engine_arguments(real, model, 64, gpu)["async_scheduling"]
    # No update brings the weights of untrained heads: they are read at once, and kept while vLLM sleeps.
    arguments = engine_arguments(settings(), model, 64, gpu)
    assert arguments["speculative_config"] == proposals | {"draft_load_config": {"load_format": "auto"}}
    assert arguments["sleep_preserve_parameter_names"] == ["draft.*"]
    mtp["enable"] = False
    assert "speculative_config" not in engine_arguments(settings(), HFModelConfig(path=path, mtp=mtp), 64, cpu)


def test_latent_attention_is_refused_on_a_cpu(tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model", "deepseek_v3")
    config = RolloutConfig(name="vllm", tensor_model_parallel_size=1)
    with pytest.raises(ConfigError, match="wrong log-probs of DeepseekV3Config, a model with latent attention"):
        VLLMRollout(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")


@pytest.mark.parametrize("name", ["vllm", "sglang"])
def test_one_rank_cannot_share_an_engine(name: str, tmp_path: Path) -> None:
    path = tiny_model_dir(tmp_path / "model")
    config = RolloutConfig(name=name, mode="sync", tensor_model_parallel_size=2)
    with pytest.raises(ConfigError, match="tensor_model_parallel_size=2 does not divide the 1 rank"):
        get_rollout_class(name, "sync")(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
