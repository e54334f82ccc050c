"""Kills a process of a run in an asynchronous mode at a random moment, and counts what its steps trained on.

    python -m benchmarks.chaos_asynchronous [--rounds 20] [--seed 1] [--modes lag colocate separate]
                                            [--victims "last rank" "router of agents"]

The work is that of ``benchmarks.asynchronous_modes`` with tools of log-normal time, saved every second step, on Ray.
Each round runs a mode anew and kills, by SIGKILL, in a step and at a moment that the seed draws, the driver, a rank of
the trainer, a rank of the rollout pool, a process of agents, or their router. A run whose driver died is started again
by the same command. Survived means: all steps are done, and their samples have the names of the undisturbed run, each
once, so that nothing is lost, and nothing is trained on twice. Counted besides: the kills after which the rollout pool
or its router was started again, and not the trainer.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks import asynchronous_modes, shape
from benchmarks.chaos_run import agent_processes, ranks

STEPS, PROMPTS, RESPONSES = 6, 4, 4
RUN_S = 240
NOTHING = "nothing"
ENDING_S = 60.0
LONGEST_S = 3.0
"""Most seconds after the end of a step after which the process is killed."""
EXPECTED = Counter(
    f"{step}-{row}/{index}" for step in range(1, STEPS + 1) for row in range(PROMPTS) for index in range(RESPONSES)
)
"""Names of the samples of the whole run."""


VICTIMS: dict[str, Callable[[psutil.Process], list[psutil.Process]]] = {
    "driver": lambda driver: [driver],
    "first rank": lambda _: ranks()[:1],
    "last rank": lambda _: ranks()[-1:],
    "process of agents": lambda _: agent_processes("WorkerActor")[:1],
    "router of agents": lambda _: agent_processes("AgentRouter")[:1],
}
"""What is killed; with two pools the last rank is one that samples."""


def command(folder: Path, output: Path, mode: str) -> list[str]:
    """The command line of a run of this mode."""
    options = argparse.Namespace(prompts=PROMPTS, epochs=1, steps=STEPS, work="tools", controller="ray")
    changes = {
        "trainer.save_freq": 2,
        "trainer.resume_mode": "auto",
        "trainer.default_local_dir": output / "checkpoints",
        "trainer.rollout_data_dir": output / "samples",
        "trainer.recovery.backoff_s": 0,
        "trainer.recovery.snapshot_freq": 1,
        "actor_rollout_ref.rollout.agent.hang_timeout_s": 60,
    }
    of_mode = asynchronous_modes.command(folder, mode, options)
    replaced = {text.split("=")[0] for text in map(str, of_mode)} & changes.keys()
    kept = [text for text in of_mode if text.split("=")[0] not in replaced]
    return [*kept, *(f"{key}={value}" for key, value in changes.items())]


def run(folder: Path, output: Path, mode: str, victim: str | None, after: int, moment_s: float) -> tuple[int, str]:
    """Run to the end, starting it again after its driver was killed; the number of starts, and what was killed.

    It is killed so many seconds after so many steps, or after the beginning of the first.
    """
    output.mkdir()
    reached: float | None = None
    others: list[psutil.Process] = []
    environment = os.environ | {"VERL_FILE_LOGGER_PATH": str(output / "metrics.jsonl"), "OMP_NUM_THREADS": "1"}
    killed, starts, code = NOTHING, 0, -signal.SIGKILL
    with (output / "log.txt").open("w") as log:
        while code == -signal.SIGKILL and starts < 3:
            starts += 1
            began = time.monotonic()
            process = subprocess.Popen(
                command(folder, output, mode), stdout=log, stderr=log, env=environment, cwd=shape.ROOT
            )
            process_tree = psutil.Process(process.pid)
            while process.poll() is None:
                elapsed = time.monotonic() - began
                if reached is None and steps_done(output) >= after:
                    reached = time.monotonic()
                is_time = reached is not None and time.monotonic() - reached > moment_s
                if victim is not None and is_time and (found := VICTIMS[victim](process_tree)):
                    others = process_tree.children(recursive=True)
                    found[0].kill()
                    killed, victim = f"{victim} {moment_s:.1f} s after step {after}", None
                if elapsed > RUN_S:
                    process.kill()
                    raise RuntimeError(f"no end after {RUN_S} s; its log: {output / 'log.txt'}")
                time.sleep(0.1)
            code = process.returncode
            # What a killed driver has started ends by itself, and holds the lock of the folder till then.
            psutil.wait_procs(others, ENDING_S)
    if code:
        raise RuntimeError(f"the run ended with code {code}; its log: {output / 'log.txt'}")
    return starts, killed


def steps_done(output: Path) -> int:
    """The number of finished steps, -1 before the first begins."""
    metrics = output / "metrics.jsonl"
    if metrics.exists():
        return len(metrics.read_text().splitlines())
    return 0 if "training from step" in (output / "log.txt").read_text() else -1


def problems(output: Path) -> list[str]:
    """What is wrong with the samples of a run."""
    names: Counter[str] = Counter()
    for step in range(1, STEPS + 1):
        path = output / "samples" / f"{step}.jsonl"
        if not path.exists():
            return [f"step {step} is missing"]
        rows = map(json.loads, path.read_text().splitlines())
        names.update(f"{row['uid']}/{row['sample_index']}" for row in rows)
    lost, twice = EXPECTED - names, names - EXPECTED
    return [f"lost: {sorted(lost)}"] * bool(lost) + [f"too often: {sorted(twice)}"] * bool(twice)


def has_trainer_gone_on(output: Path) -> bool:
    """Whether a rollout pool or its router was started again, and the other workers never were."""
    last = json.loads((output / "metrics.jsonl").read_text().splitlines()[-1])["data"]
    return "recovery/rollout_restarts" in last and "recovery/restarts" not in last


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--modes", nargs="+", choices=("lag", "colocate", "separate"), default=["separate", "colocate"])
    parser.add_argument("--victims", nargs="+", choices=list(VICTIMS), default=list(VICTIMS))
    arguments = parser.parse_args()
    draws, failed, killed_nothing, gone_on = random.Random(arguments.seed), 0, 0, 0
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        folder = Path(name)
        asynchronous_modes.prepare(folder, "tools")
        for round_index in range(arguments.rounds):
            mode = arguments.modes[round_index % len(arguments.modes)]
            victim = draws.choice(arguments.victims)
            moment = draws.randrange(STEPS), draws.uniform(0, LONGEST_S)
            output = folder / f"round-{round_index}"
            began = time.monotonic()
            try:
                starts, killed = run(folder, output, mode, victim, *moment)
                found = problems(output)
            except RuntimeError as error:
                starts, killed, found = 0, victim, [str(error), (output / "log.txt").read_text()[-3000:]]
            failed += bool(found)
            killed_nothing += killed == NOTHING
            seconds, trainer = time.monotonic() - began, ""
            if not found and has_trainer_gone_on(output):
                gone_on, trainer = gone_on + 1, "; the trainer went on"
            said = f"{'FAIL' if found else 'ok  '} {mode:9} {killed}; starts {starts}; {seconds:.0f} s{trainer}"
            print(said, *found, flush=True)
    counted = arguments.rounds - killed_nothing
    print(f"{counted - failed} of {counted} survived; {killed_nothing} ended before something was killed")
    print(f"{gone_on} times only the rollout pool or its router was started again")
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
