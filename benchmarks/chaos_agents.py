"""The agents of chaos.py: tools and programs, good and bad, whose calls stand in the rows.

The same calls go wrong in the undisturbed run too (``tests.support.scripted_agent`` and ``scripted_programs``): so the
rows that fail are the same, and the final weights are to be. In rounds that say so, a good tool ends or stops the
process of agent loops in the middle of its call, once.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
from pathlib import Path
from typing import Any

from tests.support import scripted_agent
from tests.support.scripted_agent import BAD_CALLS, fail, fail_apart, good_script
from tests.support.scripted_programs import PROGRAMS
from tests.support.tiny_run import countdown_rows, write_jsonl
from verl.testing.models import tiny_model_dir
from verl.tools.function_tool import function_tool

PROMPTS = 32
"""Of a step."""
ORDER, OBEYED = "order", "obeyed"
"""Files beside the plan: a signal that a tool sends to its own process, and that it did."""
SLOW_CALLS = ("hang", "hanging process")
SLOW_PROGRAMS = ("never ends", "asks too late", "blocks")
SLOW_STEP = 3
"""The step whose rows have the calls and programs that take all of their time."""
_marked = (fail, fail_apart)  # tools of this module too


@function_tool
def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: the one.
        b: the other.
    """
    order = Path(os.environ["CHAOS_PLAN"]).with_name(ORDER)
    try:
        order.rename(order.with_name(OBEYED))  # one call alone
    except FileNotFoundError:
        return a + b
    os.kill(os.getpid(), signal.Signals(int(order.with_name(OBEYED).read_text())))
    return a + b


def compute_score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any) -> float:
    """Share of digits: a score that nearly all responses have in part."""
    return sum(character.isdigit() for character in solution_str) / 16


def rows(steps: int, trajectory_s: float) -> list[dict[str, Any]]:
    """Prompts with scripts: in each step eight bad calls and eight programs, and the slow ones in one step."""
    made = countdown_rows(PROMPTS * steps)
    calls = itertools.cycle(name for name in BAD_CALLS if name not in SLOW_CALLS)
    programs = itertools.cycle(name for name in PROGRAMS if name not in SLOW_PROGRAMS)
    for number, row in enumerate(made):
        step, place = number // PROMPTS + 1, number % PROMPTS
        script, row["agent_name"] = good_script(number), "scripted"
        if step == SLOW_STEP and place < len(SLOW_CALLS):
            script[1] = [BAD_CALLS[SLOW_CALLS[place]]]
        elif step == SLOW_STEP and place < len(SLOW_CALLS) + len(SLOW_PROGRAMS):
            script, row["agent_name"] = [SLOW_PROGRAMS[place - len(SLOW_CALLS)], trajectory_s], "program"
        elif place % 4 == 1:
            script[1] = [BAD_CALLS[next(calls)]]
        elif place % 4 == 3:
            script, row["agent_name"] = [next(programs), trajectory_s], "program"
        row["script"] = json.dumps(script)
    return made


def settings(folder: Path, steps: int, trajectory_s: float) -> dict[str, object]:
    """Write model, data and loops of the run, whose trajectories may take so many seconds; its overrides."""
    model = tiny_model_dir(folder / "tiny_model", family="qwen3")
    data = write_jsonl(folder / "agents.jsonl", rows(steps, trajectory_s))
    scripted = {key.replace("__", "."): value for key, value in scripted_agent.settings(folder).items()}
    rollout = "actor_rollout_ref.rollout"
    return scripted | {
        "data.train_files": data,
        "data.val_files": data,
        "data.shuffle": False,
        "data.train_batch_size": PROMPTS,
        "data.max_prompt_length": 32,
        "actor_rollout_ref.model.path": model,
        "critic.model.path": model,
        "actor_rollout_ref.actor.ppo_mini_batch_size": PROMPTS // 2,
        "critic.ppo_mini_batch_size": PROMPTS // 2,
        "custom_reward_function.path": __file__,
        f"{rollout}.multi_turn.function_tool_path": __file__,
        f"{rollout}.agent.num_workers": 2,
        f"{rollout}.agent.trajectory_timeout_s": trajectory_s,
        "trainer.test_freq": -1,
    }
