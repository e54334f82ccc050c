"""The examples of docs/tools.md work as they stand there, and it names every tool, format and failure."""

from __future__ import annotations

import re
from pathlib import Path

from tests.agents.test_tool_calls import call, run, shorten
from verl.agents.parsers.base import _parsers
from verl.agents.tool_calls import CallFailure, ToolRunner
from verl.tools.base_tool import BaseTool
from verl.tools.utils.tool_registry import initialize_tools

DOCS = Path(__file__).parents[2] / "docs"
PAGE = (DOCS / "tools.md").read_text()
NOTES = """
  - class_name: {}:Notes
    tool_schema: {{type: function, function: {{name: notes, description: d, parameters: {{type: object}}}}}}
"""


def test_the_examples_of_the_page(tmp_path: Path):
    functions, own, *_ = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    [listed] = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "functions.py").write_text(functions)
    (tmp_path / "own.py").write_text(own)
    (tmp_path / "tools.yaml").write_text(listed + NOTES.format(tmp_path / "own.py"))
    tools = initialize_tools(str(tmp_path / "tools.yaml"), str(tmp_path / "functions.py"))
    assert [tool.name for tool in tools] == ["calc_gsm8k_reward", "calculator", "notes", "distance"]
    found, rewards = run(
        ToolRunner(tools, shorten),
        [call("distance", '{"start": "Berlin", "end": "Munich"}')],
        [call("notes", '{"text": "a"}')],
        notes={"create_kwargs": {"first": ["x"]}},
    )
    assert [one.response.text for one in found] == ['{"distance": 585, "unit": "km"}', "2 notes"]
    assert rewards == {"distance": 0.0, "notes": 2.0}


def test_the_pages_name_every_failure_and_every_tool_in_the_box():
    formats, failures = PAGE.split("## Format of calls")[1].split("## Failed calls")
    assert set(re.findall(r"^\| `([\w-]+)` \| ", failures, re.MULTILINE)) == set(CallFailure)
    assert sorted(re.findall(r"^\| `([\w-]+)` \| ", formats, re.MULTILINE)) == _parsers.names()
    for path in re.findall(r"^\| `(\w+\.\w+)` \|", PAGE, re.MULTILINE):
        module, name = path.split(".")
        assert issubclass(getattr(__import__(f"verl.tools.{module}", fromlist=[name]), name), BaseTool), path
