from verl.tools.mcp_base_tool import MCPBaseTool as MCPSearchTool
__all__ = ['MCPSearchTool']
