"""Public path of the parsers of tool calls."""

from verl.agents.parsers import FunctionCall as FunctionCall
from verl.agents.parsers import ToolParser as ToolParser
from verl.base.doors import old_names

__getattr__ = old_names(__name__)
