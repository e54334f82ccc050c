"""Public path of the agent loop of tools."""

from verl.agents.tool_agent import ToolAgentLoop as ToolAgentLoop
from verl.compat.import_hooks import old_names
from verl.compat.toolkit.agents import AgentData as AgentData
from verl.compat.toolkit.agents import AgentState as AgentState

__getattr__ = old_names(__name__)
