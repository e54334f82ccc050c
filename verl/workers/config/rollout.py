"""How responses are sampled, and by which engine."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from verl.base_config import BaseConfig, OneOrMany, section, setting, subsection
from verl.utils.profiler.config import PART_OF_PROFILING, RolloutProfilerConfig
from verl.workers.config.agent import AgentLoopConfig, MultiTurnConfig
from verl.workers.config.engine import DType
from verl.workers.config.model import PART_OF_MTP, MtpConfig

TOKENS_ONLY = "engines exchange token ids only; texts are made and looked for on the trainer's side"
WHOLE_TENSORS = "weights travel tensor by tensor already"
NO_OTHER_ENGINE = "this engine is not in this version; use native, vllm or sglang"
NO_LOGITS = "logits are not log-probs, and nothing here can train on them; use processed_logprobs"


@section
class SamplingConfig(BaseConfig):
    """How validation samples, where it differs from training."""

    hydra_target: ClassVar[str] = "verl.workers.config.SamplingConfig"

    temperature: float = setting(0, ge=0)
    """Divisor of the logits; 0 is greedy."""
    top_k: int = setting(-1, ge=-1)
    """Sample among this many most likely tokens; -1 or 0 among all."""
    top_p: float = setting(1.0, gt=0, le=1)
    """Sample among the fewest tokens whose probabilities reach this sum."""
    min_p: float = setting(0.0, ge=0, le=1)
    """Sample among tokens with at least this share of the largest probability; 0 keeps all."""
    do_sample: bool = setting(False)
    """Sample; false takes the most likely token whatever `temperature` says."""
    n: int = setting(1, ge=1)
    """Responses per prompt."""
    stop: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None)
    """Texts that end a response; null takes those of training."""
    stop_token_ids: tuple[int, ...] | None = setting(None)
    """Tokens that end a response besides EOS; null takes those of training."""
    max_tokens: int | None = setting(None, ge=1)
    """Longest response in tokens, at most `data.max_response_length`; null takes that."""


@section
class TraceConfig(BaseConfig):
    """Recording of every rollout in an external tracing service."""

    hydra_target: ClassVar[str] = "verl.workers.config.TraceConfig"

    backend: str | None = setting(
        None,
        refuse="rollout tracing is not in this version; use trainer.rollout_data_dir to keep all rollouts as jsonl",
    )
    """Tracing service."""
    token2text: bool = setting(False)
    """Record texts beside token ids."""
    max_samples_per_step_per_worker: int | None = setting(None, ge=1)
    """Record at most this many samples per step and worker."""


@section
class PrometheusConfig(BaseConfig):
    """Serving the engine's own metrics to Prometheus."""

    hydra_target: ClassVar[str] = "verl.workers.config.PrometheusConfig"

    enable: bool = setting(False, refuse="serving metrics to Prometheus is not in this version; set enable=false")
    """Serve metrics."""
    port: int = setting(9090, ge=1, le=65535)
    """Port of the Prometheus server."""
    file: str | None = setting(None)
    """Where the server's configuration is written; null takes the folder of the Ray session."""
    served_model_name: str | None = setting(None, interpolation="${oc.select:actor_rollout_ref.model.path,null}")
    """Name of the model in the metrics."""


@section
class CheckpointEngineConfig(BaseConfig):
    """How new weights reach the rollout engine."""

    hydra_target: ClassVar[str] = "verl.workers.config.CheckpointEngineConfig"

    backend: str = setting(
        "naive", refuse="only the direct transfer (naive) is in this version; set checkpoint_engine.backend=naive"
    )
    """Transport of the weights."""
    update_weights_bucket_megabytes: int = setting(2048, ge=1)
    """Size of one transfer (`vllm`, `sglang`)."""
    engine_kwargs: dict[str, Any] = setting(factory=dict, hint="the direct transfer has no settings")
    """Settings of the transport."""


@section
class ServingConfig(BaseConfig):
    """Settings that a serving engine takes at start."""

    name: str | None = setting(None, missing=True)
    """Engine."""
    prompt_length: int = setting(512, ge=1)
    """Longest prompt in tokens."""
    response_length: int = setting(512, ge=1)
    """Longest response in tokens."""
    dtype: DType = setting("bfloat16")
    """Format of the weights inside the engine."""
    gpu_memory_utilization: float = setting(0.5, gt=0, le=1)
    """Fraction of a GPU's memory that the engine may take; with `native` of the free memory, on a CPU too, for keys and
    values."""
    enforce_eager: bool = setting(False)
    """Do not capture CUDA graphs (`vllm`, `sglang`)."""
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(None)
    """Batch sizes for which CUDA graphs are captured (`vllm`, `sglang`)."""
    free_cache_engine: bool = setting(True)
    """Give the engine's memory back while training; it gets the weights anew for the next rollout."""
    data_parallel_size: int = setting(1, ge=1)
    """Copies of the model inside one engine (`vllm`, `sglang`)."""
    expert_parallel_size: int = setting(1, ge=1)
    """Ranks that share the experts of one layer (`vllm`, `sglang`)."""
    tensor_model_parallel_size: int = setting(2, ge=1)
    """Ranks that share one copy of the model; must divide the number of ranks (`vllm`, `sglang`)."""
    max_num_batched_tokens: int = setting(8192, ge=1)
    """Tokens that the engine puts through in one pass (`native` and `hf`: prompt tokens)."""
    max_model_len: int | None = setting(None, ge=1)
    """Longest prompt and response together; null takes both lengths."""
    max_num_seqs: int = setting(256, ge=1)
    """Sequences that the engine runs at once."""
    load_format: str = setting("dummy")
    """How the engine finds its first weights: `dummy` waits for the trainer's (`vllm`, `sglang`)."""
    engine_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments of the engine (`vllm`, `sglang`)."""
    limit_images: int | None = setting(None, ge=0)
    """Most images in one prompt (`vllm`, `sglang`)."""
    enable_chunked_prefill: bool = setting(True)
    """Cut long prompts into pieces (`vllm`, `sglang`)."""
    enable_prefix_caching: bool = setting(True)
    """Compute equal beginnings once (`vllm`, `sglang`)."""
    disable_log_stats: bool = setting(True)
    """No statistics in the engine's log (`vllm`, `sglang`)."""
    skip_tokenizer_init: bool = setting(True, hint=TOKENS_ONLY)
    """Exchange token ids only."""


def _per_engine() -> dict[str, Any]:
    return {"vllm": {}, "sglang": {}, "trtllm": {}}


@section
class RolloutConfig(ServingConfig):
    """Sampling of training responses, and the engine that does it."""

    hydra_target: ClassVar[str] = "verl.workers.config.RolloutConfig"

    name: Literal["native", "hf", "vllm", "sglang", "trtllm"] = setting(
        "native", refuse_values={"trtllm": NO_OTHER_ENGINE}
    )
    """Engine: `native` is our own, in the trainer's process on its weights; `hf` a plain loop around Transformers."""
    mode: Literal["sync", "async"] = setting("async")
    """`sync` runs the engine inside the worker's process, `async` as a server of its own (`vllm`)."""
    temperature: float = setting(1.0, ge=0)
    """Divisor of the logits; log-probs are of the divided logits."""
    top_k: int = setting(-1, ge=-1)
    """Sample among this many most likely tokens; -1 or 0 among all."""
    top_p: float = setting(1, gt=0, le=1)
    """Sample among the fewest tokens whose probabilities reach this sum."""
    min_p: float = setting(0.0, ge=0, le=1)
    """Sample among tokens with at least this share of the largest probability; 0 keeps all."""
    do_sample: bool = setting(True)
    """Sample; false takes the most likely token."""
    n: int = setting(1, ge=1)
    """Responses per prompt."""
    seed: int = setting(1, ge=0, interpolation="${oc.select:trainer.seed,1}")
    """Seed of sampling, as in `trainer.seed`: every response draws from it, the step, the prompt and its own place."""
    over_sample_rate: float = setting(
        0, ge=0, refuse="sampling more prompts than are trained on is not in this version; set over_sample_rate=0"
    )
    """Fraction of additional prompts that are sampled and may be dropped."""
    prompt_length: int = setting(512, ge=1, interpolation="${oc.select:data.max_prompt_length,512}")
    """Longest prompt in tokens."""
    response_length: int = setting(512, ge=1, interpolation="${oc.select:data.max_response_length,512}")
    """Longest response in tokens."""
    stop: Annotated[tuple[str, ...], OneOrMany] = setting(())
    """Texts that end a response."""
    stop_token_ids: tuple[int, ...] = setting(())
    """Tokens that end a response besides EOS."""
    ignore_eos: bool = setting(False)
    """Go on after EOS, up to the longest response."""
    pipeline_model_parallel_size: int = setting(1, ge=1)
    """Stages that share one copy of the model (`vllm`, `sglang`)."""
    engine_kwargs: dict[str, Any] = setting(factory=_per_engine)
    """Further arguments, by engine; `vllm.python` and `sglang.python` name the interpreter of another environment that
    has the engine."""
    scheduling_policy: str = setting("fcfs")
    """Order in which the engine serves waiting requests (`vllm`, `sglang`)."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = setting(
        "processed_logprobs", refuse_values=dict.fromkeys(("processed_logits", "raw_logits"), NO_LOGITS)
    )
    """`processed_logprobs` are those of the distribution that is sampled from: after temperature, min_p, top_k and
    top_p, summing to 1 over the tokens kept; `raw_logprobs` those of the model's own logits, before all of these."""
    layered_summon: bool = setting(False, hint=WHOLE_TENSORS)
    """Gather weights layer by layer while they are sent."""
    multi_stage_wake_up: bool = setting(False)
    """Wake weights and KV cache one after the other (`vllm`, `sglang`)."""
    log_prob_micro_batch_size: int | None = setting(None, ge=1)
    """Older form of `log_prob_micro_batch_size_per_gpu`: sequences per pass over all ranks together."""
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per pass on one rank where the trainer computes the old log-probs."""
    log_prob_use_dynamic_bsz: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    )
    """Fill those passes by tokens instead of by sequences."""
    log_prob_max_token_len_per_gpu: int = setting(
        16384, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}"
    )
    """Tokens per pass on one rank, with `log_prob_use_dynamic_bsz`."""
    val_kwargs: SamplingConfig = subsection(SamplingConfig)
    """How validation samples."""
    multi_turn: MultiTurnConfig = subsection(
        MultiTurnConfig, hint="part of conversations, which are not in this version"
    )
    """Conversations and tools."""
    calculate_log_probs: bool = setting(False, hint="engines always return log-probs and the gap is always logged")
    """Return the engine's log-probs, to compare them with the trainer's."""
    agent: AgentLoopConfig = subsection(AgentLoopConfig)
    """Agent loops."""
    checkpoint_engine: CheckpointEngineConfig = subsection(CheckpointEngineConfig)
    """How new weights reach the engine."""
    trace: TraceConfig = subsection(TraceConfig, hint="part of rollout tracing, which is not in this version")
    """Recording in a tracing service."""
    skip_rollout: bool = setting(
        False, refuse="replaying stored rollouts is not in this version; set skip_rollout=false"
    )
    """Read stored responses instead of sampling."""
    skip_dump_dir: str | None = setting(None, hint="part of skip_rollout, which is not in this version")
    """Folder of the stored responses."""
    profiler: RolloutProfilerConfig = subsection(RolloutProfilerConfig, hint=PART_OF_PROFILING)
    """Profiling of the rollout workers."""
    prometheus: PrometheusConfig = subsection(
        PrometheusConfig, hint="part of serving metrics, which is not in this version"
    )
    """Serving the engine's metrics."""
    quantization: str | None = setting(
        None, refuse="quantized rollout is not in this version; leave rollout.quantization null"
    )
    """Quantization inside the engine."""
    quantization_config_file: str | None = setting(None, hint="part of quantized rollout, which is not in this version")
    """Settings of the quantization."""
    enable_rollout_routing_replay: bool = setting(
        False, refuse="router replay is not in this version; set enable_rollout_routing_replay=false"
    )
    """Return the expert choices."""
    mtp: MtpConfig | None = setting(
        None, interpolation="${oc.select:actor_rollout_ref.model.mtp, null}", hint=PART_OF_MTP
    )
    """Multi-token prediction, as the model section says."""


@section
class RewardRolloutConfig(ServingConfig):
    """The engine that serves a generative reward model."""

    hydra_target: ClassVar[str] = "verl.workers.config.RolloutConfig"

    name: str | None = setting(
        None, missing=True, refuse="serving a generative reward model is not in this version; leave it unset"
    )
    """Engine."""
    prompt_length: int = setting(2048, ge=1)
    """Longest prompt in tokens."""
    response_length: int = setting(2048, ge=1)
    """Longest response in tokens."""
    enforce_eager: bool = setting(True)
    """Do not capture CUDA graphs (`vllm`, `sglang`)."""
    max_num_seqs: int = setting(1024, ge=1)
    """Sequences that the engine runs at once."""
    load_format: str = setting("auto")
    """How the engine finds its weights (`vllm`, `sglang`)."""
    skip_tokenizer_init: bool = setting(False, hint=TOKENS_ONLY)
    """Exchange token ids only."""
