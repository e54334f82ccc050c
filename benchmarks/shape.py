"""What the speed benchmarks share: the work, the random model, contestants that take turns, the machine.

A comparison is a ratio of two things measured in one run. Each contestant lives in a process of its own, which is
ready once it has warmed up, sleeps while another one runs, and is asked for one more repetition by a line on its
standard input. So they see the same machine at the same time, and no one's threads or allocator disturb another's.

This module imports the standard library alone at first, so that a process in another environment can use it.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
FIRST_ORDINARY_TOKEN = 4
"""The character tokenizer's ids below it are special."""


@dataclass(frozen=True, kw_only=True)
class Work:
    """A Qwen3 shape, and how many tokens it makes."""

    hidden: int = 256
    layers: int = 6
    heads: int = 4
    head_dim: int = 64
    key_value_heads: int = 2
    intermediate: int = 768
    vocabulary: int = 104
    prompts: int = 8
    prompt_length: int = 24
    samples: int = 8
    """Responses to each prompt."""
    response_length: int = 128

    @property
    def sequences(self) -> int:
        """Responses in all."""
        return self.prompts * self.samples

    @property
    def response_tokens(self) -> int:
        """Tokens that a rollout makes; no response ends early."""
        return self.sequences * self.response_length

    @property
    def parameters(self) -> int:
        """Weights of the model, whose head is its embedding."""
        attention = self.hidden * self.head_dim * 2 * (self.heads + self.key_value_heads) + 2 * self.head_dim
        layer = attention + 3 * self.hidden * self.intermediate + 2 * self.hidden
        return self.vocabulary * self.hidden + self.layers * layer + self.hidden

    def generate(self, model: Any, ids: Any, **options: Any) -> Any:
        """All samples of the prompts ``ids`` by Transformers' ``generate``, drawn from the whole distribution."""
        return model.generate(
            input_ids=ids,
            attention_mask=ids.new_ones(ids.shape),
            do_sample=True,
            temperature=1.0,
            top_k=0,
            top_p=1.0,
            num_return_sequences=self.samples,
            max_new_tokens=self.response_length,
            pad_token_id=0,
            **options,
        )

    def describe(self) -> str:
        """In a sentence."""
        return (
            f"Qwen3 shape of {self.parameters / 1e6:.2f} M parameters (hidden {self.hidden}, {self.layers} layers, "
            f"{self.heads} heads of {self.head_dim}, {self.key_value_heads} key/value heads, intermediate "
            f"{self.intermediate}, vocabulary {self.vocabulary}); {self.prompts} prompts of {self.prompt_length} "
            f"tokens x {self.samples} samples, {self.response_length} new tokens each"
        )

    def prompt_ids(self) -> list[list[int]]:
        """The prompts, the same in every process."""
        import random

        draw = random.Random(0)
        tokens = range(FIRST_ORDINARY_TOKEN, self.vocabulary)
        return [draw.choices(tokens, k=self.prompt_length) for _ in range(self.prompts)]

    def save_model(self, folder: str | Path, **overrides: Any) -> str:
        """Config, random weights and the character tokenizer, as ``save_pretrained`` writes them."""
        from verl.testing.models import tiny_model_dir

        return tiny_model_dir(
            folder,
            family="qwen3",
            vocab=self.vocabulary,
            hidden_size=self.hidden,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            head_dim=self.head_dim,
            num_key_value_heads=self.key_value_heads,
            intermediate_size=self.intermediate,
            initializer_range=0.02,
            tie_word_embeddings=True,
            **overrides,
        )


TINY = Work(
    hidden=32,
    layers=2,
    heads=2,
    head_dim=32,
    key_value_heads=1,
    intermediate=64,
    prompts=2,
    prompt_length=24,
    samples=2,
    response_length=4,
)
"""For tests of the benchmarks themselves."""


# ---- contestants --------------------------------------------------------------------------------


class Turns:
    """A contestant's side of the pipe; whatever else its process writes to standard output goes to its log."""

    def __init__(self) -> None:
        self._replies = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)

    def ready(self, **facts: Any) -> None:
        """Warmed up; ``facts`` are told once."""
        self._replies.write(json.dumps(facts) + "\n")

    def wait(self) -> bool:
        """Sleep until it is this contestant's turn; False when there are no more."""
        return bool(sys.stdin.readline())

    def done(self, seconds: float, **facts: Any) -> None:
        """The turn took ``seconds``."""
        self._replies.write(json.dumps({"seconds": seconds, **facts}) + "\n")

    def serve(self, run: Callable[[], Mapping[str, Any] | None], warm_up: int = 1, **facts: Any) -> None:
        """Warm up, then run once per turn until there are no more."""
        for _ in range(warm_up):
            run()
        self.ready(**facts)
        while self.wait():
            start, cpu_start = time.perf_counter(), time.process_time()
            found = run() or {}
            self.done(time.perf_counter() - start, cpu_s=time.process_time() - cpu_start, **found)


class Contestant:
    """A process that takes turns."""

    def __init__(self, name: str, command: Sequence[str | Path], env: Mapping[str, str]) -> None:
        self.name = name
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115  closed with the process
        self._process = subprocess.Popen(
            [str(part) for part in command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            cwd=ROOT,
            env=os.environ | {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"} | dict(env),
        )
        self.facts: dict[str, Any] = {}

    def wait_until_ready(self) -> None:
        """Take in its ``facts``."""
        self.facts = self._reply()

    def run(self) -> dict[str, Any]:
        """One turn; its seconds and what else it says."""
        assert self._process.stdin is not None
        self._process.stdin.write("run\n")
        self._process.stdin.flush()
        return self._reply()

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(timeout=30)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._log.close()

    def _reply(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            self._process.wait()
            self._log.seek(0)
            raise SystemExit(f"{self.name} ended early:\n{self._log.read()[-4000:]}")
        return json.loads(line)


@contextlib.contextmanager
def contestants(commands: Mapping[str, tuple[Sequence[str | Path], Mapping[str, str]]]) -> Iterator[list[Contestant]]:
    """Processes by (command, environment), all ready; ended at the end, also after an error."""
    started: list[Contestant] = []
    try:
        started += [Contestant(name, command, env) for name, (command, env) in commands.items()]
        for contestant in started:
            contestant.wait_until_ready()
        yield started
    finally:
        for contestant in started:
            contestant.close()


def take_turns(players: Sequence[Contestant], rounds: int) -> dict[str, list[dict[str, Any]]]:
    """Each in turn, in an order that is turned round every time; the replies of each.

    One more round than ``rounds``, whose replies are dropped: it warms up what the crowded start left cold.
    """
    replies: dict[str, list[dict[str, Any]]] = {player.name: [] for player in players}
    for number in range(rounds + 1):
        for player in players if number % 2 == 0 else reversed(players):
            replies[player.name].append(player.run())
    return {name: found[1:] for name, found in replies.items()}


@dataclass(frozen=True)
class Comparison:
    """What contestants told, by name, when they had taken their turns."""

    facts: dict[str, dict[str, Any]]
    replies: dict[str, list[dict[str, Any]]]

    @property
    def seconds(self) -> dict[str, dict[str, Any]]:
        """The summary of each contestant's times."""
        return {name: summary([reply["seconds"] for reply in found]) for name, found in self.replies.items()}

    def named(self, suffix: str) -> Comparison:
        """The same with other names, to stand beside another comparison."""
        facts = {f"{name}{suffix}": value for name, value in self.facts.items()}
        return Comparison(facts, {f"{name}{suffix}": value for name, value in self.replies.items()})

    def __or__(self, other: Comparison) -> Comparison:
        """Both, which share no name."""
        return Comparison(self.facts | other.facts, self.replies | other.replies)

    def print_times(self, more: Mapping[str, str] | None = None) -> None:
        """One line for each contestant; ``more`` is what stands at its end."""
        for name, found in self.seconds.items():
            print(f"{name:20}{found['median']:8.3f} s (least {found['min']:.3f}){(more or {}).get(name, '')}")

    def write(self, path: str | None, *, part: str, work: str, rows: Sequence[Row], **more: Any) -> None:
        """The result of a part, with the machine and the times."""
        common = {"machine": machine(), "seconds": self.seconds, "facts": self.facts, "rows": rows}
        write_result(path, part=part, work=work, **common, **more)


def compare(
    commands: Mapping[str, tuple[Sequence[str | Path], Mapping[str, str]]],
    rounds: int,
) -> Comparison:
    """Start the contestants, let them take turns, and end them."""
    with contestants(commands) as players:
        return Comparison({player.name: player.facts for player in players}, take_turns(players, rounds))


def interleaved(calls: Mapping[str, Callable[[], object]], rounds: int, warm_up: int = 2) -> dict[str, list[float]]:
    """Seconds of each call, all in this process, in turn; rounds that warm up are left out."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds + warm_up):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return {name: values[warm_up:] for name, values in seconds.items()}


# ---- results ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One line of the table of results."""

    what: str
    against: str
    ratio: float | None
    """None: not measured, for the reason in ``detail``."""
    target: float | None
    """None: no target of its own; it says what part another row's figure has."""
    at_least: bool
    """The ratio shall not be below the target; else not above it."""
    detail: str

    @property
    def is_met(self) -> bool | None:
        """Whether the target is reached; None where nothing was measured, or there is none."""
        if self.ratio is None or self.target is None:
            return None
        return self.ratio >= self.target if self.at_least else self.ratio <= self.target


def summary(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, minimum and all of them."""
    return {"median": statistics.median(seconds), "min": min(seconds), "all": list(seconds)}


def speed_row(
    what: str, against: str, seconds: Mapping[str, Mapping[str, Any]], ours: str, theirs: str, target: float | None
) -> Row:
    """How many times faster ``ours`` is, by the least time of each: what is added to it is other programs' doing."""
    mine, other = seconds[ours]["min"], seconds[theirs]["min"]
    medians = seconds[theirs]["median"] / seconds[ours]["median"]
    return Row(what, against, other / mine, target, True, f"{mine:.3g} s : {other:.3g} s; by the medians {medians:.2f}")


def write_result(path: str | None, **result: Any) -> None:
    """A part's result as JSON, with its rows; it is also printed if there is no path."""
    result["rows"] = [asdict(row) for row in result.get("rows", [])]
    text = json.dumps(result, indent=1)
    if path is None:
        print(text)
    else:
        Path(path).write_text(text + "\n")


def machine() -> dict[str, Any]:
    """What it was measured on."""
    model = platform.processor() or platform.machine()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.partition(":")[2].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {"cpu": model, "cores": cores(), "memory_gib": round(memory), "python": platform.python_version()}


def cores() -> int:
    """That this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def versions(*packages: str) -> dict[str, str]:
    """Of the packages that are installed here."""
    found = {}
    for package in packages:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[package] = importlib.metadata.version(package)
    return found


def parser(description: str | None) -> argparse.ArgumentParser:
    """The arguments of every part: ``--json``, ``--tiny``, ``--rounds``, ``--threads``."""
    made = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--json", help="write the result there instead of printing it")
    made.add_argument("--tiny", action="store_true", help="the smallest work, to test the benchmark itself")
    made.add_argument("--rounds", type=int, default=5, help="turns of each contestant that count")
    made.add_argument("--threads", type=int, default=cores(), help="of each process; the cores by default")
    return made


def conversations_parser(description: str | None, conversations: int, turns: int) -> argparse.ArgumentParser:
    """The arguments of parts that hold conversations; each contestant is the same command with ``--contestant``."""
    made = parser(description)
    made.add_argument("--conversations", type=int, default=conversations)
    made.add_argument("--turns", type=int, default=turns)
    made.add_argument("--contestant", help=argparse.SUPPRESS)
    made.add_argument("--model", help=argparse.SUPPRESS)
    return made


def compare_conversations(part: str, arguments: argparse.Namespace, work: Work, names: Sequence[str]) -> Comparison:
    """Start ``python -m benchmarks.PART`` once for each contestant, with a model of the shape of ``work``."""
    sizes = [f"--conversations={arguments.conversations}", f"--turns={arguments.turns}"]
    options = [*sizes, *(["--tiny"] if arguments.tiny else [])]
    with tempfile.TemporaryDirectory() as folder:
        model = work.save_model(os.path.join(folder, "model"))
        command = [sys.executable, "-m", f"benchmarks.{part}", *options, "--model", model]
        threads = {"OMP_NUM_THREADS": str(arguments.threads)}
        return compare({name: ([*command, "--contestant", name], threads) for name in names}, arguments.rounds)
