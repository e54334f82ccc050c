"""Configuration of the rollout: sampling settings and engine."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from verl.base.engine_python import engine_python
from verl.base.registry import suggest
from verl.config.agent import SINGLE_TURN, AgentLoopConfig, MultiTurnConfig
from verl.config.base import BaseConfig, OneOrMany, section, setting, subsection
from verl.config.machine import DTYPE
from verl.config.model import DType
from verl.config.observation import PrometheusConfig, TraceConfig
from verl.config.problems import Problem

SERVER_ENGINES = ("vllm", "sglang")
"""Engines that need the package of the same name, in this environment or another."""
GRAPH_SIZES = tuple(sorted({2**k for k in range(11)} | {3 * 2**k for k in range(9)}))
"""Numbers of rows for which `native` records CUDA graphs: 1, 2, 3, 4, 6, 8 ... 768, 1024; at most a third is unused."""
MAX_GRAPHS = 32
"""CUDA graphs that `native` keeps."""

IN_PROCESS_ENGINES = ("native", "hf")
"""Engines inside the worker's process."""

EngineName = Literal["native", "hf", "vllm", "sglang", "trtllm"]
WeightFormatName = Literal["fp8", "int8"]
NO_OTHER_ENGINE = "this engine is not in this version; use native, vllm or sglang"
LOWEST_TEMPERATURE = 1e-5
"""Lowest temperature that engines sample with; vLLM takes less for greedy."""

TRANSFERS = ("naive", "nccl", "shared_memory")
"""Transfers of weights to rollout ranks apart from the trainer's."""
_OTHER_TRANSFERS = {
    "hccl": "Ascend devices are not in this version; use nccl",
    "nixl": "transfers by NIXL (RDMA) are not in this version; use nccl",
    "mooncake": "transfers by Mooncake (RDMA) are not in this version; use nccl",
    "delta_sharded": "transfers of changed elements alone are not in this version; use nccl, which sends all of them",
    "kimi_ckpt_engine": "Kimi's checkpoint engine is not in this version; use nccl, or naive on one machine",
}

VLLM_TIES = 15
"""Most tokens beyond `top_k` that are stored with `keep_sampling_mask` where vLLM keeps equally likely ones."""
NO_LOGITS = "logits are not log-probs, and nothing here can train on them; use processed_logprobs"


@section
class SamplingConfig(BaseConfig):
    """Sampling settings of validation."""

    hydra_target: ClassVar[str] = "verl.workers.config.SamplingConfig"

    temperature: float = setting(0, ge=0)
    """Divisor of the logits; 0 is greedy."""
    top_k: int = setting(-1, ge=-1)
    """Sample from this many most likely tokens; -1 or 0 for all."""
    top_p: float = setting(1.0, gt=0, le=1)
    """Sample from the fewest tokens whose probabilities sum to at least this."""
    min_p: float = setting(0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the largest probability; 0 keeps all."""
    do_sample: bool = setting(False)
    """Sample; false uses the most likely token whatever `temperature` says."""
    n: int = setting(1, ge=1)
    """Responses per prompt."""
    stop: Annotated[tuple[str, ...] | None, OneOrMany] = setting(None)
    """Texts that end a response; null uses those of training."""
    stop_token_ids: tuple[int, ...] | None = setting(None)
    """Tokens that end a response besides EOS; null uses those of training."""
    max_tokens: int | None = setting(None, ge=1)
    """Maximum length of a response in tokens, at most `data.max_response_length`; null uses that."""

    def problems(self, path: str) -> Iterator[Problem]:
        """The sampling settings of validation are consistent."""
        yield from sampling_problems(path, self)


@section
class CheckpointEngineConfig(BaseConfig):
    """Transfer of new weights to the rollout engine."""

    hydra_target: ClassVar[str] = "verl.workers.config.CheckpointEngineConfig"

    backend: str = setting("naive", refuse_values=_OTHER_TRANSFERS)
    """Transfer to rollout ranks apart from the trainer's: `naive` by shared memory if all are on one machine and else
    by broadcast; `nccl` by broadcast (NCCL between GPUs, gloo between CPUs); `shared_memory`; or a name that
    `custom_backend_module` registers."""
    update_weights_bucket_megabytes: int = setting(2048, ge=1)
    """Size of one part of a transfer, in MiB."""
    engine_kwargs: dict[str, Any] = setting(factory=dict)
    """Further arguments, by name of the backend."""
    custom_backend_module: str | None = setting(None)
    """Module or file with a backend of your own, registered by `verl.workers.transfer.register_transfer`."""

    def problems(self, path: str) -> Iterator[Problem]:
        """The backend is a known one, or a module registers it."""
        if self.backend not in TRANSFERS and self.custom_backend_module is None:
            cause = f"no backend has this name.{suggest(self.backend, TRANSFERS)}"
            remedy = f"name the module that registers it in {path}.custom_backend_module"
            yield Problem(f"{path}.backend", self.backend, cause, ", ".join(TRANSFERS), remedy)
        for name, arguments in self.engine_kwargs.items():
            key = f"{path}.engine_kwargs.{name}"
            if arguments is not None and not isinstance(arguments, Mapping):
                cause = "a backend takes arguments by name"
                yield Problem(key, arguments, cause, remedy=f"set {key}.NAME=VALUE")


def _per_engine() -> dict[str, object]:
    return {"vllm": {}, "sglang": {}, "trtllm": {}}


@section
class RolloutConfig(BaseConfig):
    """Sampling of training responses, and the rollout engine."""

    hydra_target: ClassVar[str] = "verl.workers.config.RolloutConfig"

    name: EngineName = setting("native", refuse_values={"trtllm": NO_OTHER_ENGINE})
    """Rollout engine: `native` is verl's own, in the trainer's process on its weights; `hf` a plain loop around
    Transformers. If a command names none, a GPU run uses `vllm` if it is installed."""
    mode: Literal["sync", "async"] = setting("async")
    """No effect: `vllm` and `sglang` always run as servers, `native` and `hf` inside the worker's process."""
    temperature: float = setting(1.0, ge=0)
    """Divisor of the logits; log-probs are those of the divided logits."""
    top_k: int = setting(-1, ge=-1)
    """Sample from this many most likely tokens; -1 or 0 for all."""
    top_p: float = setting(1, gt=0, le=1)
    """Sample from the fewest tokens whose probabilities sum to at least this."""
    min_p: float = setting(0.0, ge=0, le=1)
    """Sample from tokens with at least this share of the largest probability; 0 keeps all."""
    do_sample: bool = setting(True)
    """Sample; false uses the most likely token."""
    n: int = setting(1, ge=1)
    """Responses per prompt."""
    seed: int = setting(1, ge=0, interpolation="${oc.select:trainer.seed,1}")
    """Seed of sampling, as in `trainer.seed`; each response has its own, by step, prompt and index in the group."""
    prompt_length: int = setting(512, ge=1, interpolation="${oc.select:data.max_prompt_length,512}")
    """Maximum length of a prompt, in tokens."""
    response_length: int = setting(512, ge=1, interpolation="${oc.select:data.max_response_length,512}")
    """Maximum length of a response, in tokens."""
    stop: Annotated[tuple[str, ...], OneOrMany] = setting(())
    """Texts that end a response."""
    stop_token_ids: tuple[int, ...] = setting(())
    """Tokens that end a response besides EOS."""
    ignore_eos: bool = setting(False)
    """Continue after EOS, up to the maximum length."""
    dtype: DType = setting("bfloat16", interpolation=DTYPE)
    """Precision of the weights inside the engine; by default bfloat16 on GPUs and float32 on a CPU."""
    gpu_memory_utilization: float = setting(0.5, gt=0, le=1)
    """Fraction of a GPU's memory that the engine may use; with `native`, fraction of the free memory (also on a CPU)
    for the KV cache."""
    enforce_eager: bool = setting(False)
    """Do not capture CUDA graphs (`vllm`, `sglang`, and `native` on a GPU)."""
    cudagraph_capture_sizes: tuple[int, ...] | None = setting(None)
    """Batch sizes for which CUDA graphs are captured (`vllm`, `sglang`, `native`). null lets the engine choose; an
    empty list turns them off in `native`, whose choice is 1, 2, 3, 4, 6, 8 ... 1024 for dense models of text."""
    enable_rollout_routing_replay: bool = setting(False)
    """Return the experts chosen for each token, for `actor.router_replay.mode=R3` (`native`, `hf`)."""
    free_cache_engine: bool = setting(True)
    """Free the engine's memory during training; it receives the weights again for the next rollout."""
    data_parallel_size: int = setting(1, ge=1)
    """Copies of all but the experts, whose ranks share the experts (`vllm`, with `expert_parallel_size` of as many
    ranks). Without such experts each copy is an engine of its own, and there are as many as the ranks allow."""
    expert_parallel_size: int = setting(1, ge=1)
    """Ranks that split the experts of one layer (`vllm`, `sglang`); other engines allow only 1."""
    tensor_model_parallel_size: int = setting(2, ge=1)
    """Ranks that split each layer; times the pipeline stages it must divide the ranks per node, or be those of several
    nodes. `native` and `hf` allow only 1. If unset: 1 with `native` and `hf`, and if 2 does not divide the ranks."""
    max_num_batched_tokens: int = setting(8192, ge=1)
    """Maximum number of tokens that the engine computes in one pass (`native` and `hf`: prompt tokens)."""
    max_model_len: int | None = setting(None, ge=1)
    """Maximum length of prompt and response together, in tokens; null uses the sum of both limits."""
    max_num_seqs: int = setting(256, ge=1)
    """Sequences that the engine runs at once."""
    load_format: str = setting("dummy")
    """Source of the engine's first weights: `dummy` waits for the trainer's (`vllm`, `sglang`)."""
    merge_adapters: bool = setting(True)
    """Merge LoRA adapters into the weights that the engine receives; false sends the base weights once and then only
    adapters, which the engine applies (`vllm`, `sglang`). `native` and `hf` merge in fp32 alone."""
    limit_images: int | None = setting(None, ge=0)
    """Maximum number of images in one prompt (`vllm`); in a video of Qwen3-VL every two frames count as one."""
    enable_chunked_prefill: bool = setting(True)
    """Process long prompts in several passes (`vllm`, `sglang`)."""
    enable_prefix_caching: bool = setting(True)
    """Compute common prefixes of prompts only once (`vllm`, `sglang`); with `native`, prefixes of requests that arrive
    one by one, such as the turns of a conversation, within the memory that `gpu_memory_utilization` allows."""
    disable_log_stats: bool = setting(True)
    """Leave statistics out of the engine's log (`vllm`, `sglang`); vLLM still counts for `prometheus.enable`."""
    pipeline_model_parallel_size: int = setting(1, ge=1)
    """Pipeline stages of one copy of the model (`vllm`); other engines allow only 1."""
    quantization: WeightFormatName | None = setting(None)
    """Round the weights of linear layers to 8 bits at each update (`native`; `vllm`: `fp8` on a GPU, and `int8`, which
    rounds inputs of layers, too); null keeps `dtype`. Training computes with exact weights: set
    `algorithm.rollout_correction.rollout_is=token`."""
    engine_kwargs: dict[str, Any] = setting(factory=_per_engine)
    """Further arguments, by engine; `vllm.python` and `sglang.python` name the interpreter of another environment that
    has the engine."""
    scheduling_policy: str = setting("fcfs")
    """Order in which the engine serves waiting requests (`vllm`, `sglang`)."""
    logprobs_mode: Literal["processed_logprobs", "raw_logprobs", "processed_logits", "raw_logits"] = setting(
        "processed_logprobs", refuse_values=dict.fromkeys(("processed_logits", "raw_logits"), NO_LOGITS)
    )
    """`processed_logprobs` are those of the sampled distribution: after temperature, min_p, top_k and top_p, summing to
    1 over the kept tokens; `raw_logprobs` those of the model's logits, before all of these."""
    keep_sampling_mask: bool = setting(False)
    """Train on the distribution that `top_k`, `top_p` and `min_p` sample from: log-probs of the policy and of the
    reference are normalised over the tokens that the rollout kept for each drawn token (DeepSeek-V3.2,
    arXiv:2512.02556). Their number is bounded by `top_k`; unset, it becomes `keep_sampling_mask_limit`."""
    keep_sampling_mask_limit: int = setting(64, ge=1)
    """Largest `top_k` with `keep_sampling_mask`: for each token of a response, padding included, that many ids are
    stored, 4 bytes each. `training/sampling_mask/full` is the share of drawn tokens for which `top_k` tokens were
    kept."""
    multi_stage_wake_up: bool = setting(False)
    """Allocate the memory of the KV cache only after the weights are updated (`vllm`, `sglang`); on by default where
    the trainer's weights leave the device while responses are sampled (`param_offload`)."""
    log_prob_micro_batch_size_per_gpu: int | None = setting(None, ge=1)
    """Sequences per pass on one rank when the trainer computes the old log-probs; null uses the actor's
    `ppo_micro_batch_size_per_gpu`."""
    log_prob_use_dynamic_bsz: bool = setting(
        False, interpolation="${oc.select:actor_rollout_ref.actor.use_dynamic_bsz,false}"
    )
    """Fill those micro-batches by tokens instead of by sequences."""
    log_prob_max_token_len_per_gpu: int = setting(
        16384, ge=1, interpolation="${oc.select:actor_rollout_ref.actor.ppo_max_token_len_per_gpu,16384}"
    )
    """Tokens per pass on one rank, with `log_prob_use_dynamic_bsz`."""
    val_kwargs: SamplingConfig = subsection(SamplingConfig)
    """Sampling settings of validation."""
    checkpoint_engine: CheckpointEngineConfig = subsection(CheckpointEngineConfig)
    """Transfer of new weights to the engine."""
    nnodes: int = setting(0, ge=0)
    """Nodes of the pool of rollout engines, with `actor_rollout_ref.hybrid_engine=false`."""
    n_gpus_per_node: int = setting(8, ge=1, interpolation="${oc.select:trainer.n_gpus_per_node,8}")
    """Ranks on each of these nodes."""
    multi_turn: MultiTurnConfig = subsection(MultiTurnConfig)
    """Conversations of several turns, with tools and simulated users."""
    agent: AgentLoopConfig = subsection(AgentLoopConfig)
    """Agent loops: the programs that answer prompts."""
    prometheus: PrometheusConfig = subsection(PrometheusConfig)
    """Metrics of the run over HTTP, in the format of Prometheus."""
    trace: TraceConfig = subsection(TraceConfig)
    """Spans of each training trajectory, its turns and tool calls."""
    skip_rollout: bool = setting(False)
    """Train on the responses stored in `skip_dump_dir` instead of sampling; missing ones are sampled and stored there.
    For debugging: the responses are those of the run that wrote them, not of the current policy."""
    skip_dump_dir: str | None = setting(None, path=True)
    """Folder of these responses; null uses `rollouts` in `trainer.default_local_dir`."""

    @property
    def ranks(self) -> int:
        """Ranks of the pool of rollout engines; 0 where they run on those of the policy."""
        return self.nnodes * self.n_gpus_per_node

    @property
    def ranks_per_engine(self) -> int:
        """Ranks that share one engine."""
        ranks_per_copy = self.tensor_model_parallel_size * self.pipeline_model_parallel_size
        return ranks_per_copy * self.data_parallel_size if self.shares_experts else ranks_per_copy

    @property
    def shares_experts(self) -> bool:
        """True if the ranks of several copies of the model share its experts, so that these are one engine."""
        return self.data_parallel_size > 1 and self.expert_parallel_size > self.tensor_model_parallel_size

    @property
    def kept_ids_width(self) -> int:
        """Largest number of ids that `keep_sampling_mask` returns for a sampled token; 0 without it.

        vLLM keeps all tokens that are as likely as the last one of `top_k`, which are several where logits are in bf16.
        """
        if not self.keep_sampling_mask:
            return 0
        return self.top_k + (VLLM_TIES if self.name == "vllm" else 0)

    @property
    def default_agent_loop(self) -> str:
        """Name of the agent loop of prompts whose row names none."""
        named = self.agent.default_agent_loop
        return "tool_agent" if self.multi_turn.enable and named == SINGLE_TURN else named

    def problems(self, path: str) -> Iterator[Problem]:
        """The sampling settings of training are consistent, and the engine is installed."""
        yield from sampling_problems(path, self)
        for name, arguments in self.engine_kwargs.items():
            key = f"{path}.engine_kwargs.{name}"
            if name not in _per_engine():
                cause = f"no engine of that name takes arguments.{suggest(name, SERVER_ENGINES)}"
                yield Problem(key, arguments, cause, ", ".join(SERVER_ENGINES))
            elif arguments is not None and not isinstance(arguments, Mapping):
                yield Problem(key, arguments, "an engine takes arguments by name", remedy=f"set {key}.NAME=VALUE")
                return
        if self.name not in SERVER_ENGINES:
            return
        key = f"{path}.engine_kwargs.{self.name}.python"
        python = (self.engine_kwargs.get(self.name) or {}).get("python")
        if python is not None and not Path(str(python)).expanduser().is_file():
            allowed = "the interpreter of an environment that has the engine"
            yield Problem(key, python, "there is no such file", allowed)
        if python is None and engine_python(self.name) is None:
            remedy = f"install it (requirements/{self.name}.txt), or name the python of another environment that has "
            cause = f"the package {self.name} is not installed here, nor is there /opt/{self.name}/bin/python"
            yield Problem(f"{path}.name", self.name, cause, remedy=f"{remedy}it in {key}")
        if self.data_parallel_size != 1 and not self.shares_experts:
            cause = (
                "each copy is an engine of its own, as its ranks share no experts with others; there are as many "
                "engines as the ranks allow"
            )
            yield Problem(f"{path}.data_parallel_size", self.data_parallel_size, cause, "1", advice=True)
        yield from self._expert_problems(path)

    def _expert_problems(self, path: str) -> Iterator[Problem]:
        key, size, tensor = f"{path}.expert_parallel_size", self.expert_parallel_size, self.tensor_model_parallel_size
        together = tensor * self.data_parallel_size
        if self.shares_experts and self.name == "sglang":
            cause = f"{path}.name=sglang shares experts within one copy of the model alone"
            yield Problem(key, size, cause, _divisors(tensor), f"set {path}.name=vllm")
        elif self.name == "sglang" and tensor % size:
            cause = f"sglang divides the {tensor} ranks of {path}.tensor_model_parallel_size by it"
            yield Problem(key, size, cause, _divisors(tensor))
        elif self.name == "vllm" and size not in (1, tensor, together):
            cause = "vllm shares experts among all ranks that split layers, of one copy or of all copies"
            remedy = f"or set {path}.data_parallel_size={size // tensor}" if size % tensor == 0 else ""
            yield Problem(key, size, cause, ", ".join(map(str, sorted({1, tensor, together}))), remedy)


def _divisors(ranks: int) -> str:
    return ", ".join(str(size) for size in range(1, ranks + 1) if ranks % size == 0)


def sampling_problems(path: str, settings: RolloutConfig | SamplingConfig) -> Iterator[Problem]:
    """Report contradictions between temperature, number of responses and stops."""
    if settings.do_sample and settings.temperature == 0:
        remedy = f"set {path}.temperature=1.0, or {path}.do_sample=false for greedy responses"
        yield Problem(f"{path}.temperature", 0, "temperature 0 is greedy, but do_sample=true", "> 0", remedy)
    if 0 < settings.temperature < LOWEST_TEMPERATURE:
        remedy = f"set {path}.do_sample=false (and {path}.temperature=0) for greedy responses"
        cause = "logits divided by so little overflow, and what is sampled is the most likely token anyway"
        allowed = f"0, or >= {LOWEST_TEMPERATURE}"
        yield Problem(f"{path}.temperature", settings.temperature, cause, allowed, remedy)
    if not settings.do_sample and settings.n > 1:
        # Training on them would learn nothing; in validation they take time and change no number.
        yield replace(all_the_same(path, f"{path}.n", settings.n), advice=isinstance(settings, SamplingConfig))
    if "" in (settings.stop or ()):
        cause = "the empty text is in every response"
        yield Problem(f"{path}.stop", [*(settings.stop or ())], cause, "texts of some length")
    if any(token < 0 for token in settings.stop_token_ids or ()):
        key, allowed = f"{path}.stop_token_ids", "ids of the model's vocabulary"
        yield Problem(key, [*(settings.stop_token_ids or ())], "no token has such an id", allowed)


def all_the_same(path: str, key: str, n: int) -> Problem:
    """Make the problem of several greedy responses to one prompt, which would be equal."""
    cause = f"greedy responses of one prompt are all the same ({path}.do_sample=false)"
    return Problem(key, n, cause, "1", f"set {path}.do_sample=true and a temperature, or ask for one response")
