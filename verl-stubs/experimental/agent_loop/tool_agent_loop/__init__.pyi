from verl.agents.tool_agent import ToolAgentLoop as ToolAgentLoop
