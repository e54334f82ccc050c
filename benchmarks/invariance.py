"""Do ranks, controllers, packing and micro-batches change any number? A table of the largest differences.

Trains the same three steps in every layout, each through ``python -m verl.trainer.main_ppo``, and
compares every logged metric with that of the first layout. ::

    python -m benchmarks.invariance [--output_dir outputs/invariance] [--estimator grpo|gae] [--megatron | --experts]
    python -m benchmarks.invariance --images --lora    # each also with --megatron
    python -m benchmarks.invariance --latent    # or --heads: a DeepSeek-V3 under strategy=megatron
    python -m benchmarks.invariance --veomni    # strategy=veomni, which needs an environment of its own
    python -m benchmarks.invariance --teacher reverse_kl    # or another loss of distillation
    python -m benchmarks.invariance --steps 1 --layouts local    # the layouts of one process, in about a minute
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shlex
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
STEPS = 3
# Differences are relative to the larger value, but never to less than this: a policy loss of 1e-9
# is a sum of cancelling terms of size one, and its last digits are no statement about anything.
FLOOR = 1e-2
# Means of differences between two nearly equal log-probs: the gap between rollout and trainer, and the KL of one
# update; the mean of whitened advantages, zero by construction; and explained variance, one minus a ratio near one. The
# smallest and the largest divergence of one token are such differences too.
# Their terms are of size one and rounded in fp32, so they are compared on that scale.
ROUNDING = ("training/rollout_", "rollout_corr/", "actor/ppo_kl", "critic/advantages/mean", "critic/vf_explained_var")
ROUNDING += ("distillation/loss_max", "distillation/loss_min")

NOT_STARTED = "The current node timed out during startup"
"""Ray gives its processes 30 seconds, which a machine that computes other things may need; then we try again."""

MEGATRON = [
    "trainer.controller=ray",
    "actor_rollout_ref.actor.strategy=megatron",
    "critic.strategy=megatron",
    "actor_rollout_ref.actor.megatron.dtype=float32",
    "actor_rollout_ref.ref.megatron.dtype=float32",
    "critic.megatron.dtype=float32",
]


def megatron(
    ranks: int,
    tensor: int = 1,
    pipeline: int = 1,
    expert: int = 1,
    context: int = 1,
    pieces: int | None = None,
    expert_tensor: int = 1,
    stages: str | None = None,
) -> list[str]:
    """The settings of a layout of ranks; reference and critic follow the actor.

    Experts are whole on one rank unless `expert_tensor` ranks divide them. `stages` is a
    `pipeline_model_parallel_layout`.
    """
    sizes = {"tensor_model_parallel_size": tensor, "pipeline_model_parallel_size": pipeline}
    sizes["context_parallel_size"] = context
    if expert > 1 or expert_tensor > 1:
        sizes |= {"expert_model_parallel_size": expert, "expert_tensor_parallel_size": expert_tensor}
    if pieces is not None:
        sizes["virtual_pipeline_model_parallel_size"] = pieces
    keys = [f"actor_rollout_ref.actor.megatron.{name}={size}" for name, size in sizes.items()]
    if stages is not None:
        key = "megatron.override_transformer_config.pipeline_model_parallel_layout"
        keys += [f"+{section}.{key}='{stages}'" for section in ("actor_rollout_ref.actor", "actor_rollout_ref.ref")]
        keys.append(f"+critic.{key}='{stages}'")
    return [*MEGATRON, f"trainer.n_gpus_per_node={ranks}", f"ray_kwargs.ray_init.num_cpus={max(2, ranks)}", *keys]


MEGATRON_LAYOUTS = {
    "Megatron, 1 rank": megatron(1),
    "Megatron, 2 ranks, 2 copies": megatron(2),
    "Megatron, TP 2": megatron(2, tensor=2),
    "Megatron, PP 2": megatron(2, pipeline=2),
    "Megatron, PP 2, two pieces each": megatron(2, pipeline=2, pieces=2),
    "Megatron, PP 2, three layers and one": megatron(2, pipeline=2, stages="Ettt|tL"),
    "Megatron, CP 2": megatron(2, context=2),
    "Megatron, TP 2 x PP 2": megatron(4, tensor=2, pipeline=2),
    "Megatron, TP 2 x CP 2": megatron(4, tensor=2, context=2),
    "Megatron, TP 2, 2 copies": megatron(4, tensor=2),
    "Megatron, actor TP 2, reference CP 2, critic PP 2": [
        *megatron(2, tensor=2),
        *(
            "actor_rollout_ref.ref.megatron.tensor_model_parallel_size=1",
            "critic.megatron.tensor_model_parallel_size=1",
        ),
        *("actor_rollout_ref.ref.megatron.context_parallel_size=2", "critic.megatron.pipeline_model_parallel_size=2"),
    ],
}
"""With --megatron, which needs megatron-core (the extra `megatron`)."""

EXPERT_LAYOUTS = {
    "ray, 2 ranks": ["trainer.controller=ray", "trainer.n_gpus_per_node=2"],
    "Megatron, 1 rank": megatron(1),
    "Megatron, 2 copies": megatron(2),
    "Megatron, EP 2": megatron(2, expert=2),
    "Megatron, TP 2": megatron(2, tensor=2),
    "Megatron, TP 2, EP 2": megatron(2, tensor=2, expert=2),
    "Megatron, PP 2": megatron(2, pipeline=2),
    "Megatron, EP 2 x PP 2": megatron(4, pipeline=2, expert=2),
    "Megatron, 2 copies, expert TP 2": megatron(2, expert_tensor=2),
    "Megatron, TP 2, EP 2 x expert TP 2": megatron(4, tensor=2, expert=2, expert_tensor=2),
}
"""With --experts: a Qwen3-MoE."""

LATENT_LAYOUTS = {
    "Megatron, 1 rank": megatron(1),
    "Megatron, TP 2, EP 2": megatron(2, tensor=2, expert=2),
    "Megatron, PP 2": megatron(2, pipeline=2),
    "Megatron, CP 2": megatron(2, context=2),
}
"""With --latent and --heads: a DeepSeek-V3."""

VEOMNI = ["actor_rollout_ref.actor.strategy=veomni", "critic.strategy=veomni"]
VEOMNI_LAYOUTS = {
    "VeOmni, 1 rank": ["trainer.controller=ray", *VEOMNI],
    "VeOmni, 2 ranks": ["trainer.controller=ray", "trainer.n_gpus_per_node=2", *VEOMNI],
}
"""With --veomni, which needs the extra `veomni` and a Transformers that VeOmni takes."""

HEADS = [f"actor_rollout_ref.model.mtp.{key}=true" for key in ("enable", "enable_train")]
"""With --heads: one head of multi-token prediction is trained. FSDP trains none, so the first layout is Megatron's."""

DIVIDED = [
    "actor_rollout_ref.actor.fsdp_config.tensor_parallel_size=2",
    "actor_rollout_ref.ref.fsdp_config.tensor_parallel_size=2",
    "critic.model.fsdp_config.tensor_parallel_size=2",
]
"""Matrices divided over two ranks under FSDP."""

LAYOUTS: dict[str, list[str]] = {
    "local, 1 rank, packed, micro-batch 8": ["trainer.controller=local"],
    "ray, 1 rank, packed, micro-batch 8": ["trainer.controller=ray"],
    "ray, 2 ranks, packed, micro-batch 8": ["trainer.controller=ray", "trainer.n_gpus_per_node=2"],
    "ray, 2 ranks, padded, micro-batch 1": [
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.model.use_remove_padding=false",
        "critic.model.use_remove_padding=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ],
    "ray, Ulysses 2, packed, micro-batch 8": [
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
    ],
    "ray, Ulysses 2, padded, micro-batch 1": [
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
        "actor_rollout_ref.model.use_remove_padding=false",
        "critic.model.use_remove_padding=false",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ],
    "ray, FSDP 4": ["trainer.controller=ray", "trainer.n_gpus_per_node=4", "ray_kwargs.ray_init.num_cpus=4"],
    "ray, FSDP 2, two copies": [
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_cpus=4",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.ref.fsdp_config.fsdp_size=2",
        "critic.model.fsdp_config.fsdp_size=2",
    ],
    "ray, FSDP 2 x Ulysses 2": [
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_cpus=4",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.ref.fsdp_config.fsdp_size=2",
        "critic.model.fsdp_config.fsdp_size=2",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=2",
        "critic.ulysses_sequence_parallel_size=2",
    ],
    "ray, TP 2": ["trainer.controller=ray", "trainer.n_gpus_per_node=2", *DIVIDED],
    "ray, FSDP 2 x TP 2": [
        "trainer.controller=ray",
        "trainer.n_gpus_per_node=4",
        "ray_kwargs.ray_init.num_cpus=4",
        *DIVIDED,
    ],
    "local, 1 rank, padded, micro-batch 8": [
        "trainer.controller=local",
        "actor_rollout_ref.model.use_remove_padding=false",
        "critic.model.use_remove_padding=false",
    ],
    "local, 1 rank, packed, micro-batch 1": [
        "trainer.controller=local",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=1",
        "critic.ppo_micro_batch_size_per_gpu=1",
    ],
    "local, 1 rank, packed, token budget 256": [
        "trainer.controller=local",
        "actor_rollout_ref.actor.use_dynamic_bsz=true",
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=256",
        "critic.ppo_max_token_len_per_gpu=256",
    ],
}

LORA = [
    *(f"{name}.model.{key}" for name in ("actor_rollout_ref", "critic") for key in ("lora_rank=4", "lora_alpha=8")),
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "critic.optim.lr=1e-3",
]
"""With --lora. Adapters begin at zero and learn at larger steps."""

COMMON = [
    "data.train_batch_size=16",
    "data.max_prompt_length=96",
    "data.max_response_length=24",
    "data.dataloader_num_workers=0",
    "actor_rollout_ref.actor.ppo_mini_batch_size=8",
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.actor.optim.lr=1e-4",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "actor_rollout_ref.actor.entropy_coeff=0.01",
    "actor_rollout_ref.actor.fsdp_config.dtype=float32",
    "actor_rollout_ref.ref.fsdp_config.dtype=float32",
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.n=4",
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=8",
    "actor_rollout_ref.rollout.dtype=float32",
    "critic.ppo_micro_batch_size_per_gpu=8",
    "critic.optim.lr=1e-4",
    "critic.model.fsdp_config.dtype=float32",
    "trainer.device=cpu",
    "trainer.n_gpus_per_node=1",
    "trainer.logger=[file]",
    "trainer.val_before_train=false",
    "trainer.resume_mode=disable",
    "trainer.project_name=invariance",
]


REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info):
    return sum(c.isdigit() for c in solution_str) / max(len(solution_str), 1)
"""
"""A random model never solves a problem; the share of digits in a response is a reward that it can earn."""


def make_inputs(folder: Path) -> Path:
    """A random tiny model, a few countdown prompts, a reward function."""
    sizes = ["--train_size=64", "--test_size=16", "--sft_size=64"]
    script = str(ROOT / "examples/quickstart/make_task.py")
    subprocess.run([sys.executable, script, f"--output_dir={folder}", *sizes], check=True)
    (folder / "reward.py").write_text(REWARD)
    return folder


def make_mixture(task: Path) -> Path:
    """A Qwen3-MoE of the size of the tiny model, with random weights."""
    import torch
    from transformers import AutoConfig, AutoTokenizer, Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(1)
    dense = AutoConfig.from_pretrained(task / "model").to_dict()
    kept = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim")
    kept += ("max_position_embeddings", "tie_word_embeddings", "pad_token_id", "eos_token_id", "bos_token_id")
    config = Qwen3MoeConfig(
        **{key: dense[key] for key in kept},
        num_experts=8,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        norm_topk_prob=True,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(task / "mixture")
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(task / "mixture")
    return task / "mixture"


def make_latent(task: Path, heads: int) -> Path:
    """A DeepSeek-V3 with random weights: latent attention, groups of experts, heads of multi-token prediction."""
    from transformers import AutoConfig, AutoTokenizer

    from tests.plugins.megatron.heads import add_heads
    from verl.testing.models import tiny_model_dir

    config = AutoConfig.from_pretrained(task / "model")
    ids = {key: getattr(config, key) for key in ("pad_token_id", "eos_token_id", "bos_token_id")}
    sizes: dict[str, object] = {"vocab": config.vocab_size, "num_hidden_layers": 4, "num_nextn_predict_layers": heads}
    folder = Path(tiny_model_dir(task / "latent", "deepseek_v3", **sizes, **ids))  # type: ignore[arg-type]
    if heads:
        add_heads(str(folder), heads)
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(folder)
    return folder


def make_teacher(task: Path) -> Path:
    """A model like the tiny one, with other and larger random weights: it prefers some tokens."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    torch.manual_seed(2)
    config = AutoConfig.from_pretrained(task / "model", initializer_range=0.2)
    AutoModelForCausalLM.from_config(config).save_pretrained(task / "teacher")
    AutoTokenizer.from_pretrained(task / "model").save_pretrained(task / "teacher")
    return task / "teacher"


def make_pictures(task: Path, layers: int) -> tuple[Path, list[Path]]:
    """A tiny Qwen2.5-VL with random weights, and files of rows with a picture and, every third, without one."""
    from tests.support.vision_models import picture_rows, tiny_vision_model_dir, write_parquet

    files = [task / "pictures_train.parquet", task / "pictures_test.parquet"]
    for file, count in zip(files, (64, 16), strict=True):
        write_parquet(file, picture_rows(count, text_every=3))
    return Path(tiny_vision_model_dir(task / "seeing", "qwen2_5_vl", num_hidden_layers=layers)), files


def run(name: str, overrides: list[str], out: Path, estimator: str) -> list[dict[str, float]]:
    """The metrics of each step of one layout."""
    log = out / (name.replace(", ", "-").replace(" ", "_") + ".jsonl")
    log.unlink(missing_ok=True)
    task = out / "task"
    command = [
        sys.executable, "-m", "verl.trainer.main_ppo", f"algorithm.adv_estimator={estimator}",
        f"custom_reward_function.path={task}/reward.py", f"trainer.default_local_dir={out}/checkpoints",
        *COMMON, *overrides,
    ]  # fmt: skip
    paths = os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(log), "PYTHONPATH": paths, "HF_HUB_OFFLINE": "1"}
    for _ in range(5):
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        if NOT_STARTED not in done.stderr:
            break
    if done.returncode:
        raise SystemExit(f"{name} failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    steps = []
    for line in log.read_text().splitlines():
        record = json.loads(line)
        steps.append(record.get("data", record))
    return steps


def compared(metrics: dict[str, float]) -> dict[str, float]:
    """What must agree: all but clocks, memory, the token counts of single ranks, and restarts on a busy machine."""
    skip = ("timing", "perf/", "global_seqlen/", "recovery/")
    return {k: v for k, v in metrics.items() if not k.startswith(skip) and isinstance(v, int | float)}


def largest_difference(
    name: str, reference: list[dict[str, float]], steps: list[dict[str, float]]
) -> tuple[float, str]:
    """The largest relative difference of a layout from the first one, and its metric and step."""
    worst, where = 0.0, "-"
    for step, (a, b) in enumerate(zip(reference, steps, strict=True), start=1):
        assert a.keys() == b.keys(), f"{name}: {a.keys() ^ b.keys()}"
        for key in a:
            same = a[key] == b[key] or (math.isnan(a[key]) and math.isnan(b[key]))
            floor = 1.0 if key.startswith(ROUNDING) else FLOOR
            scale = max(abs(a[key]), abs(b[key]), floor)
            gap = 0.0 if same else abs(a[key] - b[key]) / scale
            if not gap <= worst:
                worst, where = gap, f"`{key}`, step {step}"
    return worst, where


def _count(text: str) -> int:
    if not (text.isdecimal() and int(text) > 0):
        raise argparse.ArgumentTypeError(f"{text}: must be a whole number above 0")
    return int(text)


def main() -> None:
    """Run all layouts and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/invariance"), help="runs are kept there")
    parser.add_argument("--estimator", default="grpo", help="algorithm.adv_estimator of the runs")
    parser.add_argument("--megatron", action="store_true", help="layouts of strategy=megatron in place of FSDP's")
    parser.add_argument("--experts", action="store_true", help="a mixture of experts, under strategy=megatron")
    parser.add_argument("--latent", action="store_true", help="a DeepSeek-V3, under strategy=megatron")
    parser.add_argument("--heads", action="store_true", help="that, and multi-token prediction is trained")
    parser.add_argument("--veomni", action="store_true", help="strategy=veomni, in an environment that has it")
    parser.add_argument("--images", action="store_true", help="a model with images, on rows with and without them")
    parser.add_argument("--lora", action="store_true", help="only adapters are trained")
    parser.add_argument("--teacher", metavar="LOSS", help="distillation by this loss_mode, beside the rewards")
    parser.add_argument("--steps", type=_count, default=STEPS, help="steps of each run")
    parser.add_argument(
        "--layouts", default="", metavar="WORD", help="only layouts with this in their name: local, FSDP"
    )
    args = parser.parse_args()
    tables = {
        "megatron": MEGATRON_LAYOUTS,
        "experts": EXPERT_LAYOUTS,
        "latent": LATENT_LAYOUTS,
        "heads": LATENT_LAYOUTS,
        "veomni": VEOMNI_LAYOUTS,
    }
    picked = [name for name in tables if getattr(args, name)]
    if len(picked) > 1:
        parser.error(f"--{' and --'.join(picked)} are layouts of different models: name one of them")
    if (args.images or args.lora) and picked not in ([], ["megatron"]):
        parser.error(f"--images and --lora are for the layouts of FSDP and of --megatron: leave out --{picked[0]}")
    others = tables[picked[0]] if picked else LAYOUTS
    reference_layouts = others if args.heads else LAYOUTS
    first = next(iter(reference_layouts))
    if args.images or args.lora:  # which do not go with divided matrices
        others = {name: overrides for name, overrides in others.items() if DIVIDED[0] not in overrides}
    chosen = {name: overrides for name, overrides in others.items() if args.layouts.lower() in name.lower()}
    if not chosen.keys() - {first}:
        parser.error(
            f"--layouts {args.layouts}: no layout to compare has that in its name; there are {'; '.join(others)}"
        )
    out = args.output_dir.absolute()
    out.mkdir(parents=True, exist_ok=True)
    task = make_inputs(out / "task")
    model, files = task / "model", [task / "rl_train.parquet", task / "rl_test.parquet"]
    if args.experts:
        model = make_mixture(task)
    if args.latent or args.heads:
        model = make_latent(task, heads=int(args.heads))
    if args.images:
        model, files = make_pictures(task, layers=4 if args.megatron else 2)
    common = [f"data.train_files={files[0]}", f"data.val_files={files[1]}", *(LORA if args.lora else [])]
    common += [f"{role}.model.path={model}" for role in ("actor_rollout_ref", "critic")]
    if args.teacher:
        common += ["distillation.enabled=true", f"distillation.distillation_loss.loss_mode={args.teacher}"]
        common.append(f"distillation.teacher_models.teacher_model.model_path={make_teacher(task)}")
    common += HEADS if args.heads else []
    common.append(f"trainer.total_training_steps={args.steps}")
    reference: list[dict[str, float]] = []
    worst_of_all = 0.0
    option = "".join(f" --{name}" for name in (*picked, *(key for key in ("images", "lora") if getattr(args, key))))
    option += f" --teacher {args.teacher}" if args.teacher else ""
    option += f" --steps {args.steps}" if args.steps != STEPS else ""
    option += f" --layouts {shlex.quote(args.layouts)}" if args.layouts else ""
    command = f"python -m benchmarks.invariance{option} --estimator {args.estimator}"
    print(f"\n`{command}`: {args.steps} step{'s' if args.steps > 1 else ''}, two mini-batches each\n")
    print("| layout | metrics compared | largest relative difference | in |\n|---|---|---|---|")
    for name, overrides in {first: reference_layouts[first], **chosen}.items():
        steps = [compared(step) for step in run(name, [*common, *overrides], out, args.estimator)]
        assert len(steps) == args.steps, f"{name}: {len(steps)} steps logged"
        reference = reference or steps
        worst, where = largest_difference(name, reference, steps)
        worst_of_all = max(worst, worst_of_all)
        print(f"| {name} | {args.steps} x {len(reference[0])} | {worst:.1e} | {where} |", flush=True)
    if not worst_of_all <= 1e-5:
        raise SystemExit(f"a layout changes the numbers: {worst_of_all:.1e} > 1e-5")


if __name__ == "__main__":
    main()
