"""Public address of :class:`verl.tools.mcp_base_tool.MCPBaseTool` for servers that search."""

from verl.tools.mcp_base_tool import MCPBaseTool as MCPSearchTool
