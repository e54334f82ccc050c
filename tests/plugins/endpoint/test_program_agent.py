"""Agent programs in whole runs and in trajectories that go wrong."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.agents.one_engine import OneEngine, prompts
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.loop import read_agent_loops
from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

PROGRAMS = '''
import asyncio, os, subprocess, sys, time
import anthropic, openai

async def answer(task):
    """Ask twice, and a sub-agent once; the answer is a text."""
    async with openai.AsyncOpenAI(base_url=task.base_url, api_key=task.api_key) as client:
        async def ask(messages, model=task.model):
            reply = await client.chat.completions.create(model=model, messages=messages, max_tokens=3)
            return {"role": "assistant", "content": reply.choices[0].message.content}
        talk = [*task.messages]
        talk.append(await ask(talk))
        talk.append({"role": "user", "content": "<|im_end|>Once more."})
        _, check = await asyncio.gather(ask(talk), ask([{"role": "user", "content": "ok?"}], "policy/checker"))
    return str(task.row["extra_info"]["index"])

def does(task):
    return globals()[task.row["does"]](task)

def asked(task, **kwargs):
    with openai.OpenAI(base_url=task.base_url, api_key=task.api_key, max_retries=0) as client:
        reply = client.chat.completions.create(
            model="policy", messages=kwargs.pop("messages", task.messages), max_tokens=2, **kwargs)
        return reply.choices[0].message.content

def good(task):
    asked(task)
    return "42"

def reward(task):
    asked(task)
    return 0.25

def runs_its_own_loop(task):
    return asyncio.run(later(task))

async def later(task):
    return asked(task)

def nothing(task):
    return "42"

def raises(task):
    asked(task)
    raise ValueError(f"no idea, {task.api_key}")

def returns_a_list(task):
    asked(task)
    return [42]

def floods(task):
    asked(task)
    return "42" * 2**20

def sets_temperature(task):
    asked(task, temperature=0.25)

def too_long(task):
    asked(task)
    asked(task, messages=[{"role": "user", "content": "a b c d " * 200}])

def recovers(task):
    try:
        too_long(task)
    except openai.BadRequestError:
        asked(task)
        return "42"

def never_ends(task):
    while True:
        asked(task)

def sleeps(task):
    asked(task)
    time.sleep(4)
    asked(task)
'''
ENDS = {
    "good": ("done", ""),
    "reward": ("done", ""),
    "runs_its_own_loop": ("done", ""),
    "nothing": ("agent_error", "did not ask the policy"),
    "raises": ("agent_error", "ValueError: no idea, ***"),
    "returns_a_list": ("agent_error", "returned [42]"),
    "floods": ("agent_error", "an answer of 2,097,152 characters. At most 1,048,576"),
    "sets_temperature": ("agent_error", "temperature: 0.25 is not the rollout's 1.0"),
    "too_long": ("context_full", ""),
    "recovers": ("done", ""),
}


def loops(folder: Path, text: str) -> Path:
    (folder / "programs.py").write_text(PROGRAMS)
    (folder / "loops.yaml").write_text(text.replace("programs.py", f"{folder}/programs.py"))
    return folder / "loops.yaml"


def test_a_run_with_sub_agents_trains_on_what_was_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    (tmp_path / "reward.py").write_text(
        "def compute_score(data_source, solution_str, ground_truth, extra_info):\n"
        "    assert solution_str == str(extra_info['index'])\n"
        "    return float(solution_str)\n"
    )
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    changes = {
        "data__max_response_length": 64,
        "actor_rollout_ref__rollout__name": "native",
        "actor_rollout_ref__rollout__n": 2,
        "actor_rollout_ref__rollout__agent__agent_loop_config_path": loops(
            tmp_path, "- {name: mine, _target_: program_agent, program: 'programs.py:answer'}"
        ),
        "actor_rollout_ref__rollout__agent__default_agent_loop": "mine",
        "custom_reward_function__path": tmp_path / "reward.py",
        "reward_model__max_error_rate": 0,
        "trainer__total_training_steps": 2,
    }
    run_ppo(compose(overrides(paths, tmp_path, **changes)))
    for line in log.read_text().splitlines():
        metrics = json.loads(line)["data"]
        assert metrics["agent/status/done"] == 1
        assert metrics["training/rollout_probs_diff_max"] < 1e-5
        assert metrics["actor/grad_norm"] >= 0


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Answer prompts by programs that do what is asked of them, on one engine."""
    engine = OneEngine(tmp_path_factory.mktemp("run"))

    def answer(entry: str, does: list[str], **settings: Any) -> DataProto:
        return engine.answer(prompts(does), loops(engine.folder, entry), **settings)

    return answer


def test_each_bad_program_costs_its_own_trajectory(answers, caplog):
    entry = "- {name: mine, _target_: program_agent, program: 'programs.py:does'}"
    columns = answers(entry, list(ENDS), trajectory_timeout_s=300).non_tensor_batch
    names = [name.removeprefix("1-").removesuffix("/0") for name in columns["trajectory_id"]]
    rows = {name: row for row, name in enumerate(names)}
    statuses, messages = columns["trajectory_status"], columns["trajectory_message"]
    assert {name: statuses[row] for name, row in rows.items()} == {name: status for name, (status, _) in ENDS.items()}
    for name, (_, message) in ENDS.items():
        assert message in messages[rows[name]]
    assert columns["agent_answer"][rows["good"]] == "42"
    assert columns["reward_score"][rows["reward"]] == 0.25
    assert "sk-verl" not in caplog.text


def test_programs_that_do_not_end_in_time(answers):
    entry = "- {name: mine, _target_: program_agent, program: 'programs.py:does'}"
    columns = answers(entry, ["never_ends", "sleeps"], trajectory_timeout_s=2).non_tensor_batch
    assert list(columns["trajectory_status"]) == ["timeout"] * 2


COMMAND = """
import json, os, subprocess, sys, time
from anthropic import Anthropic

row = json.load(open(os.environ["VERL_ROW"]))
reply = Anthropic().messages.create(model="policy", max_tokens=2, messages=row["raw_prompt"])
assert reply.usage.output_tokens == 2
linger = [sys.executable, "-c", "import time; time.sleep(300)", "lingers"]
subprocess.Popen(linger)
subprocess.Popen(linger, start_new_session=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
print("  the answer of", row["does"])
sys.stdout.flush()
if row["does"] == "fails":
    sys.exit("I give up: " + os.environ["OPENAI_API_KEY"])
os._exit(0)
"""


def lingering() -> list[int]:
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if "lingers" in (process.info["cmdline"] or []):
            found.append(process.pid)
    return found


def test_a_command_answers_and_leaves_nothing_behind(answers, tmp_path):
    import sys

    (tmp_path / "agent.py").write_text(COMMAND)
    entry = f"- {{name: mine, _target_: program_agent, command: [{sys.executable}, {tmp_path}/agent.py]}}"
    columns = answers(entry, ["good", "fails"]).non_tensor_batch
    assert list(columns["trajectory_status"]) == ["done", "agent_error"]
    assert columns["agent_answer"][0] == "the answer of good"
    assert "ended with status 1. It wrote last: I give up: ***" in columns["trajectory_message"][1]
    deadline = time.monotonic() + 10
    while left := lingering():
        assert time.monotonic() < deadline, left
        time.sleep(0.05)


@pytest.mark.parametrize(
    "entry, said",
    [
        ("{}", "must name `program`"),
        ("{program: 'programs.py:nobody'}", "has no function nobody"),
        ("{program: answer}", "names no function"),
        ("{command: no-such-command-here}", "there is no program no-such-command-here"),
        ("{program: 'programs.py:good', colour: red}", "has colour. Known: program, command, ignore"),
        ("{program: 'programs.py:good', ignore: temperature}", "must be a list"),
    ],
)
def test_a_wrong_entry_ends_the_run_before_it_begins(tmp_path, entry, said):
    path = loops(tmp_path, f"- {{name: mine, _target_: program_agent, {entry[1:-1]}}}")
    [loop] = read_agent_loops(str(path)).values()
    with pytest.raises(ConfigError, match=said):
        loop.load().check_arguments(loop.arguments)
