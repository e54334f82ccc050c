"""Configuration of rewards: reward manager, scorers, reward models that score or judge."""

from __future__ import annotations

from collections.abc import Iterator
from typing import ClassVar, Literal

from verl.config.base import BaseConfig, section, setting, subsection
from verl.config.machine import DTYPE
from verl.config.megatron import DistributedModel, McoreEngineConfig
from verl.config.model import NO_OTHER_BACK_END, DType, FSDPEngineConfig, PretrainedModelConfig, Strategy
from verl.config.problems import Problem
from verl.config.profiler import RewardProfilerConfig
from verl.config.rollout import NO_OTHER_ENGINE, EngineName, WeightFormatName


@section
class ModuleConfig(BaseConfig):
    """A class in your own file."""

    hydra_target: ClassVar[str] = "verl.trainer.config.config.ModuleConfig"

    path: str | None = setting(None, path=True)
    """File with the class."""


@section
class RewardManagerConfig(BaseConfig):
    """The reward manager: a registered one, or your own class."""

    hydra_target: ClassVar[str] = "verl.trainer.config.config.RewardManagerConfig"

    source: Literal["register", "importlib"] = setting("register")
    """`register` uses the registered `name`, `importlib` the class in `module`."""
    name: str = setting("naive", interpolation="${oc.select:reward_model.reward_manager,naive}")
    """Registered reward manager, or the name of the class with `source=importlib`."""
    module: ModuleConfig = subsection(ModuleConfig)
    """Your own reward manager class, with `source=importlib`."""


@section
class CustomRewardFunctionConfig(BaseConfig):
    """Your own scorer."""

    path: str | None = setting(None, path=True)
    """Python file with the function; null chooses a scorer by data source."""
    name: str = setting("compute_score")
    """Name of the function."""
    reward_kwargs: dict[str, object] = setting(factory=dict)
    """Further arguments of the function."""


FailurePolicy = Literal["mask", "drop_group", "stop"]
"""Treatment of samples that could not be scored."""


@section
class SandboxFusionConfig(BaseConfig):
    """Place where generated programs run: a SandboxFusion service, or the sandbox of this machine."""

    url: str | None = setting(None)
    """Address of a SandboxFusion service, such as `http://host:8080`; null runs programs on this machine, in the
    sandbox of bubblewrap."""
    max_concurrent: int = setting(64, ge=1)
    """Maximum number of concurrent requests to the service, over all scoring processes."""
    memory_limit_mb: int = setting(1024, ge=64)
    """Memory limit of one run of a program, in MiB, on the service or on this machine."""


@section
class RewardModelModelConfig(PretrainedModelConfig):
    """The reward model's weights and tokenizer."""

    input_tokenizer: str | None = setting(None, interpolation="${actor_rollout_ref.model.path}", path=True, remote=True)
    """Tokenizer of the policy, if the reward model uses another one; null if both use the same."""
    path: str = setting("~/models/FsfairX-LLaMA3-RM-v0.1", path=True, remote=True)
    external_lib: str | None = setting(None, interpolation="${actor_rollout_ref.model.external_lib}")
    fsdp_config: FSDPEngineConfig = subsection(FSDPEngineConfig, forward_only=True)
    """Sharding, precision, offload."""


@section
class JudgeRolloutConfig(BaseConfig):
    """The engine of a generative reward model."""

    hydra_target: ClassVar[str] = "verl.workers.config.RolloutConfig"

    name: EngineName | None = setting(None, missing=True, refuse_values={"trtllm": NO_OTHER_ENGINE})
    """Engine that serves the model to the reward function; if unset, the model itself scores each response."""
    prompt_length: int = setting(2048, ge=1)
    """Maximum length of a request in tokens, if the longest answer is to fit too."""
    response_length: int = setting(2048, ge=1)
    """Maximum length of an answer in tokens, if a request has no `max_tokens`."""
    dtype: DType = setting("bfloat16", interpolation=DTYPE)
    """Precision of the weights inside the engine; by default bfloat16 on GPUs and float32 on a CPU."""
    gpu_memory_utilization: float = setting(0.5, gt=0, le=1)
    """Fraction of a GPU's memory that the engine may use; with `native`, fraction of the free memory (also on a CPU)
    for the KV cache."""
    enforce_eager: bool = setting(True)
    """Do not capture CUDA graphs (`vllm`, `sglang`, and `native` on a GPU)."""
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(None)
    """Batch sizes for which CUDA graphs are captured (`vllm`, `sglang`, `native`). null lets the engine choose; an
    empty list turns them off in `native`, whose choice is 1, 2, 3, 4, 6, 8 ... 1024 for dense models of text."""
    free_cache_engine: bool = setting(True)
    """Free the engine's memory while no rewards are computed; on separate ranks the model always stays loaded."""
    data_parallel_size: int = setting(1, ge=1)
    """Copies of all but the experts, as in `actor_rollout_ref.rollout`."""
    expert_parallel_size: int = setting(1, ge=1)
    """Ranks that split the experts of one layer (`vllm`, `sglang`); other engines allow only 1."""
    tensor_model_parallel_size: int = setting(2, ge=1)
    """Ranks that split each layer; it must divide the ranks per node. `native` and `hf` allow only 1. If unset: 1 with
    `native` and `hf`, and if 2 does not divide the ranks."""
    max_num_batched_tokens: int = setting(8192, ge=1)
    """Maximum number of tokens that the engine computes in one pass (`native` and `hf`: prompt tokens)."""
    max_model_len: int | None = setting(None, ge=1)
    """Maximum length of request and answer together, in tokens; null uses the sum of both lengths."""
    max_num_seqs: int = setting(1024, ge=1)
    """Requests that the engine runs at once; further ones wait."""
    engine_kwargs: dict[str, object] = setting(factory=dict)
    """Further arguments of the engine, as in `actor_rollout_ref.rollout`."""
    quantization: WeightFormatName | None = setting(None)
    """Round the weights of linear layers to 8 bits, as in `actor_rollout_ref.rollout`; null keeps `dtype`."""
    enable_chunked_prefill: bool = setting(True)
    """Process long requests in several passes (`vllm`, `sglang`)."""
    enable_prefix_caching: bool = setting(True)
    """Compute common prefixes of requests, such as their instructions, only once."""
    disable_log_stats: bool = setting(True)
    """Leave statistics out of the engine's log (`vllm`, `sglang`)."""


@section
class RewardModelConfig(BaseConfig, DistributedModel):
    """Scoring of responses by rules, by your own function, or by a model."""

    enable: bool = setting(False)
    """Load a reward model: one that scores each response or, with `rollout.name` and a reward function that calls it, a
    generative one."""
    enable_resource_pool: bool = setting(False)
    """Run the reward model on separate ranks instead of the policy's."""
    n_gpus_per_node: int = setting(1, ge=0, interpolation="${trainer.n_gpus_per_node}")
    """Ranks per node of that pool; 0 without one."""
    nnodes: int = setting(0, ge=0)
    """Nodes of that pool."""
    strategy: Strategy = setting("fsdp", refuse_values=NO_OTHER_BACK_END)
    """Back end; `fsdp` and `fsdp2` both use FSDP2, `megatron` uses megatron-core."""
    model: RewardModelModelConfig = subsection(RewardModelModelConfig)
    """The reward model's weights and tokenizer."""
    rollout: JudgeRolloutConfig = subsection(JudgeRolloutConfig)
    """The engine of a generative reward model."""
    micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per forward pass on one rank; null uses the setting of the rollout's log-probs."""
    max_length: int | None = setting(None, ge=1)
    """Maximum length of prompt and response together that the reward model reads; null is no limit."""
    use_dynamic_bsz: bool = setting(False, interpolation="${critic.use_dynamic_bsz}")
    """Fill micro-batches by tokens instead of by sequences."""
    forward_max_token_len_per_gpu: int = setting(32768, ge=1, interpolation="${critic.forward_max_token_len_per_gpu}")
    """Tokens per pass on one rank, with `use_dynamic_bsz`."""
    ulysses_sequence_parallel_size: int = setting(1, ge=1)
    """Ranks that share each sequence; the same setting as that of `model.fsdp_config`."""
    megatron: McoreEngineConfig = subsection(McoreEngineConfig, forward_only=True)
    """With `strategy=megatron`; sizes that are not set are the actor's."""
    profiler: RewardProfilerConfig = subsection(RewardProfilerConfig)
    """Ranks whose processes are profiled."""
    reward_manager: str = setting("naive")
    """Registered reward manager: how responses are passed to a scorer."""
    reward_kwargs: dict[str, object] = setting(factory=dict)
    """Further arguments of the reward manager."""
    reward_format: str | None = setting(None)
    """Registered scorer for all rows, whatever their data source; null chooses by data source."""
    scorer_kwargs: dict[str, object] = setting(factory=dict)
    """Further arguments of the scorer, such as `format_score` of countdown."""
    max_error_rate: float = setting(0.5, ge=0, le=1)
    """Fraction of a step's samples whose scorer may fail before the run stops."""
    on_failure: FailurePolicy = setting("mask")
    """Treatment of samples that could not be scored: `mask` leaves them out of training and of their group's
    baseline, `drop_group` leaves out all responses to the prompt, `stop` ends the run at the first one."""
    timeout_s: float = setting(30.0, gt=0)
    """Time limit for the score of one sample, in seconds; a slower scorer is killed and the sample has the status
    `timeout`."""
    memory_limit_mb: int | None = setting(4096, ge=1)
    """Memory limit in MiB for the score of one sample, beyond what loading the scorer took; null is no limit."""
    launch_reward_fn_async: bool = setting(False)
    """Compute scores while log-probs are computed."""
    num_workers: int = setting(1, ge=1)
    """Processes that score; more are started temporarily while slow samples occupy some of them."""
    sandbox_fusion: SandboxFusionConfig = subsection(SandboxFusionConfig)
    """Place where generated programs run: a SandboxFusion service, or the sandbox of this machine."""

    @property
    def placement(self) -> FSDPEngineConfig | McoreEngineConfig:
        """The section of the training back end."""
        return self.megatron if self.strategy == "megatron" else self.model.fsdp_config

    def problems(self, path: str) -> Iterator[Problem]:
        """A pool has nodes, the code service an HTTP address, and programs a time limit below that of their sample."""
        if self.enable_resource_pool and self.nnodes == 0:
            remedy = f"set {path}.nnodes and {path}.n_gpus_per_node, or enable_resource_pool=false"
            yield Problem(f"{path}.nnodes", 0, "a separate pool needs at least one node", ">= 1", remedy)
        if self.enable_resource_pool and self.n_gpus_per_node == 0:
            yield Problem(f"{path}.n_gpus_per_node", 0, "a separate pool needs at least one rank per node", ">= 1")
        url = self.sandbox_fusion.url
        if url and not url.startswith(("http://", "https://")):
            yield Problem(
                f"{path}.sandbox_fusion.url",
                url,
                "it is no address of http",
                "http://HOST:PORT or https://HOST/run_code",
                "leave it null to run programs in the sandbox of this machine",
            )
        total = self.scorer_kwargs.get("total_time_limit_s")
        if isinstance(total, (int, float)) and total >= self.timeout_s:
            yield Problem(
                f"{path}.scorer_kwargs.total_time_limit_s",
                total,
                f"the sample is given up after {path}.timeout_s={self.timeout_s:g}, so a slow program would be a "
                "failure of the scorer and not a wrong answer",
                f"less than {self.timeout_s:g}",
                f"lower it, or raise {path}.timeout_s",
            )
