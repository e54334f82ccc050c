from verl.agents.tool_agent import ToolAgentLoop as ToolAgentLoop
from verl.toolkit.agents import AgentData as AgentData
from verl.toolkit.agents import AgentState as AgentState
