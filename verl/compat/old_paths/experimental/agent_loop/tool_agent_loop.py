"""Public path of the agent loop of tools."""

from verl.agents.tool_agent import ToolAgentLoop as ToolAgentLoop
from verl.agents.tool_state import AgentData as AgentData
from verl.agents.tool_state import AgentState as AgentState
