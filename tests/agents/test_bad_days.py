"""Two hundred conversations with tools and agent programs, of which some meet every fault there is.

Each costs itself, and nobody else.
"""

from __future__ import annotations

import gc
import json
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.support import scripted_agent
from tests.support.scripted_agent import BAD_CALLS, call, good_script
from tests.support.scripted_programs import MAX_TOKENS, PROGRAM_ENDS
from tests.support.tiny_run import countdown_rows, make_tiny_run, overrides, write_jsonl
from tests.support.waiting import eventually
from verl.experience.lockstep import Lockstep
from verl.protocol import DataProto
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import TaskRunner, run_ppo
from verl.trainer.ppo.trainer import PPOTrainer

CONVERSATIONS = 200
FAILURES = {
    "raise": "tool_error",
    "exit": "tool_error",
    "hang": "tool_timeout",
    "flood": None,
    "bytes": "tool_error",
    "surrogate": None,
    "wrong type": "wrong_arguments",
    "no object": "wrong_arguments",
    "no JSON": "wrong_arguments",
    "unknown tool": "unknown_tool",
    "killed process": "tool_error",
    "forked process": None,
    "hanging process": "tool_timeout",
    "server that dies": "tool_error",
}
"""How the failure of each bad call is counted; None if the conversation goes on with a result."""
TRAJECTORY_TIMEOUT_S = 120
PROGRAM_EVERY = 10
"""One of so many rows is answered by an agent program."""


class KeepingSource(Lockstep):
    """Keeps the trajectories of the step."""

    batch: DataProto

    def rollout(self, *args: Any, **kwargs: Any) -> DataProto:
        batch = super().rollout(*args, **kwargs)
        KeepingSource.batch = batch
        return batch


class KeepingTrainer(PPOTrainer):
    experience_class = KeepingSource


class KeepingRunner(TaskRunner):
    def trainer_class(self) -> type[PPOTrainer]:
        return KeepingTrainer


@pytest.fixture
def play(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[int, dict[str, Any]]]:
    """Run one step whose rows have scripts; the trajectory of each row."""
    paths = make_tiny_run(tmp_path)
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    settings = scripted_agent.settings(tmp_path) | {
        "data__train_batch_size": CONVERSATIONS,
        "actor_rollout_ref__actor__ppo_mini_batch_size": CONVERSATIONS,
        "actor_rollout_ref__rollout__n": 1,
        "actor_rollout_ref__rollout__agent__num_workers": 2,
        "actor_rollout_ref__rollout__agent__trajectory_timeout_s": TRAJECTORY_TIMEOUT_S,
        "algorithm__adv_estimator": "reinforce_plus_plus",
        "trainer__total_training_steps": 1,
    }

    def run(bad: dict[int, Any], **changes: Any) -> dict[int, dict[str, Any]]:
        rows = countdown_rows(CONVERSATIONS)
        for number, row in enumerate(rows):
            if number % PROGRAM_EVERY == 0:
                row["agent_name"], script = "program", [bad.get(number, "good"), TRAJECTORY_TIMEOUT_S]
            else:
                row["agent_name"], script = "scripted", good_script(number)
                if number in bad:
                    script[1] = [bad[number]]
            row["script"] = json.dumps(script)
        train = write_jsonl(tmp_path / "train.jsonl", rows)
        run_ppo(compose(overrides(paths | {"train": train}, tmp_path, **(settings | changes))), KeepingRunner)
        batch = KeepingSource.batch
        columns, tensors = batch.non_tensor_batch, batch.batch
        return {
            int(number): {
                "tokens": tensors["input_ids"][place].tolist(),
                "mask": tensors["response_mask"][place].tolist(),
                "log_probs": tensors["rollout_log_probs"][place].tolist(),
                **{name: columns[name][place] for name in ("trajectory_status", "tool_failures", "tool_rewards")},
            }
            for place, number in enumerate(columns["row_index"])
        }

    return run


def parting(ours: dict[str, Any], theirs: dict[str, Any]) -> str:
    """Where two runs of a conversation part: rounding leaves log-probs before that place alike, a fault may not."""
    pairs = enumerate(zip(ours["tokens"], theirs["tokens"], strict=True))
    places = [place for place, (one, other) in pairs if one != other]
    if not places:
        return "the tokens are the same"
    first = places[0] - len(ours["tokens"]) + len(ours["mask"])  # in the response
    near = slice(max(first - 3, 0), first + 3)
    told = [[run[name][near] for name in ("mask", "log_probs")] for run in (ours, theirs)]
    return f"tokens {places} of {len(ours['tokens'])} differ; near the first, mask and log-probs: {told}"


def check_others(found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]], bad: dict[int, Any]) -> None:
    """Those without a bad call are as in the run without any."""
    assert len(found) == len(expected) == CONVERSATIONS
    for number in found.keys() - bad.keys():
        ours, theirs = found[number], expected[number]
        for name in ("tokens", "mask", "trajectory_status", "tool_failures"):
            assert ours[name] == theirs[name], (number, name, parting(ours, theirs))
        assert ours["log_probs"] == pytest.approx(theirs["log_probs"], abs=1e-5)
    ended = Counter(one["trajectory_status"] for one in expected.values())
    assert ended["done"] > CONVERSATIONS / 2, ended
    assert any(sum(one["mask"]) < len(one["mask"]) for one in expected.values())


def bad_calls() -> dict[int, list[str]]:
    """A bad call of each kind, spread over the conversations."""
    return {7 + 14 * place: BAD_CALLS[name] for place, name in enumerate(FAILURES)}


def check_bad(found: dict[int, dict[str, Any]]) -> None:
    """Each bad call that the policy's turns left room for was counted as what it is."""
    reached = 0
    for number, name in zip(bad_calls(), FAILURES, strict=True):
        one, failure = found[number], FAILURES[name]
        assert one["trajectory_status"] in ("done", "context_full"), name
        if len(one["tool_rewards"]) >= 2:  # the second turn made its call
            reached += 1
            assert one["tool_failures"] == ({failure: 1} if failure else {}), name
    assert reached >= len(FAILURES) - 3


def bad_programs(*but: str) -> dict[int, str]:
    """A bad program of each kind, spread over the conversations that programs hold."""
    names = [name for name in PROGRAM_ENDS if name not in ("good", *but)]
    return {2 * PROGRAM_EVERY * place: name for place, name in enumerate(names)}


def check_bad_programs(
    found: dict[int, dict[str, Any]], expected: dict[int, dict[str, Any]], bad: dict[int, str]
) -> None:
    """Each ended as it should, with the tokens of its calls that were answered alone."""
    for number, name in bad.items():
        ours, theirs = found[number], expected[number]
        assert theirs["trajectory_status"] == "done"
        assert ours["trajectory_status"] == PROGRAM_ENDS[name], name
        drawn = sum(ours["mask"])
        if PROGRAM_ENDS[name] == "done":  # what was refused has left nothing behind
            assert (ours["tokens"], ours["mask"]) == (theirs["tokens"], theirs["mask"]), name
        elif name == "does not ask":
            assert drawn == 0
        else:
            assert 1 <= drawn <= MAX_TOKENS, name
            end = len(ours["tokens"]) - len(ours["mask"]) + drawn
            assert ours["tokens"][:end] == theirs["tokens"][:end], (name, parting(ours, theirs))


def left_over(known: set[int]) -> list[str]:
    """Threads and children of this process that belong to trajectories."""
    gc.collect()  # reward processes end with the object that holds them
    names = ("trajectory ", "tool", "agent loops", "to_thread", "requests", "endpoint")
    threads = [thread.name for thread in threading.enumerate() if thread.name.startswith(names)]
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in known]
    return threads + [" ".join(child.cmdline()) for child in children if child.status() != psutil.STATUS_ZOMBIE]


@pytest.mark.slow
def test_bad_tools_and_programs_cost_their_own_conversations_and_nothing_is_left(play):
    known = {child.pid for child in psutil.Process().children(recursive=True)}
    expected = play({})
    eventually(lambda: not left_over(known), lambda: str(left_over(known)), 30)
    files = psutil.Process().num_fds()
    programs = bad_programs("blocks")  # its thread never ends
    bad = bad_calls() | programs
    found = play(bad)
    check_others(found, expected, bad)
    check_bad(found)
    check_bad_programs(found, expected, programs)
    eventually(lambda: not left_over(known), lambda: str(left_over(known)), 30)
    assert psutil.Process().num_fds() <= files + 2


@pytest.mark.slow
def test_processes_that_end_or_stop_in_a_call_cost_their_own_conversations(play, ray_cluster):
    ray_settings = {"trainer__controller": "ray", "actor_rollout_ref__rollout__agent__hang_timeout_s": 10}
    before = set(psutil.pids())
    expected = play({}, **ray_settings)
    programs = bad_programs()
    bad: dict[int, Any] = bad_calls() | programs
    bad |= {
        3: call("fail", how="end the process"),
        4: call("fail", how="stop the process"),
        5: call("fail", how="fork"),
    }
    found = play(bad, **ray_settings)
    check_others(found, expected, bad)
    check_bad(found)
    check_bad_programs(found, expected, programs)
    assert {found[number]["trajectory_status"] for number in (3, 4)} == {"agent_error"}
    assert found[5]["trajectory_status"] == "done"

    def forked() -> list[int]:
        # A zombie has no command line.
        running = psutil.process_iter(["uids", "cmdline"])
        mine = [one for one in running if one.pid not in before and one.info["uids"].real == os.getuid()]
        return [one.pid for one in mine if "WorkerActor" in " ".join(one.info["cmdline"] or ())]

    eventually(lambda: not forked(), lambda: str(forked()), 30)
