"""Public path of the agent loop of tools."""

from verl.agents.tool_agent import ToolAgentLoop as ToolAgentLoop
from verl.compat.toolkit.agents import AgentData as AgentData
from verl.compat.toolkit.agents import AgentState as AgentState
