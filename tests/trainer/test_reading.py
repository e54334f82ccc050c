"""How much of our code a reader of the smallest GRPO run meets: frames to the loss, files and lines that run."""

from __future__ import annotations

import inspect
import runpy
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest

import verl
from tests.support.tiny_run import make_tiny_run, overrides
from verl.trainer.ppo.trainer import PPOTrainer
from verl.workers.losses import PolicyLoss

# Measured, and never to be raised: a change that makes a road longer makes another one shorter.
MAX_FRAMES = 15
MAX_FILES = 229
MAX_LINES = 17_730
ROOT = Path(verl.__file__).parent


def own_frames() -> list[str]:
    """Return the functions below ``verl/`` on the stack, the outermost first."""
    frame: FrameType | None = sys._getframe(1)
    frames = []
    while frame is not None:
        if (path := Path(frame.f_code.co_filename)).is_relative_to(ROOT):
            frames.append(f"{path.relative_to(ROOT)}:{frame.f_lineno} {frame.f_code.co_qualname}")
        frame = frame.f_back
    return frames[::-1]


@contextmanager
def recorded_functions() -> Iterator[set[CodeType]]:
    """Record the code of every function that is called in the block, in all threads."""
    functions: set[CodeType] = set()

    def record(frame: FrameType, event: str, argument: object) -> None:
        functions.add(frame.f_code)

    threading.setprofile(record)
    sys.setprofile(record)
    try:
        yield functions
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def lines_by_file(functions: set[CodeType]) -> dict[Path, set[int]]:
    """Return the lines of our functions, each from its first line to its last, without those of modules and classes."""
    lines: dict[Path, set[int]] = defaultdict(set)
    for code in functions:
        path = Path(code.co_filename)
        is_function = code.co_flags & inspect.CO_OPTIMIZED  # neither a module nor the body of a class
        if is_function and path.is_relative_to(ROOT):
            last = max(line for _, _, line in code.co_lines() if line is not None)
            lines[path] |= set(range(code.co_firstlineno, last + 1))
    return lines


@pytest.mark.parametrize("prompts_per_optimizer_step", [2, 4])
def test_a_reader_of_the_smallest_run_meets_few_frames_files_and_lines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, prompts_per_optimizer_step: int
) -> None:
    """With several optimizer steps in a batch, and with one, whose own forward pass gives old_log_probs."""
    chains: list[list[str]] = []
    call = PolicyLoss.__call__

    def spy(self: PolicyLoss, *args: Any) -> Any:
        chains.append([*own_frames(), "workers/losses.py PolicyLoss.__call__"])
        return call(self, *args)

    monkeypatch.setattr(PolicyLoss, "__call__", spy)
    # As in a process of its own: in this one, other tests may have imported the public face of the trainer.
    monkeypatch.setattr(PPOTrainer, "default", PPOTrainer)
    changes = {
        "trainer__total_training_steps": 1,
        "trainer__recovery__driver_restarts": 0,
        "actor_rollout_ref__actor__ppo_mini_batch_size": prompts_per_optimizer_step,
        "hydra__run__dir": tmp_path / "hydra",
    }
    monkeypatch.setattr(sys, "argv", ["main_ppo", *overrides(make_tiny_run(tmp_path), tmp_path, **changes)])
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    with recorded_functions() as functions:
        runpy.run_module("verl.trainer.main_ppo", run_name="__main__")
    lines = lines_by_file(functions)
    count = sum(map(len, lines.values()))
    print("\n".join(f"{depth} {frame}" for depth, frame in enumerate(chains[0], 1)))
    print(f"{len(lines)} files, {count} lines of functions")
    assert len(chains[0]) <= MAX_FRAMES
    assert len(lines) <= MAX_FILES
    assert count <= MAX_LINES
