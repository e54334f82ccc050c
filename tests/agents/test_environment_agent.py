"""Episodes of environments: their tokens, masks and scores, how they end, and what bad environments cost."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.agents.script import END, Script
from tests.support.tiny_run import make_tiny_run, overrides
from verl.agents.loop import AgentLoopOutput
from verl.agents.policy import SampleId
from verl.agents.worker import AgentLoopWorker, Trajectory, TrajectoryResult
from verl.config import PPOConfig
from verl.environments.base import Environment
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.reward_manager.scores import Scores, checked_score, place_scores
from verl.workers.rollout.request import SamplingParams

PROMPT = [{"role": "user", "content": "Play."}]


class Given(Environment):
    """Answers as the row says: ``steps`` are what step returns, one after the other; a function is called."""

    closed: list[Given] = []
    seeds: list[int] = []

    def reset(self, *, seed: int, messages: list[dict], first: Any = "Begin.", tools: Any = (), **row: Any) -> Any:
        self.seeds.append(seed)
        self.row, self.tools, self.actions = row, tools, []
        return first() if callable(first) else first

    def step(self, action: str, **kwargs: Any) -> Any:
        self.actions.append((action, kwargs))
        answer = self.row["steps"][len(self.actions) - 1]
        return answer() if callable(answer) else answer

    def score(self) -> Any:
        return self.row.get("rest")

    def close(self) -> None:
        self.closed.append(self)
        if self.row.get("closes_badly"):
            raise OSError("it is gone already")


@pytest.fixture(autouse=True)
def nothing_closed() -> None:
    Given.closed.clear()
    Given.seeds.clear()


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """Make a worker for changed settings of the entry or, with dots, of the run."""
    folder = tmp_path_factory.mktemp("run")
    paths = make_tiny_run(folder)
    tokenizer = hf_tokenizer(paths["model"])
    tokenizer.chat_template = "{% for t in tools or [] %}{{ t.function.description }}\n{% endfor %}" + str(
        tokenizer.chat_template
    )

    made: dict[str, tuple[AgentLoopWorker, Script]] = {}

    def worker(texts: list[str], **changes: Any) -> tuple[AgentLoopWorker, Script]:
        key = str(changes)
        if key not in made:
            script = Script(tokenizer)
            made[key] = AgentLoopWorker(settings_of(changes), tokenizer, None, script), script
        made[key][1].begin(texts)
        return made[key]

    def settings_of(changes: dict[str, Any]) -> PPOConfig:
        entry = {name: changes.pop(name) for name in list(changes) if "__" not in name}
        path = folder / f"environments-{abs(hash(str(entry)))}.yaml"
        own = {"name": "given", "class_name": f"{__name__}.Given", **entry}
        path.write_text(yaml.safe_dump({"environment": [own]}))
        rollout = "actor_rollout_ref__rollout__"
        keys = {
            "data__max_prompt_length": 200,
            "data__max_response_length": 400,
            f"{rollout}multi_turn__environment_config_path": path,
            f"{rollout}agent__default_agent_loop": "environment_agent",
            f"{rollout}agent__tool_timeout_s": 0.5,
        }
        return load_config(compose(overrides(paths, folder, **(keys | changes))))

    worker.tokenizer = tokenizer  # pyright: ignore[reportFunctionMemberAccess]
    return worker


def trajectory(row: dict[str, Any], sample: int = 0, prompt: Any = PROMPT, uid: str = "1-0") -> Trajectory:
    return Trajectory(
        agent_name="environment_agent",
        sample=SampleId(step=1, uid=uid, sample_index=sample, prompt_ids=(5, 6)),
        sampling=SamplingParams(seed=1, max_tokens=400),
        row={"raw_prompt": prompt, "environment_kwargs": row},
    )


def play(worker: AgentLoopWorker, *rows: dict[str, Any], **more: Any) -> list[TrajectoryResult]:
    async def all_of_them() -> list[TrajectoryResult]:
        return await asyncio.gather(*(worker.run(trajectory(row, **more)) for row in rows))

    return asyncio.run(all_of_them())


def parts(tokenizer: Any, output: AgentLoopOutput) -> list[tuple[int, str]]:
    """The runs of the mask, with their texts."""
    found: list[tuple[int, list[int]]] = []
    for token, mask in zip(output.response_ids, output.response_mask, strict=True):
        if not found or found[-1][0] != mask:
            found.append((mask, []))
        found[-1][1].append(token)
    return [(mask, tokenizer.decode(ids)) for mask, ids in found]


def test_an_episode_is_a_conversation_whose_actions_are_trained_on(run):
    worker, script = run(["I go left", "and up"])
    steps = [("A wall.", 0.25, False, False, {}), ("", 1, True, False, {"where": (0, 1)})]
    [result] = play(worker, {"steps": steps, "rest": 0.5})
    output = result.outputs[0]
    assert (result.status, output.num_turns) == ("done", 4)
    decode = run.tokenizer.decode
    assert decode(output.prompt_ids) == "<user>Play.\n\nBegin.<assistant>"
    assert parts(run.tokenizer, output) == [
        (1, f"I go left{END}"),
        (0, "<user>A wall.<assistant>"),
        (1, f"and up{END}"),
    ]
    # The last turn's own 1, and 0.5 of the whole episode.
    assert output.extra_fields["turn_scores"] == [0.25, 1.5]
    assert output.extra_fields["environment_info"] == {"where": [0, 1]}
    assert output.response_logprobs == [-0.25 * mask for mask in output.response_mask]
    assert output.extra_fields["rendering_differences"] == {}
    assert output.conversation is not None
    assert [(said["role"], said["content"], said.get("reward")) for said in output.conversation] == [
        ("user", "Play.\n\nBegin.", None),
        ("assistant", "I go left", 0.25),
        ("user", "A wall.", None),
        ("assistant", "and up", 1.0),
    ]
    [environment] = Given.closed
    assert environment.actions == [("I go left", {}), ("and up", {})]
    assert (
        script.prompts[1] == output.prompt_ids + output.response_ids[: len(script.prompts[1]) - len(output.prompt_ids)]
    )


@settings(max_examples=25, deadline=None)
@given(
    turns=st.lists(
        st.tuples(st.text("ab <eos>\n", max_size=6), st.text("xyz <eos><assistant>", max_size=8), st.floats(-2, 2)),
        min_size=1,
        max_size=4,
    )
)
def test_masks_and_scores_of_any_episode(run, turns: list[tuple[str, str, float]]):
    """Exactly the drawn tokens have mask 1, and the score of each turn is on the last of them."""
    drawn = [run.tokenizer(text + END, add_special_tokens=False)["input_ids"] for text, _, _ in turns]
    worker, _ = run([text for text, _, _ in turns])
    last = len(turns) - 1
    steps = [(said, reward, number == last, False, None) for number, (_, said, reward) in enumerate(turns)]
    [result] = play(worker, {"steps": steps})
    output = result.outputs[0]
    expected_mask, place, ends = [], 0, []
    for ids in drawn:
        while output.response_mask[place] == 0:
            place += 1
            expected_mask.append(0)
        assert output.response_ids[place : place + len(ids)] == ids
        expected_mask += [1] * len(ids)
        place += len(ids)
        ends.append(place - 1)
    assert output.response_mask == expected_mask
    scores = Scores([checked_score({"turn_scores": output.extra_fields["turn_scores"]})])
    tokens = place_scores(scores, torch.tensor([output.response_mask])).tokens
    assert tokens is not None
    expected = torch.zeros(1, len(expected_mask))
    expected[0, ends] = torch.tensor([reward for _, _, reward in turns], dtype=torch.float32)
    torch.testing.assert_close(tokens, expected, rtol=0, atol=0)


GOES_ON = ("On.", 1.0, False, False, {})
KEY = "actor_rollout_ref__rollout__multi_turn__"


@pytest.mark.parametrize(
    ("texts", "row", "changes", "status", "scores"),
    [
        (["a"], {"steps": [("", 2, True, False, {})]}, {}, "done", [2.0]),
        (["a"], {"steps": [("", 2, False, True, {})]}, {}, "turns_used_up", [2.0]),
        (["a", "b"], {"steps": [GOES_ON] * 2}, {f"{KEY}max_assistant_turns": 2}, "turns_used_up", [1.0, 1.0]),
        (["a", "b"], {"steps": [GOES_ON] * 2}, {f"{KEY}max_user_turns": 1}, "turns_used_up", [1.0, 1.0]),
        (["a"], {"steps": [GOES_ON], "rest": 3}, {f"{KEY}max_assistant_turns": 1}, "turns_used_up", [4.0]),
        (["a" * 500], {"steps": [GOES_ON]}, {}, "context_full", [1.0]),
        (["a" * 500], {"steps": [("", 2, True, False, {})]}, {}, "done", [2.0]),
        (["a"], {"steps": [("o" * 399, 1, False, False, {})]}, {}, "context_full", [1.0]),
        (["a"], {"steps": [("", None, True, False, {})]}, {}, "done", None),
        (["a", "b"], {"steps": [("On.", None, False, False, {}), ("", 0.0, True, False, {})]}, {}, "done", [0.0, 0.0]),
    ],
)  # fmt: skip
def test_how_episodes_end(run, texts, row, changes, status, scores):
    worker, _ = run(texts, **changes)
    [result] = play(worker, row)
    assert (result.status, result.message) == (status, "")
    assert result.outputs[0].extra_fields["turn_scores"] == scores
    assert len(result.outputs[0].response_ids) <= 400
    assert len(Given.closed) == 1


def test_a_turn_may_have_so_many_tokens_and_an_observation_too(run):
    worker, _ = run(["ab" * 20, "c"], max_action_tokens=6, max_observation_tokens=40)
    flood = "left" + "x" * 1_000_000 + "right"
    [result] = play(worker, {"first": flood, "steps": [(flood, 0, False, False, {}), ("", 0, True, False, {})]})
    tokenizer = run.tokenizer
    first, between, second = parts(tokenizer, result.outputs[0])
    assert (first, second) == ((1, "ababab"), (1, f"c{END}"))
    for text in (between[1], tokenizer.decode(result.outputs[0].prompt_ids)):
        assert "leftxx" in text
        assert "xxright" in text
        assert "...(truncated)..." in text
        assert len(tokenizer(text, add_special_tokens=False)["input_ids"]) < 120
    assert between[1].startswith(END)  # the turn that was cut is ended for the policy, with mask 0


def sleeping() -> None:
    released.wait(5)


def fails() -> None:
    raise KeyError("no such room of https://me:hunter22@host")


def exits() -> None:
    raise SystemExit(3)


released = threading.Event()
GARBAGE = [
    (fails, "step failed: KeyError: 'no such room of https://***@host'."),
    (exits, "step failed: RuntimeError: sys.exit(3)."),
    (sleeping, "step took longer than tool_timeout_s=0.5 s."),
    (None, "step returned NoneType None; step returns (observation, reward, terminated, truncated, info)."),
    (("o", 1.0, True, {}), "step returned tuple ('o', 1.0, True, {}); step returns"),
    ((5, 1.0, False, False, {}), "step returned the observation int 5; it is a text, an ImageObservation or messages."),
    (
        ([], 1.0, False, False, {}),
        "step returned the observation list []; it is a text, an ImageObservation or",
    ),
    (([{"content": "o"}], 1.0, False, False, {}), "message 0 has no role"),
    (([{"role": "system", "content": "o"}], 1.0, False, False, {}), "returned a message of the role 'system'"),
    (("o", float("nan"), False, False, {}), "step gave the reward float nan, which is no finite number."),
    (("o", 10**400, False, False, {}), "which is no finite number."),
    (("o", "1", False, False, {}), "step gave the reward str '1', which is no finite number."),
    (("o", 1.0, torch.tensor([True, False]), False, {}), "step returned terminated=Tensor"),
    (("o", 1.0, False, False, "x"), "step returned info=str 'x', no dict;"),
]


def test_bad_environments_cost_their_own_trajectories_and_are_closed(run):
    released.clear()
    texts = ["a"] * (len(GARBAGE) + 8)
    worker, _ = run(texts)
    good = {"steps": [("", 1, True, False, {"lock": threading.Lock()})], "closes_badly": True}
    resets = [
        ({"first": fails}, "reset failed: KeyError"),
        ({"first": lambda: 7}, "reset returned the observation int 7"),
        ({"first": [{"role": "assistant", "content": "o"}]}, "reset returned messages that end with a turn of the ass"),
        ({"steps": [("", 1, True, False, {})], "rest": float("inf")}, "score gave the reward float inf"),
    ]
    bad = [({"steps": [step]}, message) for step, message in GARBAGE] + resets
    results = play(worker, *(row for row, _ in bad), good)
    released.set()
    assert [(result.status, message in result.message) for result, (_, message) in zip(results, bad, strict=False)] == [
        ("environment_error", True)
    ] * len(bad), [result.message for result in results]
    assert all(result.message.startswith("the environment 'given': ") for result in results[:-1])
    assert results[-1].status == "done"
    assert results[-1].outputs[0].extra_fields["environment_info"]["lock"].startswith("lock <unlocked")
    # Each once, and in one of them close itself failed.
    assert len(Given.closed) == len(set(map(id, Given.closed))) == len(results)


def test_an_environment_that_blocks_holds_up_no_other(run):
    """One waits for the other's end; were they to share a thread, it would wait for ever."""
    ended = threading.Event()

    def waits() -> tuple[str, float, bool, bool, dict]:
        assert ended.wait(30)
        return "", 1.0, True, False, {}

    def ends() -> tuple[str, float, bool, bool, dict]:
        ended.set()
        return "", 1.0, True, False, {}

    worker, _ = run(["a", "b"], actor_rollout_ref__rollout__agent__tool_timeout_s=60)
    results = play(worker, {"steps": [waits]}, {"steps": [ends]})
    assert [result.status for result in results] == ["done", "done"]


def test_a_trajectory_that_takes_too_long_closes_its_environment(run):
    released.clear()
    worker, _ = run(["a"], actor_rollout_ref__rollout__agent__trajectory_timeout_s=0.5,
                    actor_rollout_ref__rollout__agent__tool_timeout_s=20)  # fmt: skip
    [result] = play(worker, {"steps": [sleeping]})
    released.set()
    assert result.status == "timeout"
    assert sum(result.outputs[0].response_mask) == 1 + 1  # what was drawn stays: a letter and the end
    assert len(Given.closed) == 1


def test_samples_of_a_prompt_meet_one_episode_unless_each_is_to_have_its_own(run):
    row = {"steps": [("", 1, True, False, {})]}
    for seed_per, different in (("prompt", 1), ("sample", 3)):
        Given.seeds.clear()
        worker, _ = run(["a"] * 9, seed_per=seed_per)
        for sample in (0, 1, 2):
            play(worker, row, sample=sample)
        assert len(set(Given.seeds)) == different
        again = list(Given.seeds)
        for sample in (2, 1, 0):
            play(worker, row, sample=sample)
        assert Given.seeds[3:] == again[::-1]
        play(worker, row, uid="2-0")
        assert Given.seeds[-1] not in again
    play(worker, {**row, "seed": 5})
    assert Given.seeds[-1] == 5


SEARCH = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Search.",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}, "required": ["q"]},
    },
}
CALL = '<tool_call>\n{"name": "search", "arguments": {"q": "x"}}\n</tool_call>'


def test_an_environment_may_have_tools(run):
    worker, _ = run([CALL, "x is 4"], data__max_prompt_length=900)
    steps = [("found 4", 0, False, False, {}), ("", 1, True, False, {})]
    [result] = play(worker, {"first": PROMPT, "steps": steps, "tools": [SEARCH]})
    assert (result.status, result.message) == ("done", "")
    [(text, first), (said, second)] = Given.closed[0].actions
    [call] = first["tool_calls"]
    assert (text.strip(), call["function"]) == ("", {"name": "search", "arguments": '{"q": "x"}'})
    assert (said, second) == ("x is 4", {"tool_calls": []})
    texts = parts(run.tokenizer, result.outputs[0])
    assert texts[1] == (0, "tool: found 4\n<assistant>")
    assert "Search." in run.tokenizer.decode(result.outputs[0].prompt_ids)
    # Without tools the same text is one like any other.
    worker, _ = run([CALL])
    play(worker, {"steps": [("", 1, True, False, {})]})
    assert Given.closed[1].actions == [(CALL, {})]
    # One text does not answer two calls.
    worker, _ = run([CALL + CALL], data__max_prompt_length=900)
    [result] = play(worker, {"first": PROMPT, "steps": steps, "tools": [SEARCH]})
    assert "step answered 2 tool calls with one text; return a message of the role tool for each" in result.message


def test_a_prompt_that_is_too_long_follows_the_truncation_of_the_data(run):
    row = {"first": "o" * 400, "steps": [("", 1, True, False, {})]}
    worker, _ = run(["a"])
    [result] = play(worker, row)
    assert (result.status, len(Given.closed)) == ("agent_error", 1)
    assert "tokens, more than data.max_prompt_length=200. Raise data.max_prompt_length" in result.message
    worker, script = run(["a"], data__truncation="left")
    [result] = play(worker, row)
    assert (result.status, len(result.outputs[0].prompt_ids)) == ("done", 200)
    assert script.prompts == [result.outputs[0].prompt_ids]
    assert run.tokenizer.decode(result.outputs[0].prompt_ids).endswith("ooo<assistant>")


def test_a_row_names_an_environment_that_there_is(run):
    worker, _ = run(["a"])
    [result] = play(worker, {"name": "givn"})
    assert result.status == "agent_error"
    assert "there is no environment 'givn'. Did you mean 'given'? There are: given." in result.message
    row = {"name": "given", "nothing": None, "steps": [("", 1, True, False, {})]}
    worker, _ = run(["a"])
    [result] = play(worker, row)
    assert result.status == "done"
    assert Given.closed[0].row["nothing"] is None  # a null that the row has; those of parquet go when it is read
