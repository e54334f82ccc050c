"""Breaks a run on purpose, and compares what comes out with the run that nothing happened to.

The work is that of the quickstart (Countdown, its tiny model with random weights) as PPO with a critic and a
reference, on Ray with two ranks, so that every stage exists. Each round starts it anew and breaks one thing, at a
stage and a moment that the seed draws; a run that ended by SIGTERM is started again as a scheduler would. In rounds
of agents (``chaos_agents.py``), conversations with tools and agent programs answer the prompts, many of which go wrong
by themselves, and a process ends or hangs beside that. Survived means: all steps done; weights, optimizer, metrics and
(without agents) sampled responses the same to the last bit; and no process left. ::

    python -m benchmarks.chaos [--rounds 6] [--seed 1] [--write]    the campaign (into docs/internals/lost_processes.md)
    python -m benchmarks.chaos --work megatron_adapters --faults "rank killed"    another model, or another trainer
    python -m benchmarks.chaos --overhead [--repeats 3]            what the protection costs when nothing breaks
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks import chaos_agents
from benchmarks.chaos_run import PLAN
from examples.quickstart.settings import Settings, megatron_settings, rl_settings
from tests.support.vision_models import picture_rows, tiny_vision_model_dir, write_parquet
from verl.supervision.termination import EXIT_CODE
from verl.testing.models import tiny_model

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "internals" / "lost_processes.md"
STEPS = 5
HANG_S = 20
RUN_S = 400
TRAJECTORY_S = 30
"""Time limits of a call of the workers, of a run, and of a trajectory; ``--patience`` multiplies them."""
STAGES = ("gen", "reward", "old_log_prob", "ref", "values", "adv", "update_critic", "update_actor", "testing")
SAVING = "save_checkpoint"
AGENT_FAULTS = (
    "agent process killed",
    "agent process frozen",
    "agent router killed",
    "agent router frozen",
    "rank of agents killed",
    "rank of agents frozen",
    "tool ends its process",
    "tool stops its process",
    "MCP server killed",
)
"""What breaks while agents answer."""
FAULTS = {
    "rank killed": (*STAGES, SAVING),
    "reward process killed": ("gen", "reward"),
    "driver killed": (*STAGES, SAVING),
    "rank frozen": ("gen", "update_actor"),
    "checkpoint damaged, driver killed": ("gen", "update_actor"),
    "SIGTERM": STAGES,
    "raylet killed": ("gen", "update_actor"),
    "Ray's state server killed": ("gen", "update_actor"),
    "raylet frozen": ("gen", "update_actor"),
    "Ray's state server frozen": ("gen", "update_actor"),
    **dict.fromkeys(AGENT_FAULTS, ("gen",)),
}
"""What breaks, and in which stages it makes a difference."""
ENDS_THE_DRIVER = {name for name in FAULTS if "driver" in name or "raylet" in name or "state server" in name}
"""What the driver does not outlive: the next one redoes the steps since the newest whole checkpoint."""
NOT_COMPARED = ("timing", "perf", "recovery")
NOT_COMPARED_OF_AGENTS = ("training/rollout_", "rollout_corr/")
"""Rounding errors of the engine, which depend on what is computed together."""
WORKS = ("fsdp", "megatron_adapters", "megatron_replay", "megatron_images")
"""What is trained: all weights under FSDP; under Megatron adapters or a Qwen2.5-VL, over tensor-parallel ranks, or the
experts of a mixture, over expert-parallel ranks, with the rollout's choice of experts repeated (R3)."""
END_S = 60
"""How long the processes of a run may take to end after it."""


@dataclass(frozen=True)
class Round:
    """What a round did to the run, and what came of it."""

    fault: str
    step: int
    stage: str
    did: str
    starts: int
    seconds: float
    redone: int
    problems: tuple[str, ...]


def settings(task: Path, output: Path, changes: Settings, patience: float) -> Settings:
    """The quickstart's PPO run, small, on two ranks."""
    chosen = rl_settings("ppo", task, task / "model", output, seed=1)
    return chosen | {
        "data.train_batch_size": 64,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 32,
        "actor_rollout_ref.actor.checkpoint.save_contents": "[model,optimizer,extra]",
        "actor_rollout_ref.actor.checkpoint.async_save": True,
        "critic.checkpoint.save_contents": "[model,optimizer,extra]",
        "critic.checkpoint.async_save": True,
        "critic.ppo_mini_batch_size": 32,
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.ref.fsdp_config.dtype": "float32",
        "data.val_max_samples": 16,
        "trainer.controller": "ray",
        "trainer.n_gpus_per_node": 2,
        "trainer.val_before_train": False,
        "trainer.test_freq": 2,
        "trainer.save_freq": 2,
        "trainer.total_training_steps": STEPS,
        "trainer.resume_mode": "auto",
        "trainer.rollout_data_dir": output / "rollouts",
        "trainer.recovery.snapshot_freq": 1,
        "trainer.recovery.hang_timeout_s": HANG_S * patience,
        "ray_kwargs.ray_init.num_cpus": 2,
        "hydra.run.dir": output / "hydra",
    } | changes  # fmt: skip


def work_settings(work: str, task: Path) -> Settings:
    """The changes that make the run one of ``WORKS``."""
    if work == "fsdp":
        return {}
    if work == "megatron_adapters":
        return megatron_settings(2) | {"actor_rollout_ref.model.lora_rank": 8}
    if work == "megatron_images":
        return megatron_settings(2) | image_settings(task)
    sizes = {"tensor_model_parallel_size": 1, "expert_model_parallel_size": 2, "expert_tensor_parallel_size": 1}
    return megatron_settings(2) | {
        **{f"actor_rollout_ref.actor.megatron.{name}": size for name, size in sizes.items()},
        "critic.strategy": "fsdp2",
        "actor_rollout_ref.model.path": make_mixture(task),
        "actor_rollout_ref.actor.router_replay.mode": "R3",
        "actor_rollout_ref.rollout.enable_rollout_routing_replay": True,
    }


def image_settings(task: Path) -> Settings:
    """Pictures whose colour is asked for, and a model that sees them."""
    model = tiny_vision_model_dir(task / "vision")
    reward = task / "colours.py"
    reward.write_text("def compute_score(solution_str, ground_truth, **_):\n    return len(set(solution_str)) / 12\n")
    return {
        "data.train_files": write_parquet(task / "pictures.parquet", picture_rows(16 * STEPS, text_every=4)),
        "data.val_files": write_parquet(task / "other_pictures.parquet", picture_rows(16)),
        "data.train_batch_size": 16,
        "data.max_prompt_length": 40,
        "custom_reward_function.path": reward,
        "custom_reward_function.name": "compute_score",
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": 8,
        "critic.ppo_mini_batch_size": 8,
    }


def make_mixture(task: Path) -> Path:
    """A Qwen3-MoE with random weights that has the tokenizer of the quickstart's model."""
    folder = task / "mixture"
    shutil.copytree(task / "model", folder, dirs_exist_ok=True)
    dense = json.loads((folder / "config.json").read_text())
    kept = {name: dense[name] for name in ("pad_token_id", "bos_token_id", "eos_token_id")}
    tiny_model("qwen3_moe", vocab=dense["vocab_size"], **kept).save_pretrained(folder)
    return folder


def agent_settings(folder: Path, patience: float) -> Settings:
    """What makes the work one of agents."""
    return chaos_agents.settings(folder, STEPS, TRAJECTORY_S * patience) | {
        "actor_rollout_ref.rollout.agent.hang_timeout_s": HANG_S * patience
    }


def make_task(folder: Path) -> Path:
    """Data and model of the quickstart."""
    script = ROOT / "examples" / "quickstart" / "make_task.py"
    subprocess.run([sys.executable, script, f"--output_dir={folder}", "--seed=1"], check=True, capture_output=True)
    return folder


def start(
    task: Path, output: Path, plan: dict[str, Any] | None, patience: float, changes: Settings | None = None
) -> tuple[int, float]:
    """Run to the end, starting it again where SIGTERM ended it; how often it was started, and the seconds."""
    output.mkdir(parents=True)
    (output / "plan.json").write_text(json.dumps(plan))
    overrides = [f"{key}={value}" for key, value in settings(task, output, changes or {}, patience).items()]
    command = [sys.executable, "-m", "benchmarks.chaos_run", *overrides]
    env = os.environ | {
        PLAN: str(output / "plan.json"),
        "VERL_FILE_LOGGER_PATH": str(output / "metrics.jsonl"),
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
    }
    began, starts, code = time.monotonic(), 0, EXIT_CODE
    with (output / "log.txt").open("w") as log:
        while code == EXIT_CODE and starts < 3:
            starts += 1
            code = subprocess.run(
                command, stdout=log, stderr=log, env=env, timeout=RUN_S * patience, check=False
            ).returncode
    if code:
        raise RuntimeError(f"the run ended with code {code}; its log: {output / 'log.txt'}")
    return starts, time.monotonic() - began


def processes_left(plan: Path) -> list[str]:
    """Command lines of a run's processes that do not end; it has ended."""
    deadline = time.monotonic() + END_S
    while True:
        found = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, OSError):  # it has ended, or is another user's
                if process.environ().get(PLAN) == str(plan) and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline())[:100])
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.2)


def metrics_of(output: Path) -> dict[int, dict[str, Any]]:
    """The metrics of each step; two records of one step are an error."""
    found: dict[int, dict[str, Any]] = {}
    for line in (output / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if "data" not in record:
            continue
        assert record["step"] not in found, f"step {record['step']} was logged twice"
        found[record["step"]] = record["data"]
    return found


def without_ids(run: Path, file: Path) -> bytes:
    """What a file of samples holds, but for the id of its run: each run has its own."""
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    content = file.read_bytes()
    for one in {json.loads(line)["run"] for line in lines}:
        content = content.replace(one.encode(), b"")
    return content


def differences(output: Path, undisturbed: Path, agents: bool) -> Iterator[str]:
    """What is not the same in two runs, of agent loops or without them."""
    left_out = (*NOT_COMPARED, *NOT_COMPARED_OF_AGENTS) if agents else NOT_COMPARED
    ours, theirs = metrics_of(output), metrics_of(undisturbed)
    if ours.keys() != theirs.keys():
        yield f"steps {sorted(ours)} instead of {sorted(theirs)}"
    for step in ours.keys() & theirs.keys():
        names = [n for n in ours[step].keys() | theirs[step].keys() if not n.startswith(left_out)]
        changed = [name for name in sorted(names) if not same(ours[step].get(name), theirs[step].get(name))]
        if changed:
            yield f"step {step}: {', '.join(changed[:3])}"
    for kind in ("rollouts", "validation"):
        if agents:
            continue  # they hold times and log-probs of the engine; the weights depend on every token
        files = [
            {path.name: without_ids(run, path) for path in (run / kind).glob("*")} for run in (output, undisturbed)
        ]
        if files[0] != files[1]:
            yield f"{kind} differ"
    last = [run / "checkpoints" / f"global_step_{STEPS}" for run in (output, undisturbed)]
    for path in sorted(last[1].rglob("*.pt")):
        name = path.relative_to(last[1])
        if not same(*(torch.load(folder / name, weights_only=True) for folder in last)):
            yield f"{name} differs"


def same(a: Any, b: Any) -> bool:
    """Equal to the last bit, NaN equal to NaN."""
    if isinstance(a, torch.Tensor):
        return isinstance(b, torch.Tensor) and a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return isinstance(b, list | tuple) and len(a) == len(b) and all(map(same, a, b))
    return a == b or (a != a and b != b)


def draw_plans(seed: int, rounds: int, kinds: Sequence[str]) -> list[dict[str, Any]]:
    """One fault a round: every kind by turns, its stage, step and moment drawn."""
    draw = random.Random(seed)
    plans = []
    for number in range(rounds):
        fault = kinds[number % len(kinds)]
        stage = draw.choice(FAULTS[fault])
        steps = [2, 4] if stage in ("testing", SAVING) else range(1, STEPS + 1)
        if "damaged" in fault:
            steps = [STEPS]  # two steps have been saved
        moments = [0.0, 0.02, 0.1, 0.3]
        if fault in AGENT_FAULTS:
            steps = range(2, STEPS)  # their processes start in the first, and tools obey in the last at the latest
            moments = [0.1, 0.3, 1.0, 3.0]  # of conversations that take some seconds
        after = draw.choice(moments)
        plans.append({"fault": fault, "step": draw.choice(list(steps)), "stage": stage, "after_s": after})
        plans[-1]["which"] = draw.randrange(2)
    return plans


def play(
    task: Path,
    output: Path,
    plan: dict[str, Any],
    undisturbed: Path,
    usual_s: float,
    patience: float,
    changes: Settings,
) -> Round:
    """One round."""
    starts, seconds, problems = 0, float("nan"), ()
    agents = plan["fault"] in AGENT_FAULTS
    try:
        starts, seconds = start(task, output, plan, patience, changes)
        problems = tuple(differences(output, undisturbed, agents))
        if agents and (left := processes_left(output / "plan.json")):
            problems = (*problems, f"processes are left: {left}")
    except (RuntimeError, subprocess.TimeoutExpired, AssertionError, OSError) as error:
        problems = (str(error),)
    noted = output / "fault.json"
    note = json.loads(noted.read_text()) if noted.exists() else {}
    if not note or (output / chaos_agents.ORDER).exists():
        problems = (*problems, "the fault never happened")
    restored = metrics_of(output) if not problems else {}
    redone = int(max((step.get("recovery/redone_steps", 0) for step in restored.values()), default=0))
    if plan["fault"] in ENDS_THE_DRIVER and note:
        redone += note["finished"] - note["saved"]
    return Round(
        plan["fault"], plan["step"], note.get("stage", plan["stage"]), note.get("did", "killed by it"), starts,
        seconds - usual_s, redone, problems,
    )  # fmt: skip


def campaign(folder: Path, rounds: int, seed: int, kinds: Sequence[str], patience: float, work: str) -> list[Round]:
    """All rounds, told as they end."""
    task = make_task(folder / "task")
    of_work = work_settings(work, task)
    played, usual_s = [], {}
    for number, plan in enumerate(draw_plans(seed, rounds, kinds), 1):
        agents = plan["fault"] in AGENT_FAULTS
        undisturbed = folder / ("undisturbed_agents" if agents else "undisturbed")
        changes = agent_settings(task, patience) if agents else of_work
        if undisturbed not in usual_s:
            _, usual_s[undisturbed] = start(task, undisturbed, None, patience, changes)
            print(f"{undisturbed.name}: {STEPS} steps in {usual_s[undisturbed]:.0f} s")
        output = folder / f"round_{number}"
        played.append(play(task, output, plan, undisturbed, usual_s[undisturbed], patience, changes))
        print(row(number, played[-1]), flush=True)
    return played


def row(number: int, done: Round) -> str:
    """A line of the table."""
    outcome = "; ".join(done.problems) or "yes"
    where = f"step {done.step}, {done.stage}"
    return f"| {number} | {done.fault} | {where} | {outcome} | {done.redone} | {done.seconds:.0f} |"


def table(played: Sequence[Round], seed: int) -> str:
    """The table of the page."""
    survived = sum(not done.problems for done in played)
    lines = [
        f"`python -m benchmarks.chaos --rounds {len(played)} --seed {seed} --write`: {len(played)} faults, {survived} "
        f"survived, steps lost: {0 if survived == len(played) else 'see the table'}.",
        "",
        "| round | fault | where | the same to the last bit | finished steps redone | seconds lost |",
        "|---|---|---|---|---|---|",
    ]
    return "\n".join([*lines, *(row(number, done) for number, done in enumerate(played, 1))])


def overhead(folder: Path, repeats: int, patience: float) -> str:
    """Seconds of a step with and without protection, in runs by turns."""
    task = make_task(folder / "task")
    bare = {"trainer.recovery.snapshot_freq": 0, "trainer.recovery.hang_timeout_s": "null",
            "trainer.recovery.driver_restarts": 0, "trainer.save_freq": -1}  # fmt: skip
    kinds: dict[str, Settings] = {"bare": bare, "protected": {"trainer.save_freq": -1}}
    steps: dict[str, list[float]] = {kind: [] for kind in kinds}
    for turn in range(repeats):
        for kind, changes in kinds.items():
            output = folder / f"{kind}_{turn}"
            changed = changes | {"trainer.test_freq": -1, "trainer.total_training_steps": 12}
            start(task, output, None, patience, changed)
            found = metrics_of(output)
            # From one step's end to the next is more than timing_s/step: the state is held between two steps.
            steps[kind] += [
                found[step]["timing_s/step"] + found[step].get("timing_s/hold", 0.0) for step in range(3, 13)
            ]
    least = {kind: min(values) for kind, values in steps.items()}
    median = {kind: statistics.median(values) for kind, values in steps.items()}
    return (
        f"`python -m benchmarks.chaos --overhead --repeats {repeats}`: a step takes "
        f"{median['protected'] / median['bare']:.3f} x as long with the protection as without (medians "
        f"{median['protected']:.3f} s : {median['bare']:.3f} s; least {least['protected'] / least['bare']:.3f} x)."
    )


def put(name: str, text: str) -> None:
    """Replace a marked part of the page."""
    page = PAGE.read_text()
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    head, rest = page.split(begin)
    _, tail = rest.split(end)
    PAGE.write_text(f"{head}{begin}\n{text}\n{end}{tail}")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, help="one of each kind by default")
    parser.add_argument("--faults", nargs="+", choices=FAULTS, default=list(FAULTS), help="the kinds to play by turns")
    parser.add_argument("--work", choices=WORKS, default="fsdp", help="what is trained, in rounds without agents")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--patience", type=float, default=1, help="multiplies all time limits, for a busy machine")
    parser.add_argument("--repeats", type=int, default=3, help="runs of each kind, with --overhead")
    parser.add_argument("--overhead", action="store_true")
    parser.add_argument("--write", action="store_true", help="into docs/internals/lost_processes.md")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/chaos"))
    args = parser.parse_args()
    folder = args.output_dir.absolute()
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    if args.overhead:
        text = overhead(folder, args.repeats, args.patience)
        print(text)
        if args.write:
            put("overhead", text)
        return
    played = campaign(folder, args.rounds or len(args.faults), args.seed, args.faults, args.patience, args.work)
    if args.write:
        put("campaign", table(played, args.seed))
    if any(done.problems for done in played):
        raise SystemExit("not every fault was survived; the logs are below " + str(folder))


if __name__ == "__main__":
    main()
