"""Plans of published runs: whether their layouts fit, how long a step takes, and which layout the plan suggests.

::

    python -m benchmarks.plan_published [--model Qwen2-7B]
    python -m benchmarks.plan_published --factors

The first group are runs of NeMo RL 0.4, 0.5 and 0.6 on H100 and GB200 in bf16, on policy, whose layouts, batches,
lengths and seconds per step are in its performance summaries; prompts and responses are together as long as its
average. Assumed are prompts of 256 tokens in the mean and 512 at most, passes that are packed up to the longest row,
recomputed layers, log-probs by policy and reference, and that optimizer and reference leave the device while others
work. The second are the smallest clusters that verl's page on resources names for GRPO, without lengths and layouts:
512 + 1,024 tokens and 128 prompts of 5 responses are assumed, with a KL loss. The third are layouts of DeepSeek-V3 that
verl's page on it recommends.

``--factors`` estimates ``ROLLOUT_FACTOR`` and ``PASS_FACTOR`` (:mod:`verl.plugins.plan.constants`) from four runs of
NeMo RL 0.3 whose seconds are published stage by stage, in place of the table: the geometric means of published over
computed seconds of rollouts, and of log-probs and updates. It applies them to the first group, each time without the
run of the same model, and prints how many steps are within 30 % of the published ones, and the 10 and 90 % quantiles of
published over planned seconds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from verl.plugins.plan import constants
from verl.plugins.plan.command import check_layouts, make_plan
from verl.plugins.plan.plan import Plan
from verl.plugins.plan.suggest import Suggestions, suggest

_ACTOR, _REF, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.ref", "actor_rollout_ref.rollout"
_GB = 1e9


def _fields(family: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, words: int, **more: object):
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": words, "head_dim": 128,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


_PROMPT, _LONGEST_PROMPT = 256, 512
"""Tokens of a prompt of NeMo RL's runs, assumed: one with 795 tokens in a response has 1,060 in all."""

_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, dict[str, object]] = {
    "Llama-3.1-8B": _fields("llama", 32, 4096, 14336, 32, 8, 128256),
    "Llama-3.1-70B": _fields("llama", 80, 8192, 28672, 64, 8, 128256),
    "Qwen3-32B": _fields("qwen3", 64, 5120, 25600, 64, 8, 151936),
    "Qwen3-30B-A3B": _fields("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, moe_intermediate_size=768, **_EXPERTS),
    "Qwen3-235B-A22B": _fields("qwen3_moe", 94, 4096, 12288, 64, 4, 151936, moe_intermediate_size=1536, **_EXPERTS),
    "Qwen2-7B": _fields("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5-14B": _fields("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "Qwen2.5-32B": _fields("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "Qwen2-72B": _fields("qwen2", 80, 8192, 29568, 64, 8, 152064),
    "DeepSeek-V3": _fields(
        "deepseek_v3",
        61,
        7168,
        18432,
        128,
        128,
        129280,
        moe_intermediate_size=2048,
        first_k_dense_replace=3,
        n_routed_experts=256,
        num_experts_per_tok=8,
        n_shared_experts=1,
        n_group=8,
        topk_group=4,
        q_lora_rank=1536,
        kv_lora_rank=512,
        qk_rope_head_dim=64,
        qk_nope_head_dim=128,
        v_head_dim=128,
    ),
}
"""Entries of each model's config.json."""


@dataclass(frozen=True)
class Published:
    """A run that was published.

    Attributes:
        model: key of :data:`MODELS`.
        gpu: kind of its GPUs.
        gpus: number of them.
        work: settings of batches and lengths.
        layout: its settings; empty if only back end and cluster were published.
        seconds: per step; 0 if they were not.
        source: who published it.
        stages: seconds of its rollout, of log-probs by policy and reference together, and of the update.
    """

    model: str
    gpu: str
    gpus: int
    work: tuple[str, ...]
    layout: tuple[str, ...] = ()
    seconds: float = 0.0
    source: str = "verl"
    stages: Mapping[str, float] = field(default_factory=dict)

    def words(self, folder: Path) -> list[str]:
        """The command line of its plan, without its layout; writes the model's config.json under ``folder``."""
        home = folder / self.model
        home.mkdir(exist_ok=True)
        (home / "config.json").write_text(json.dumps(MODELS[self.model]))
        return [
            f"actor_rollout_ref.model.path={home}",
            "algorithm.adv_estimator=grpo",
            f"{_ROLLOUT}.name=vllm",
            *("--gpu", self.gpu, "--gpus", str(self.gpus)),
            *self.work,
        ]


def _work(prompts: int, responses: int, mini_batch: int, longest: int, response: int) -> tuple[str, ...]:
    """``longest`` are tokens of a prompt and its response, ``response`` those of the mean response."""
    return (
        f"data.train_batch_size={prompts}", f"{_ROLLOUT}.n={responses}", f"{_ACTOR}.ppo_mini_batch_size={mini_batch}",
        f"data.max_prompt_length={_LONGEST_PROMPT}", f"data.max_response_length={longest - _LONGEST_PROMPT}",
        f"{_ACTOR}.use_kl_loss=true", f"{_ACTOR}.recompute_old_log_probs=always",
        *("--prompt_tokens", str(_PROMPT), "--response_tokens", str(response)),
    )  # fmt: skip


def _megatron(
    longest: int, rollout: int, tensor: int = 1, context: int = 1, expert: int = 1, pipeline: int = 1, last: int = 0
) -> tuple[str, ...]:
    section = f"{_ACTOR}.megatron"
    sizes = {"tensor": tensor, "context": context, "expert": expert, "pipeline": pipeline}
    named = {"expert": "expert_model", "tensor": "tensor_model", "pipeline": "pipeline_model", "context": "context"}
    words = [f"{section}.{named[name]}_parallel_size={size}" for name, size in sizes.items()]
    if expert > 1:
        words.append(f"{section}.expert_tensor_parallel_size=1")
    if pipeline in (4, 8) and expert > 1 and not last:  # 94 layers, embedding and head in 4 or 8 stages
        parts = ("embedding", "loss")
        words += [
            f"++{section}.override_transformer_config.account_for_{part}_in_pipeline_split=true" for part in parts
        ]
    if last:
        words.append(f"++{section}.override_transformer_config.num_layers_in_last_pipeline_stage={last}")
    return (
        "model_engine=megatron", *words, f"{section}.optimizer_offload=true",
        f"{_REF}.megatron.param_offload=true", f"{_ROLLOUT}.tensor_model_parallel_size={rollout}",
        f"{_ROLLOUT}.gpu_memory_utilization=0.6", f"{_ACTOR}.use_dynamic_bsz=true",
        f"{_ACTOR}.ppo_max_token_len_per_gpu={longest // context}",
    )  # fmt: skip


_SMALL = (
    "data.train_batch_size=128", f"{_ROLLOUT}.n=5", f"{_ACTOR}.ppo_mini_batch_size=128", f"{_ACTOR}.use_kl_loss=true",
    "data.max_prompt_length=512", "data.max_response_length=1024",
)  # fmt: skip
_FSDP, _MEGATRON = f"{_ACTOR}.strategy=fsdp2", "model_engine=megatron"


_LLAMA, _MIXTURE, _DENSE = "Llama-3.1-8B", "Qwen3-30B-A3B", "Qwen3-32B"
_LARGE, _DEEPSEEK = "Qwen3-235B-A22B", "DeepSeek-V3"


def _nemo(
    version: str, gpu: str, model: str, gpus: int, mean: int, layout: tuple[int, ...], seconds: float
) -> Published:
    """A row of NeMo RL's summary; ``layout`` has its rollout TP, then TP, CP, EP and PP."""
    longest = {_DEEPSEEK: 1536, _LARGE: 8192}.get(model, 4096)
    rollout, tensor, context, expert, pipeline = layout
    last = {8: 5, 16: 1}[pipeline] if model == _DEEPSEEK else 0  # of 61 layers
    words = _megatron(longest, rollout, tensor, context, expert, pipeline, last)
    if gpu == "gb200":
        words = (*words, "trainer.n_gpus_per_node=4")
    work = _work(64 if longest == 4096 else 16, 32, 16, longest, mean - _PROMPT)
    return Published(model, gpu, gpus, work, words, seconds, f"NeMo RL {version}")


def _staged(
    model: str, gpus: int, response: int, layout: tuple[int, ...], stages: tuple[float, ...], seconds: float
) -> Published:
    """A row of NeMo RL 0.3, without recomputed layers; ``layout`` has rollout TP, then TP, EP and PP."""
    rollout, tensor, expert, pipeline = layout
    words = _megatron(4096, rollout, tensor, 1, expert, pipeline)
    words = (*words, "actor_rollout_ref.model.enable_gradient_checkpointing=false")
    of_stages: dict[str, float] = dict(zip(("rollout", "log-probs", "update"), stages, strict=True))
    return Published(model, "h100", gpus, _work(64, 32, 16, 4096, response), words, seconds, "NeMo RL 0.3", of_stages)


STAGED: tuple[Published, ...] = (
    _staged(_LLAMA, 8, 795, (1, 1, 1, 1), (58, 18, 28), 112),
    _staged("Llama-3.1-70B", 64, 398, (4, 4, 1, 4), (84, 18, 28), 147),
    _staged(_DENSE, 64, 3283, (4, 4, 1, 2), (96, 40, 68), 213),
    _staged(_MIXTURE, 64, 3251, (4, 2, 8, 1), (78, 23, 50), 167),
)
"""Runs whose stages were published; sizes of the last two rollouts were not, and are those of the first group."""


RUNS: tuple[Published, ...] = (
    _nemo("0.4", "h100", _LLAMA, 16, 1060, (1, 1, 1, 1, 2), 97.7),
    _nemo("0.4", "h100", _MIXTURE, 32, 3154, (4, 2, 1, 8, 1), 225),
    _nemo("0.4", "h100", _DENSE, 32, 3206, (4, 4, 1, 1, 4), 393),
    _nemo("0.4", "h100", _LARGE, 128, 5671, (16, 2, 2, 16, 8), 506),
    _nemo("0.4", "h100", _DEEPSEEK, 256, 745, (32, 1, 1, 16, 16), 154),
    _nemo("0.5", "h100", _LLAMA, 16, 1019, (1, 1, 1, 1, 2), 92.8),
    _nemo("0.5", "h100", _MIXTURE, 32, 3196, (2, 1, 1, 8, 1), 198),
    _nemo("0.5", "h100", _DENSE, 32, 3251, (4, 4, 1, 1, 4), 376),
    _nemo("0.5", "h100", _LARGE, 128, 5700, (16, 2, 2, 16, 8), 431),
    _nemo("0.5", "h100", _DEEPSEEK, 256, 744, (32, 1, 1, 16, 16), 134),
    _nemo("0.6", "h100", _MIXTURE, 32, 3203, (2, 1, 1, 8, 1), 192),
    _nemo("0.6", "h100", _LARGE, 128, 5698, (16, 2, 2, 16, 8), 395),
    _nemo("0.6", "h100", _LARGE, 256, 5713, (16, 2, 2, 16, 8), 312),
    _nemo("0.6", "h100", _DEEPSEEK, 256, 701, (32, 1, 1, 16, 16), 134),
    _nemo("0.6", "h100", _DEEPSEEK, 512, 697, (32, 1, 1, 16, 16), 111),
    _nemo("0.5", "gb200", _LLAMA, 8, 1066, (1, 1, 1, 1, 1), 91.0),
    _nemo("0.5", "gb200", _DENSE, 16, 3253, (1, 2, 1, 1, 1), 381),
    _nemo("0.6", "gb200", _MIXTURE, 16, 3199, (1, 1, 1, 16, 1), 221),
    _nemo("0.6", "gb200", _LARGE, 64, 5709, (8, 2, 2, 16, 4), 286),
    _nemo("0.6", "gb200", _LARGE, 128, 5693, (8, 2, 2, 16, 4), 345),
    _nemo("0.6", "gb200", _DEEPSEEK, 128, 711, (32, 1, 1, 16, 8), 108),
    _nemo("0.6", "gb200", _DEEPSEEK, 256, 700, (32, 1, 1, 16, 8), 98.7),
    Published("Qwen2-7B", "h800", 2, (*_SMALL, _FSDP)),
    Published("Qwen2.5-14B", "h800", 4, (*_SMALL, _FSDP)),
    Published("Qwen2.5-32B", "h20", 8, (*_SMALL, _MEGATRON)),
    Published("Qwen2-72B", "h20", 32, (*_SMALL, _FSDP)),
    Published("Qwen2-72B", "h800", 32, (*_SMALL, _FSDP)),
    Published("DeepSeek-V3", "h20", 256, _SMALL, _megatron(1536, 32, 8, 1, 8, 16, 1), source="verl"),
    Published("DeepSeek-V3", "h20", 512, _SMALL, _megatron(1536, 32, 1, 1, 32, 16, 1), source="verl"),
)  # fmt: skip


def suggestions(run: Published, folder: Path) -> Suggestions:
    """Return what the plan suggests for the model, the cluster and the work of a run."""
    plan, _, keys = make_plan(run.words(folder))
    return suggest(plan, keys, check_layouts)


def _row(run: Published, folder: Path) -> list[str]:
    row = [run.source, f"{run.model}, {run.gpus} {run.gpu.upper()}"]
    if run.layout:
        plan = plan_of(run, folder)
        check_layouts(plan)
        worst = max(stage.bytes for stage in plan.stages)
        fits = f"{worst / _GB:.0f} GB" + ("" if plan.excess <= 0 else ", does not fit")
        row += [fits, f"{plan.seconds:.0f} s (rollout {plan.stages[0].seconds:.0f})"]
        row.append(f"{run.seconds:g} s, {plan.seconds / run.seconds:.2f}" if run.seconds else "")
        return row
    found = suggestions(run, folder)
    if not found.layouts:
        return [*row, "none fits", "", ""]
    best = found.layouts[0]
    return [*row, f"suggested: {best}, {best.bytes / _GB:.0f} GB", f"{best.plan.seconds:.0f} s", ""]


def plan_of(run: Published, folder: Path) -> Plan:
    """Return the plan of a run with a layout; NeMo RL moves optimizers to memory of the host that is not pinned."""
    plan = make_plan([*run.words(folder), *run.layout])[0]
    is_pinned = not run.source.startswith("NeMo RL")
    return replace(plan, cluster=replace(plan.cluster, pins_host_memory=is_pinned))


def _operations(plan: Plan) -> tuple[float, dict[str, float]]:
    """Seconds of a step besides operations, and those of the operations of each stage that is published."""
    rollout, *passes = plan.stages
    of_passes = [stage.operation_seconds for stage in passes]
    operations = {"rollout": rollout.operation_seconds, "log-probs": sum(of_passes[:-1]), "update": of_passes[-1]}
    planned = Factors(constants.ROLLOUT_FACTOR, constants.PASS_FACTOR).seconds(0.0, operations)
    return plan.seconds - planned, operations


@dataclass(frozen=True)
class Factors:
    """By how much rollouts and passes take longer than their operations."""

    rollout: float
    passes: float

    @classmethod
    def of(cls, runs: Sequence[tuple[Published, Mapping[str, float]]]) -> Factors:
        """Estimate them from runs with published stages, and the seconds of their operations."""
        ratios = {
            name: [run.stages[name] / operations[name] for run, operations in runs]
            for name in ("rollout", "log-probs", "update")
        }
        passes = ratios["log-probs"] + ratios["update"]
        return cls(statistics.geometric_mean(ratios["rollout"]), statistics.geometric_mean(passes))

    def seconds(self, beside: float, operations: Mapping[str, float]) -> float:
        """Seconds of a step."""
        passes = operations["log-probs"] + operations["update"]
        return beside + self.rollout * operations["rollout"] + self.passes * passes


def show_factors(folder: Path) -> None:
    """Print the factors, and how well they describe runs of other models."""
    staged = [(run, _operations(plan_of(run, folder))[1]) for run in STAGED]
    for run, operations in staged:
        stages = (f"{name} {seconds / operations[name]:.2f}" for name, seconds in run.stages.items())
        print(f"{run.model}, {run.gpus} {run.gpu}: published / operations: {', '.join(stages)}")
    everything = Factors.of(staged)
    print(f"all four: rollout {everything.rollout:.2f}, passes {everything.passes:.2f}")
    ratios: list[float] = []
    without: list[float] = []
    for run in RUNS:
        if not run.seconds:
            continue
        beside, operations = _operations(plan_of(run, folder))
        factors = Factors.of([one for one in staged if one[0].model != run.model])
        ratios.append(factors.seconds(beside, operations) / run.seconds)
        without.append(Factors(1.0, 1.0).seconds(beside, operations) / run.seconds)
        print(f"{run.source} {run.model}, {run.gpus} {run.gpu}: planned / published {ratios[-1]:.2f}")
    for name, all_ratios in (("without the run of the same model", ratios), ("without factors", without)):
        within = sum(abs(ratio - 1) <= 0.3 for ratio in all_ratios)
        lowest, *_, highest = statistics.quantiles((1 / ratio for ratio in all_ratios), n=10)
        print(f"{name}: {within} of {len(all_ratios)} within 30 %; published / planned {lowest:.2f} to {highest:.2f}")


def main() -> None:
    """Print the table, or the factors."""
    parser = argparse.ArgumentParser(description="Compare the plans of published runs with their seconds, as a table.")
    parser.add_argument("--model", choices=MODELS, help="runs of this model alone")
    parser.add_argument("--factors", action="store_true", help="estimate the factors of rollouts and passes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if arguments.factors:
            show_factors(Path(folder))
            return
        print("| source | run | its layout | planned | published, and planned / published |\n|---|---|---|---|---|")
        for run in (*STAGED, *RUNS):
            if arguments.model not in (None, run.model):
                continue
            print("| " + " | ".join(_row(run, Path(folder))) + " |", flush=True)


if __name__ == "__main__":
    main()
