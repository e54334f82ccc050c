"""Interactions of YAML files, the one of gsm8k, and one whose user is a model behind an endpoint."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from tests.scorers.judge_server import judge_server
from verl.errors import ConfigError, RolloutError
from verl.interactions.base import BaseInteraction
from verl.interactions.gsm8k_interaction import Gsm8kInteraction
from verl.interactions.openai_interaction import OpenAIInteraction
from verl.interactions.utils.interaction_registry import initialize_interactions_from_config

OWN = """
from verl.interactions.base import BaseInteraction

class MoodyInteraction(BaseInteraction):
    pass

class Broken(BaseInteraction):
    def __init__(self, config):
        super().__init__(config)
        config["token"]
"""
YAML = """
interaction:
  - name: gsm8k
    class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction
    config: {{method: flexible}}
  - class_name: {folder}/own.py:MoodyInteraction
"""


def made(folder: Path, text: str) -> dict[str, BaseInteraction]:
    (folder / "own.py").write_text(OWN)
    (folder / "users.yaml").write_text(text.format(folder=folder))
    return initialize_interactions_from_config(str(folder / "users.yaml"))


def test_a_file_of_interactions(tmp_path: Path):
    found = made(tmp_path, YAML)
    assert {name: one.name for name, one in found.items()} == {"gsm8k": "gsm8k", "moody": "moody"}
    assert found["gsm8k"].config == {"method": "flexible", "name": "gsm8k"}


@pytest.mark.parametrize(
    "entry, problem",
    [
        ("{name: a, class_name: verl.tools.base_tool.BaseTool}", "no subclass of verl.interactions.base.BaseInteract"),
        ("{name: a, clas_name: x}", "unknown key 'clas_name'. Did you mean 'class_name'?"),
        ("{name: a, class_name: '{folder}/own.py:Broken'}", "Broken cannot be made"),
        ("{name: a, class_name: verl.interactions.base.BaseInteraction}\n  - {name: a, class_name: "
         "verl.interactions.base.BaseInteraction}", "another interaction is called 'a' too"),
        ("{class_name: verl.interactions.gsm8k_interaction.Gsm8kInteraction, config: {method: lax}}", "method='lax'"),
        ("{class_name: verl.interactions.openai_interaction.OpenAIInteraction, config: {model: m}}",
         "config has no base_url, system_prompt"),
    ],
)  # fmt: skip
def test_a_wrong_entry_is_told(tmp_path: Path, entry: str, problem: str):
    text = f"interaction:\n  - {entry}".replace("{folder}", str(tmp_path)).replace("{", "{{").replace("}", "}}")
    with pytest.raises(ConfigError) as error:
        made(tmp_path, text)
    assert problem in str(error.value)
    assert str(tmp_path / "users.yaml") in str(error.value)


def conversation(*answers: str) -> list[dict[str, Any]]:
    messages: list[dict[str, Any]] = [{"role": "user", "content": "2 + 2?"}]
    for answer in answers:
        messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Again."}]
    return messages[:-1]


def test_gsm8k_asks_until_the_answer_is_right():
    async def talk() -> list[tuple[bool, float]]:
        user = Gsm8kInteraction({})
        one, other = [await user.start_interaction(None, name="gsm8k", ground_truth=truth) for truth in ("4", "5")]
        found = [
            await user.generate_response(one, conversation("#### 3")),
            await user.generate_response(other, conversation("#### 4")),
            await user.generate_response(one, conversation("#### 3", "it is #### 4")),
        ]
        await user.finalize_interaction(one)
        assert list(user._instance_dict) == [other]
        with pytest.raises(ValueError, match=r"extra_info\.interaction_kwargs\.ground_truth"):
            await user.start_interaction(None)
        return [(ends, score) for ends, _, score, _ in found]

    assert asyncio.run(talk()) == [(False, 0.0), (False, 0.0), (True, 1.0)]


def asked(server: Any, messages: list[dict[str, Any]], config: dict[str, Any] | None = None, **row: Any) -> Any:
    settings = {"base_url": server.url, "model": "user", "system_prompt": "You want {goal}.", "max_retries": 0}
    user = OpenAIInteraction({"name": "customer", **settings, **(config or {})})
    return asyncio.run(user.generate_response("a", messages, **row))


def test_a_model_plays_the_user(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("USER_KEY", "sk-secret-of-user")
    messages = [
        {"role": "system", "content": "Sell tea."},
        {"role": "user", "content": "Hello."},
        {"role": "assistant", "content": "Wait.", "tool_calls": [{"function": {"name": "stock", "arguments": "{}"}}]},
        {"role": "tool", "content": "12"},
        {"role": "assistant", "content": "Green?<|im_end|>"},
    ]
    with judge_server("Yes, green.", "Fine. ###STOP###", (401, {"error": {"message": "sk-secret-of-user"}})) as server:
        row = {"name": "customer", "goal": "green tea"}
        with_key = {"api_key_env": "USER_KEY"}
        assert asked(server, messages, with_key, **row) == (False, "Yes, green.", None, {})
        assert server.requests[0]["messages"] == [
            {"role": "system", "content": "You want green tea."},
            {"role": "user", "content": "The conversation begins. Say what you want."},
            {"role": "assistant", "content": "Hello."},
            {"role": "user", "content": "Wait.\n\nGreen?< |im_end|>"},
        ]
        assert server.keys == ["Bearer sk-secret-of-user"]
        assert asked(server, messages, **row) == (True, "Fine.", None, {})
        with pytest.raises(RolloutError, match="did not answer for model 'user'") as error:
            asked(server, messages, with_key, **row)
        assert "sk-secret" not in str(error.value)
        with pytest.raises(ConfigError, match="has no 'goal'; it has name"):
            asked(server, messages, name="customer")


def test_the_judge_of_the_run_plays_the_user():
    with judge_server("Yes, green.") as server:
        judge = {"base_url": "http://{reward_router_address}/v1"}
        row = {"goal": "tea", "reward_router_address": server.url.removeprefix("http://").removesuffix("/v1")}
        assert asked(server, [], judge, **row) == (False, "Yes, green.", None, {})
    assert OpenAIInteraction({**judge, "model": "user", "system_prompt": "-"}).asks_judge
    assert not OpenAIInteraction({"base_url": server.url, "model": "user", "system_prompt": "-"}).asks_judge
