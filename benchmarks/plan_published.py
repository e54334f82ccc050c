"""Plans of published runs: whether their layouts fit, how long a step takes, and which layout the plan suggests.

::

    python -m benchmarks.plan_published [--model Qwen2-7B]

The first group are runs of NeMo RL 0.4 on H100, whose layouts, batches, lengths and seconds per step are in its
performance summary; prompts and responses are together as long as its average, and weights and optimizer leave the
device while others work. The second are the smallest clusters that verl's page on resources names for GRPO, without
lengths and layouts: 512 + 1,024 tokens and 128 prompts of 5 responses are assumed, with a KL loss.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import dataclass
from pathlib import Path

from verl.planner.suggest import Suggestions, suggest
from verl.trainer.plan import check_layouts, make_plan

_ACTOR, _ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
_GB = 1e9


def _fields(family: str, layers: int, hidden: int, inner: int, heads: int, kv_heads: int, words: int, **more: object):
    return {
        "model_type": family, "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
        "num_attention_heads": heads, "num_key_value_heads": kv_heads, "vocab_size": words, "head_dim": 128,
        "tie_word_embeddings": False, **more,
    }  # fmt: skip


_EXPERTS = {"num_experts": 128, "num_experts_per_tok": 8}
MODELS: dict[str, dict[str, object]] = {
    "Llama-3.1-8B": _fields("llama", 32, 4096, 14336, 32, 8, 128256),
    "Qwen3-32B": _fields("qwen3", 64, 5120, 25600, 64, 8, 151936),
    "Qwen3-30B-A3B": _fields("qwen3_moe", 48, 2048, 6144, 32, 4, 151936, moe_intermediate_size=768, **_EXPERTS),
    "Qwen3-235B-A22B": _fields("qwen3_moe", 94, 4096, 12288, 64, 4, 151936, moe_intermediate_size=1536, **_EXPERTS),
    "Qwen2-7B": _fields("qwen2", 28, 3584, 18944, 28, 4, 152064),
    "Qwen2.5-14B": _fields("qwen2", 48, 5120, 13824, 40, 8, 152064),
    "Qwen2.5-32B": _fields("qwen2", 64, 5120, 27648, 40, 8, 152064),
    "Qwen2-72B": _fields("qwen2", 80, 8192, 29568, 64, 8, 152064),
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
    """

    model: str
    gpu: str
    gpus: int
    work: tuple[str, ...]
    layout: tuple[str, ...] = ()
    seconds: float = 0.0

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


def _work(prompts: int, responses: int, mini_batch: int, longest: int, mean: int) -> tuple[str, ...]:
    prompt = 256  # of the mean length; prompts are at most 1,024 tokens
    return (
        f"data.train_batch_size={prompts}", f"{_ROLLOUT}.n={responses}", f"{_ACTOR}.ppo_mini_batch_size={mini_batch}",
        "data.max_prompt_length=1024", f"data.max_response_length={longest - 1024}",
        *("--prompt_tokens", str(prompt), "--response_tokens", str(mean - prompt)),
    )  # fmt: skip


def _megatron(rollout: int, tensor: int = 1, context: int = 1, expert: int = 1, pipeline: int = 1) -> tuple[str, ...]:
    section = f"{_ACTOR}.megatron"
    sizes = {"tensor": tensor, "context": context, "expert": expert, "pipeline": pipeline}
    named = {"expert": "expert_model", "tensor": "tensor_model", "pipeline": "pipeline_model", "context": "context"}
    words = [f"{section}.{named[name]}_parallel_size={size}" for name, size in sizes.items()]
    if expert > 1:
        words.append(f"{section}.expert_tensor_parallel_size=1")
    if pipeline == 8:  # 94 layers, embedding and head in 8 stages of 12
        parts = ("embedding", "loss")
        words += [
            f"++{section}.override_transformer_config.account_for_{part}_in_pipeline_split=true" for part in parts
        ]
    return (
        "model_engine=megatron", *words, f"{section}.optimizer_offload=true", f"{section}.param_offload=true",
        f"{_ROLLOUT}.tensor_model_parallel_size={rollout}", f"{_ROLLOUT}.gpu_memory_utilization=0.6",
        f"{_ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{_ROLLOUT}.log_prob_micro_batch_size_per_gpu=1",
    )  # fmt: skip


_SMALL = (
    "data.train_batch_size=128", f"{_ROLLOUT}.n=5", f"{_ACTOR}.ppo_mini_batch_size=128", f"{_ACTOR}.use_kl_loss=true",
    "data.max_prompt_length=512", "data.max_response_length=1024",
)  # fmt: skip
_FSDP, _MEGATRON = f"{_ACTOR}.strategy=fsdp2", "model_engine=megatron"

RUNS: tuple[Published, ...] = (
    Published("Llama-3.1-8B", "h100", 16, _work(64, 32, 16, 4096, 1060), _megatron(1, pipeline=2), 97.7),
    Published("Qwen3-30B-A3B", "h100", 32, _work(64, 32, 16, 4096, 3154), _megatron(4, tensor=2, expert=8), 225),
    Published("Qwen3-32B", "h100", 32, _work(64, 32, 16, 4096, 3206), _megatron(4, tensor=4, pipeline=4), 393),
    Published(
        "Qwen3-235B-A22B", "h100", 128, _work(16, 32, 16, 8192, 5671),
        _megatron(16, tensor=2, context=2, expert=16, pipeline=8), 506,
    ),
    Published("Qwen2-7B", "h800", 2, (*_SMALL, _FSDP)),
    Published("Qwen2.5-14B", "h800", 4, (*_SMALL, _FSDP)),
    Published("Qwen2.5-32B", "h20", 8, (*_SMALL, _MEGATRON)),
    Published("Qwen2-72B", "h20", 32, (*_SMALL, _FSDP)),
    Published("Qwen2-72B", "h800", 32, (*_SMALL, _FSDP)),
)  # fmt: skip


def suggestions(run: Published, folder: Path) -> Suggestions:
    """Return what the plan suggests for the model, the cluster and the work of a run."""
    plan, _, keys = make_plan(run.words(folder))
    return suggest(plan, keys, check_layouts)


def _row(run: Published, folder: Path) -> list[str]:
    row = [f"{run.model}, {run.gpus} {run.gpu.upper()}"]
    if run.layout:
        plan, _, _ = make_plan([*run.words(folder), *run.layout])
        check_layouts(plan)
        worst = max(stage.bytes for stage in plan.stages)
        fits = f"{worst / _GB:.0f} GB" + ("" if plan.excess <= 0 else ", does not fit")
        row += [fits, f"{run.seconds:g} s", f"{plan.seconds:.0f} s"]
    else:
        row += ["", "", ""]
    found = suggestions(run, folder)
    if not found.layouts:
        return [*row, "none fits", ""]
    best = found.layouts[0]
    return [*row, str(best), f"{best.plan.seconds:.0f} s, {best.bytes / _GB:.0f} GB"]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Compare the plans of published runs with their seconds, as a table.")
    parser.add_argument("--model", choices=MODELS, help="runs of this model alone")
    model = parser.parse_args().model
    print("| published run | its layout | its step | planned | suggested | planned |\n|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as folder:
        for run in RUNS:
            if model not in (None, run.model):
                continue
            print("| " + " | ".join(_row(run, Path(folder))) + " |", flush=True)


if __name__ == "__main__":
    main()
