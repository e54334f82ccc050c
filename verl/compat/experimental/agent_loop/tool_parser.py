"""Public path of the parsers of tool calls."""

from verl.agents.parsers import FunctionCall as FunctionCall
from verl.agents.parsers import ToolParser as ToolParser
