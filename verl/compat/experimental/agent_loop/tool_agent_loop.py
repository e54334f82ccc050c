"""Public path of the agent loop of tools."""

from verl.agents.tool_agent import ToolAgentLoop as ToolAgentLoop
from verl.base.doors import old_names

__getattr__ = old_names(__name__)
