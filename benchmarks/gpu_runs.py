"""Whole runs of the public commands on one GPU, under Ray: training, resumption, a killed rank, agents.

    python -m benchmarks.gpu_runs --json runs.json [--runs grpo resume ppo ...] [--device cuda]

A supervised warm-up of the quickstart's model comes first. Then the runs start side by side, each with a Ray cluster
of its own, on the one device; nothing here is timed but the last run, which is alone. Each prints PASS or FAIL.

sft       the warm-up: ``sft_trainer``, then its exported model
grpo      five steps of GRPO with a KL term, by the defaults for a GPU (bf16, packed, offered engines)
resume    three steps, a checkpoint, two more in a new process: the metrics of steps 4 and 5 beside those of ``grpo``
killed    the same five steps; the rank is killed by SIGKILL once step 2 has begun; recovers and ends alike
ppo       a critic, GAE and KL in the reward
lora      adapters of rank 8
hf        rollout by Transformers ``generate``
offload   weights, gradients and moments leave the device between phases
agents    conversations with a tool
megatron  ``strategy=megatron`` on one rank
lag       responses sampled one step ahead (``trainer.async.lag=1``)
colocate  stragglers go on in the next step (``trainer.v1.trainer_mode=colocate_async``)
fp16      passes in ``float16``, with a loss scale
mask      top-p sampling whose mask training keeps (``rollout.keep_sampling_mask``)
jsd       a teacher, and the divergence of the whole vocabulary; the teacher is the policy of step 0
topk      the same with the teacher's most likely tokens
doctor    ``verl doctor``
teacher   ``large``, with a teacher of the same size and a divergence of the whole vocabulary
large     two steps of GRPO of a model with the shape of Qwen3-0.6B, 256 responses of 512 tokens, alone on the device;
          prints its log and the seconds of each step as they come
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import gpu, shape
from examples.quickstart import settings as quickstart
from examples.quickstart.quickstart import exported_model, read_metrics
from examples.quickstart.settings import Settings, command
from examples.quickstart_agent import settings as agents

RUN_LIMIT_S = 400
STEPS = 5
KL_OF_ONE_MODEL = 1e-3
"""Largest difference of log-probs per token, on average, between two passes of one model."""
LEFT_TO_DEFAULTS = (
    "trainer.controller",
    "trainer.device",
    "actor_rollout_ref.actor.fsdp_config.dtype",
    "actor_rollout_ref.rollout.dtype",
    "actor_rollout_ref.rollout.free_cache_engine",
    "critic.model.fsdp_config.dtype",
    "engine.dtype",
    "trainer.val_before_train",
)
"""Settings of the quickstart for one process on a laptop, which these runs do without."""


@dataclass(frozen=True)
class Runs:
    """Where everything is, and what it is run on."""

    folder: Path
    device: str
    warm_model: Path | None = None

    @property
    def model(self) -> Path:
        """The model after the warm-up."""
        return self.warm_model or exported_model(self.folder / "sft" / "checkpoints")

    def settings(self, values: Settings, name: str) -> Settings:
        """The settings for this device; a CPU is named, a GPU is found."""
        kept = {key: value for key, value in values.items() if key not in LEFT_TO_DEFAULTS}
        kept |= {"trainer.default_local_dir": self.folder / name / "checkpoints", "trainer.experiment_name": name}
        return kept | ({"trainer.device": self.device} if self.device != "cuda" else {})

    def ppo(self, name: str, algorithm: str = "grpo", **changes: object) -> Settings:
        """A short run from the warm model; ``__`` in the names of changes is a dot, ``ARR`` actor_rollout_ref."""
        task, output = self.folder / "task", self.folder / name
        values = quickstart.rl_settings(algorithm, task, self.model, output, 1, STEPS)
        values |= {"trainer.test_freq": STEPS, "trainer.save_freq": -1, "data.val_max_samples": 32}
        changed = {key.replace("__", ".").replace("ARR", "actor_rollout_ref"): v for key, v in changes.items()}
        return self.settings(values, name) | changed

    def run(self, name: str, module: str, values: Settings, watch: Any = None) -> dict[int, dict[str, Any]]:
        """Run a command to its end; return the metrics of its steps.

        Raises:
            RuntimeError: it failed, or took too long; with the end of what it printed.
        """
        output = self.folder / name
        output.mkdir(parents=True, exist_ok=True)
        metrics, log = output / "metrics.jsonl", output / "log.txt"
        metrics.unlink(missing_ok=True)
        environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(metrics), "VERL_LOGGING_LEVEL": "INFO"}
        with log.open("a") as stream:
            process = subprocess.Popen(
                command(module, values), stdout=stream, stderr=subprocess.STDOUT, env=environment, cwd=shape.ROOT
            )
            started = time.monotonic()
            while process.poll() is None and time.monotonic() - started < RUN_LIMIT_S:
                time.sleep(0.2)
                if watch is not None:
                    watch(process.pid, metrics)
            if process.poll() is None:
                process.kill()
                raise RuntimeError(f"{name}: no end after {RUN_LIMIT_S} s\n{tail(log)}")
        if process.returncode:
            raise RuntimeError(f"{name}: exit status {process.returncode}\n{tail(log)}")
        return dict(read_metrics(metrics))


def progress(log: Path) -> Callable[[int, Path], None]:
    """Make a ``watch`` of :meth:`Runs.run` that prints the log and the seconds of each step as they come.

    Then a run that is cut has told how far it was.
    """
    started, seen = time.monotonic(), {"log": 0, "metrics": 0}

    def news(path: Path, name: str) -> list[str]:
        lines = path.read_text(errors="replace").split("\n")[:-1] if path.exists() else []  # whole ones
        new, seen[name] = lines[seen[name] :], len(lines)
        return new

    def tell(pid: int, metrics: Path) -> None:
        for line in news(log, "log"):
            print(f"{time.monotonic() - started:6.1f} s  {line[:200]}", flush=True)
        for line in news(metrics, "metrics"):
            step = json.loads(line)
            times = {k: round(v, 2) for k, v in step.get("data", {}).items() if k.startswith("timing_s/")}
            print(f"{time.monotonic() - started:6.1f} s  {step.get('step')}: {json.dumps(times)}", flush=True)

    return tell


def tail(log: Path, lines: int = 45) -> str:
    """The end of a log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


def losses(metrics: dict[int, dict[str, Any]]) -> dict[int, dict[str, float]]:
    """What tells one step from another."""
    names = ("actor/pg_loss", "actor/grad_norm", "actor/entropy", "critic/score/mean", "response_length/mean")
    names += ("training/rollout_probs_diff_max", "training/rollout_probs_diff_mean", "actor/kl_loss")
    names += ("actor/loss_scale", "distillation/kl", "distillation/loss", "distillation/agreement", "timing_s/teacher")
    return {step: {name: data[name] for name in names if name in data} for step, data in metrics.items()}


def sft(runs: Runs) -> dict[str, Any]:
    """The warm-up."""
    task = runs.folder / "task"
    make = [sys.executable, "examples/quickstart/make_task.py", f"--output_dir={task}", "--seed=1"]
    subprocess.run(make, check=True, cwd=shape.ROOT)
    if runs.warm_model:
        return {"skipped": f"the model is {runs.warm_model}"}
    values = quickstart.sft_settings(task, runs.folder / "sft", 1)
    metrics = runs.run("sft", "verl.trainer.sft_trainer", runs.settings(values, "sft"))
    found = [metrics[step]["train/loss"] for step in sorted(metrics) if "train/loss" in metrics[step]]
    return {"first_loss": found[0], "last_loss": found[-1], "agrees": found[-1] < found[0]}


def grpo(runs: Runs) -> dict[str, Any]:
    """Five steps at once."""
    values = runs.ppo("grpo", ARR__actor__use_kl_loss=True)
    metrics = runs.run("grpo", "verl.trainer.main_ppo", values)
    return {"steps": losses(metrics), "last": metrics[STEPS], "log": tail(runs.folder / "grpo" / "log.txt", 15)}


def resume(runs: Runs) -> dict[str, Any]:
    """Five steps in two processes."""
    same = {"ARR__actor__use_kl_loss": True, "trainer__resume_mode": "auto", "trainer__save_freq": 3}
    runs.run("resume", "verl.trainer.main_ppo", runs.ppo("resume", **same) | {"trainer.total_training_steps": 3})
    metrics = runs.run("resume", "verl.trainer.main_ppo", runs.ppo("resume", **same))
    return {"steps": losses(metrics), "agrees": sorted(metrics)[-2:] == [4, 5]}


def killed(runs: Runs) -> dict[str, Any]:
    """Five steps, in one of which the rank dies."""
    import psutil

    victims: list[str] = []

    def kill(pid: int, metrics: Path) -> None:
        if victims or not metrics.exists() or len(metrics.read_text().splitlines()) < 2:
            return
        for process in psutil.Process(pid).children(recursive=True):
            with contextlib.suppress(psutil.Error):
                if process.name().startswith("ray::WorkerHost"):
                    process.kill()
                    victims.append(process.name())
                    return

    values = runs.ppo("killed", ARR__actor__use_kl_loss=True, trainer__save_freq=1)
    metrics = runs.run("killed", "verl.trainer.main_ppo", values, kill)
    return {"killed": victims, "steps": losses(metrics), "agrees": bool(victims) and STEPS in metrics}


def plain(name: str, algorithm: str = "grpo", **changes: object) -> Any:
    """A run that has to end with all its steps."""

    def run(runs: Runs) -> dict[str, Any]:
        metrics = runs.run(name, "verl.trainer.main_ppo", runs.ppo(name, algorithm, **changes))
        return {"steps": losses(metrics), "agrees": STEPS in metrics}

    return run


def teacher(model: Path, loss_mode: str) -> Settings:
    """Settings of a frozen teacher whose divergence is added to the loss."""
    return {
        "distillation.enabled": True,
        "distillation.teacher_models.teacher_model.model_path": model,
        "distillation.distillation_loss.loss_mode": loss_mode,
        "actor_rollout_ref.ref.log_prob_use_dynamic_bsz": True,
    }


def distilled(name: str, loss_mode: str) -> Any:
    """A run with a teacher, which is the policy before the first update: they agree in the first step."""

    def run(runs: Runs) -> dict[str, Any]:
        values = runs.ppo(name) | teacher(runs.model, loss_mode)
        steps = losses(runs.run(name, "verl.trainer.main_ppo", values))
        agrees = STEPS in steps and abs(steps[1]["distillation/kl"]) < KL_OF_ONE_MODEL
        return {"steps": steps, "agrees": agrees}

    return run


def conversations(runs: Runs) -> dict[str, Any]:
    """An agent run from a random model."""
    task, output = runs.folder / "agent_task", runs.folder / "agents"
    make = [sys.executable, "examples/quickstart_agent/make_task.py", f"--output_dir={task}", "--seed=1"]
    subprocess.run(make, check=True, cwd=shape.ROOT)
    values = agents.rl_settings(task, task / "model", output, 1)
    values |= {"trainer.total_training_steps": 2, "trainer.save_freq": -1, "trainer.test_freq": -1}
    metrics = runs.run("agents", "verl.trainer.main_ppo", runs.settings(values, "agents"))
    return {"steps": losses(metrics), "agrees": 2 in metrics}


def doctor(runs: Runs) -> dict[str, Any]:
    """What the machine has."""
    done = subprocess.run([sys.executable, "-m", "verl", "doctor"], capture_output=True, text=True, check=False)
    return {"output": done.stdout + done.stderr[-2000:], "agrees": done.returncode == 0}


def large(runs: Runs, name: str = "large", changes: Settings | None = None) -> dict[str, Any]:
    """Two steps of a model of 0.6 billion parameters."""
    folder = runs.folder / "qwen"
    (gpu.GPU if runs.device == "cuda" else shape.TINY).save_model(folder, max_position_embeddings=40960)
    length = 512 if runs.device == "cuda" else 16
    values = runs.ppo(
        name,
        ARR__model__path=folder,
        data__train_batch_size=32,
        data__max_prompt_length=64,
        data__max_response_length=length,
        ARR__actor__ppo_mini_batch_size=32,
        ARR__actor__ppo_max_token_len_per_gpu=16384,
        ARR__rollout__ignore_eos=True,
        trainer__total_training_steps=2,
        trainer__test_freq=-1,
    )
    values |= {"trainer.val_before_train": False} | (changes or {})
    metrics = runs.run(name, "verl.trainer.main_ppo", values, progress(runs.folder / name / "log.txt"))
    return {"last": metrics[2], "agrees": 2 in metrics}


def large_with_teacher(runs: Runs) -> dict[str, Any]:
    """Two steps of the same model, with itself before the first step as its teacher."""
    return large(runs, "teacher", teacher(runs.folder / "qwen", "jsd"))


RUNS: dict[str, Any] = {
    "grpo": grpo,
    "resume": resume,
    "killed": killed,
    "ppo": plain("ppo", "ppo", algorithm__use_kl_in_reward=True),
    "lora": plain("lora", ARR__model__lora_rank=8, ARR__model__lora_alpha=16),
    "hf": plain("hf", ARR__rollout__name="hf"),
    "offload": plain(
        "offload", ARR__actor__fsdp_config__param_offload=True, ARR__actor__fsdp_config__optimizer_offload=True
    ),
    "agents": conversations,
    "megatron": plain("megatron", ARR__actor__strategy="megatron"),
    "lag": plain("lag", trainer__async__lag=1),
    "colocate": plain("colocate", trainer__v1__trainer_mode="colocate_async"),
    "fp16": plain("fp16", ARR__actor__fsdp_config__dtype="float16", ARR__rollout__dtype="float16"),
    "mask": plain("mask", ARR__rollout__top_p=0.9, ARR__rollout__keep_sampling_mask=True),
    "jsd": distilled("jsd", "jsd"),
    "topk": distilled("topk", "forward_kl_topk"),
    "doctor": doctor,
}
ALONE = {"large": large, "teacher": large_with_teacher}


def attempt(run: Any, runs: Runs) -> dict[str, Any]:
    """What a run found, or why it failed."""
    started = time.monotonic()
    try:
        found = run(runs)
    except Exception as error:  # noqa: BLE001 (each failure is reported, and the other runs go on)
        found = {"failed": f"{type(error).__name__}: {error}"[-6000:]}
    return found | {"wall_s": time.monotonic() - started}


def all_runs(runs: Runs, names: list[str], at_once: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """The warm-up, the runs side by side, the run that is alone."""
    yield "sft", attempt(sft, runs)
    with ThreadPoolExecutor(at_once) as pool:
        futures = {pool.submit(attempt, RUNS[name], runs): name for name in names if name in RUNS}
        for future in as_completed(futures):
            yield futures[future], future.result()
    for name in names:
        if name in ALONE:
            yield name, attempt(ALONE[name], runs)


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", required=True, help="where the result goes")
    parser.add_argument("--runs", nargs="+", choices=(*RUNS, *ALONE), default=[*RUNS, *ALONE])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--at_once", type=int, default=4, help="runs side by side")
    parser.add_argument("--model", type=Path, help="a model folder that an earlier warm-up exported, in place of sft")
    arguments = parser.parse_args()
    gpu.refuse_without_gpu(arguments.device)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        runs = Runs(Path(folder), arguments.device, arguments.model)
        for name, found in all_runs(runs, arguments.runs, arguments.at_once):
            results[name] = found
            Path(arguments.json).write_text(json.dumps(results, indent=1) + "\n")
            print(gpu.verdict(found), name, json.dumps(found, indent=1), flush=True)
    print("\n".join(f"{gpu.verdict(found)} {name}" for name, found in results.items()))
    if failed := [name for name, found in results.items() if gpu.verdict(found) == "FAIL"]:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
