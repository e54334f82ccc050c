"""The commands of docs/gsm8k.md as they stand there: real problems, a real interpreter, a user, two ranks."""

from __future__ import annotations

import ast
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from verl.interactions.gsm8k_interaction import CORRECT_REPLY, INCORRECT_REPLY
from verl.scorers import gsm8k

ROOT = Path(__file__).parents[2]
SECTION = (ROOT / "docs" / "gsm8k.md").read_text().split("## With an interpreter and a user")[1].split("\n## ")[0]
COMMANDS = re.findall(r"```bash\n(.*?)```", SECTION, re.DOTALL)
PRINTED = re.compile(r"print\(([-+*/(). \d]+)\)")


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_three_steps_of_conversations_with_an_interpreter_and_a_user(tmp_path: Path):
    for name in ("examples", "tests"):
        (tmp_path / name).symlink_to(ROOT / name)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    env = os.environ | {"PATH": path, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for command in COMMANDS:
        ended = subprocess.run(["bash", "-ec", command], cwd=tmp_path, env=env, capture_output=True, text=True)
        assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-4000:]

    records = [json.loads(line) for line in (tmp_path / "gsm8k" / "agents.jsonl").read_text().splitlines()]
    steps = {record["step"]: record["data"] for record in records if "actor/grad_norm" in record.get("data", {})}
    assert list(steps) == [1, 2, 3]
    for metrics in steps.values():
        assert metrics["reward/error_rate"] == 0
        assert metrics["num_turns/mean"] > 3  # a prompt, a call, its result, an answer
        assert metrics["actor/grad_norm"] > 0

    dumps = sorted((tmp_path / "data" / "gsm8k_agents" / "rollouts").glob("*.jsonl"))
    rows = [json.loads(line) for path in dumps for line in path.read_text().splitlines()]
    assert len(rows) == 3 * 8 * 4
    results, said = 0, set()
    for row in rows:
        talk = row["trajectory"]["conversation"]
        for turn, answer in itertools.pairwise(talk):
            calls = turn.get("tool_calls") or []  # a malformed call is none
            if answer["role"] == "tool" and calls and (value := calculated(calls[0])) is not None:
                results += 1
                assert float(answer["content"]) == pytest.approx(value)
            if turn["role"] == "assistant" and answer["role"] == "user":
                said.add(answer["content"])
                is_right = gsm8k.compute_score(turn["content"], row["gts"]) == 1
                assert answer["content"] == (CORRECT_REPLY if is_right else INCORRECT_REPLY)
    assert results > len(rows) / 2
    assert INCORRECT_REPLY in said


def calculated(call: dict[str, Any]) -> float | None:
    """What a call prints by Python's arithmetic; None if it does not print a calculation."""
    printed = PRINTED.fullmatch(json.loads(call["function"]["arguments"])["code"])
    try:
        return printed and eval(compile(ast.parse(printed[1], mode="eval"), "", "eval"), {"__builtins__": {}})
    except (SyntaxError, ZeroDivisionError, TypeError):
        return None
