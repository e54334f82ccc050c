"""Tools of YAML files and of typed functions."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import pytest
import yaml

from verl.errors import ConfigError
from verl.experimental.agent_loop.tool_agent_loop import normalize_function_tool_return as normalize_public
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import (
    FunctionTool,
    load_function_tools,
    load_function_tools_from_path,
    normalize_function_tool_return,
    schema_of_function,
)
from verl.tools.gsm8k_tool import Gsm8kTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.utils.tool_registry import initialize_tools, initialize_tools_from_config

YAML = """
tools:
  - class_name: "verl.tools.gsm8k_tool.Gsm8kTool"
    config:
      type: native
      places: [1, 2]
    tool_schema:
      type: "function"
      function:
        name: "calc_gsm8k_reward"
        description: "Check an answer."
        parameters:
          type: "object"
          properties:
            answer:
              type: "string"
              description: "The answer."
            steps:
              type: array
              items: {type: integer}
          required: ["answer"]
  - class_name: verl.tools.calculator_tool.CalculatorTool
"""

FUNCTIONS = '''
import time
from typing import Literal
from verl.tools.function_tool import function_tool
from verl.tools.schemas import ToolResponse

@function_tool
def weather(city: str, days: int = 1, unit: Literal["C", "F"] = "C", near: list[str] | None = None) -> dict:
    """Forecast of the weather.

    Args:
        city: name of the city
        days: number of days
        unit: unit of the temperature
        near: places around
    """
    return {"city": city, "days": days, "unit": unit, "near": near}

@function_tool("slow_add")
async def add(a: float, b: float) -> str:
    """Add.

    Args:
        a: first
        b: second
    """
    return ToolResponse(text=f"{a + b}"), 0.5, {"sums": 1}

def no_tool(x: int): ...
'''
ECHO = {"type": "function", "function": {"name": "echo", "description": "Say it again.", "parameters": {}}}


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    (tmp_path / "tools.yaml").write_text(YAML)
    (tmp_path / "my_functions.py").write_text(FUNCTIONS)
    return str(tmp_path / "tools.yaml"), str(tmp_path / "my_functions.py")


def test_a_file_of_tools(files: tuple[str, str]):
    first, second = initialize_tools_from_config(files[0])
    assert isinstance(first, Gsm8kTool)
    assert (first.name, first.config) == ("calc_gsm8k_reward", {"type": "native", "places": [1, 2]})
    # A chat template gets what the file says and nothing else; keys beyond type, description and enum too.
    assert first.get_openai_tool_schema().to_template() == {
        "type": "function",
        "function": {
            "name": "calc_gsm8k_reward",
            "description": "Check an answer.",
            "parameters": {
                "type": "object",
                "properties": {
                    "answer": {"type": "string", "description": "The answer."},
                    "steps": {"type": "array", "items": {"type": "integer"}},
                },
                "required": ["answer"],
            },
        },
    }
    assert second.name == "calculator"


def test_typed_functions_are_tools(files: tuple[str, str]):
    tools = initialize_tools(*files)
    assert [tool.name for tool in tools] == ["calc_gsm8k_reward", "calculator", "weather", "slow_add"]
    assert tools[2].tool_schema.to_template()["function"] == {
        "name": "weather",
        "description": "Forecast of the weather.",
        "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "description": "name of the city"},
                "days": {"type": "integer", "description": "number of days"},
                "unit": {"type": "string", "enum": ["C", "F"], "description": "unit of the temperature"},
                "near": {"type": ["array", "null"], "items": {"type": "string"}, "description": "places around"},
            },
            "required": ["city"],
            "additionalProperties": False,
        },
    }

    async def call(tool: BaseTool, **arguments: object):
        instance, _ = await tool.create(create_kwargs={})
        return await tool.execute(instance, arguments, agent_data=None)

    response, reward, metrics = asyncio.run(call(tools[2], city="Köln"))
    assert json.loads(response.text) == {"city": "Köln", "days": 1, "unit": "C", "near": None}
    assert "Köln" in response.text
    assert (reward, metrics) == (0.0, {})
    assert asyncio.run(call(tools[3], a=1, b=2)) == (ToolResponse(text="3"), 0.5, {"sums": 1})


@pytest.mark.parametrize(
    ("returned", "text", "reward", "metrics"),
    [
        ("a", "a", 0.0, {}),
        (("a", None), "a", 0.0, {}),
        (([1, None], False, None), "[1, null]", 0.0, {}),
        ((ToolResponse(text="a"), 2, {"b": 1}), "a", 2.0, {"b": 1}),
        (3 + 4j, "(3+4j)", 0.0, {}),
    ],
)
def test_what_a_function_returns_is_an_answer_with_reward_and_metrics(returned, text, reward, metrics):
    tool = FunctionTool(lambda: returned, schema=ECHO)
    assert tool.name == "echo"
    answer = asyncio.run(tool.execute("1", {}))
    assert answer == (ToolResponse(text=text), reward, metrics)


def test_a_tuple_of_another_length_is_no_answer():
    assert normalize_function_tool_return is normalize_public
    assert load_function_tools_from_path is load_function_tools
    with pytest.raises(TypeError, match="returned 0 values; a tuple has length 1, 2, or 3"):
        normalize_function_tool_return(())


def test_functions_that_no_model_could_call():
    def untyped(a): ...

    def undescribed(a: int):
        """Do it."""

    def variable(*parts: int):
        """Do it."""

    for function, problem in (
        (untyped, "has no complete description"),
        (undescribed, "has no complete description"),
        (variable, "a model cannot give parts"),
    ):
        with pytest.raises(ConfigError, match=problem):
            schema_of_function(function)


ENTRY = "tools:\n  - class_name: {}\n    config: {{type: {}}}\n"
WRONG = {
    "[1, 2]": "expected a list 'tools'",
    "tools: [": "cannot be read as YAML",
    ENTRY.format("verl.tools.gsm8k_tool.Gsm8kTol", "native"): "Did you mean 'Gsm8kTool'?",
    ENTRY.format("verl.tools.gsm8k_tol.Gsm8kTool", "native"): "there is no module 'verl.tools.gsm8k_tol'",
    ENTRY.format("json.JSONDecoder", "native"): "is no subclass of verl.tools.base_tool.BaseTool",
    ENTRY.format("Gsm8kTool", "native"): "must be package.module.Class or file.py:Class",
    ENTRY.format("verl.tools.gsm8k_tool.Gsm8kTool", "remote"): "config.type='remote' is unknown. Known: native, mcp",
    ENTRY.format("verl.tools.base_tool.BaseTool", "native"): "the tool BaseTool has no description",
    "tools:\n  - clas_name: a.B\n": "unknown key 'clas_name'. Did you mean 'class_name'?",
    YAML + YAML.removeprefix("\ntools:\n"): "several tools are called calc_gsm8k_reward, calculator",
    YAML.replace("type: array", "type: arrow"): "no JSON schema: 'arrow' is not valid under any",
    YAML.replace('name: "calc', 'nam: "calc'): "the tool_schema is wrong",
}


@pytest.mark.parametrize("text", WRONG)
def test_a_wrong_file_says_what_is_wrong(tmp_path: Path, text: str):
    path = tmp_path / "tools.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError) as error:
        initialize_tools_from_config(str(path))
    assert WRONG[text] in str(error.value)
    assert str(path) in str(error.value)


def test_a_list_gives_what_its_file_gives(files: tuple[str, str]):
    entries = yaml.safe_load(YAML)["tools"]
    assert [(tool.name, tool.config, tool.tool_schema) for tool in initialize_tools(entries)] == [
        (tool.name, tool.config, tool.tool_schema) for tool in initialize_tools(files[0])
    ]
    with pytest.raises(ConfigError, match=r"tool_config_path\[1\]: unknown key 'clas_name'. Did you mean 'class_name'"):
        initialize_tools([entries[0], {"clas_name": "a.B"}])
    with pytest.raises(ConfigError, match=r"^tool_config_path: several tools are called calculator"):
        initialize_tools([entries[1], entries[1]])


def test_a_class_of_a_users_file(tmp_path: Path):
    (tmp_path / "mine.py").write_text(
        "from verl.tools.base_tool import BaseTool, OpenAIFunctionToolSchema\n"
        "from verl.tools.schemas import ToolResponse\n"
        "class Echo(BaseTool):\n"
        "    async def execute(self, instance_id, parameters, **kwargs):\n"
        "        return ToolResponse(text=parameters['x']), None, None\n"
        "class Broken(Echo):\n"
        "    def __init__(self, config, tool_schema):\n"
        "        raise KeyError('token')\n"
    )
    path = tmp_path / "tools.yaml"
    schema = "{type: function, function: {name: echo, description: d, parameters: {type: object}}}"
    path.write_text(f"tools:\n  - {{class_name: '{tmp_path}/mine.py:Echo', tool_schema: {schema}}}\n")
    (tool,) = initialize_tools_from_config(str(path))
    assert asyncio.run(tool.execute("1", {"x": "a"})) == (ToolResponse(text="a"), None, None)
    path.write_text(path.read_text().replace("Echo", "Broken"))
    with pytest.raises(ConfigError, match=r"(?s)Broken cannot be made.*KeyError: 'token'"):
        initialize_tools_from_config(str(path))
    (tmp_path / "none.py").write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"no function of none\.py is marked"):
        load_function_tools(str(tmp_path / "none.py"))


def test_answers_of_tools():
    assert ToolResponse().is_empty()
    assert ToolResponse(text="x").is_text_only()
    assert not ToolResponse(text="x", image=[1]).is_text_only()
    assert not ToolResponse(image=[1]).is_empty()
    with pytest.raises(ValueError, match="image must be a list, not int"):
        ToolResponse(image=3)
    assert OpenAIFunctionToolSchema.model_validate({"function": {"name": "f"}}).to_template() == {
        "type": "function",
        "function": {"name": "f"},
    }
    assert FunctionTool.create is BaseTool.create
