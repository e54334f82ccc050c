"""Tools of MCP servers.

    tools:
      - class_name: verl.tools.mcp_base_tool.MCPBaseTool
        config: {type: mcp, timeout: 120}
        mcp:
          mcp_servers_config_path: servers.json        # {"mcpServers": {"name": {"command": ..., "args": [...]}}}
          tool_selected_list: [search]                 # all of them by default

A server has ``command``, ``args``, ``env`` and ``cwd`` (it is started here and spoken to over stdio), or ``url``,
``headers`` and ``auth_token`` (streamable HTTP); ``$VARIABLES`` in the file are those of the environment.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from verl.base.import_utils import user_code
from verl.base.registry import suggest
from verl.base.requirements import install_command
from verl.base.types import JsonMapping, JsonObject
from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse

if TYPE_CHECKING:
    from mcp.types import ContentBlock

if TYPE_CHECKING:  # it needs the package mcp
    from verl.tools.utils.mcp_clients import McpConnection

MCP_KEYS = ("mcp_servers_config_path", "tool_selected_list")


class McpToolError(RuntimeError):
    """A tool of an MCP server answered with an error."""


class MCPBaseTool(BaseTool):
    """One tool of an MCP server, under the server's description of it. All trajectories of a process share the server.

    Its ``config``: ``timeout`` in seconds of a call, ``rate_limit`` calls at once.
    """

    def __init__(self, config: JsonObject, tool_schema: OpenAIFunctionToolSchema | None = None) -> None:
        limits = {"timeout_s": config.get("timeout"), "max_concurrent": config.get("rate_limit")}
        super().__init__({**{key: value for key, value in limits.items() if value}, **config}, tool_schema)
        self.connection: McpConnection | None = None
        """The server; set after the tool was made."""

    async def execute(
        self, instance_id: str, parameters: JsonObject, **kwargs: object
    ) -> tuple[ToolResponse, float | None, JsonObject | None]:
        """Call the tool.

        Raises:
            McpToolError: it answered with an error.
            McpServerError: its server cannot be reached, or was lost.
        """
        response, metrics = await self._call_tool(instance_id, parameters)
        return response, 0.0, metrics

    def close(self) -> None:
        """End the connection to the server, which all its tools share, and the server if it was started here."""
        if self.connection is not None:
            self.connection.close()

    async def _call_tool(self, instance_id: str, parameters: JsonObject) -> tuple[ToolResponse, JsonObject]:
        if self.connection is None:
            raise McpToolError(f"the tool {self.name} has no server: make it by a YAML file with config.type=mcp.")
        result = await self.connection.call_tool(self.name, parameters)
        content = list(result.content)
        text, metrics = self._parse_tool_result(content)
        # The session of the trajectory reads them, as those of other tools, and says what is wrong with one.
        images = [f"data:{part.mime_type};base64,{part.data}" for part in content if part.type == "image"]
        if not (text or images) and result.structured_content is not None:
            text = json.dumps(result.structured_content, ensure_ascii=False)
        if result.is_error:
            raise McpToolError(text)
        return ToolResponse(text=text, image=images or None), metrics

    def _parse_tool_result(self, content: list[ContentBlock]) -> tuple[str, JsonObject]:
        """Return the text for the model and metrics; subclasses may read the parts of an answer in another way.

        Images are shown beside the text; sounds and resources are only named.
        """
        texts = [part.text if part.type == "text" else f"[{part.type}]" for part in content if part.type != "image"]
        return " ".join(texts), {}


def tools_of_servers(tool_class: type[BaseTool], config: JsonObject, mcp: JsonMapping, where: str) -> list[BaseTool]:
    """Make the tools of all servers of a file.

    Args:
        tool_class: :class:`MCPBaseTool` or a subclass.
        config: for each tool.
        mcp: ``mcp_servers_config_path`` and ``tool_selected_list``.
        where: place of the entry, for messages.

    Raises:
        ConfigError: the file, a server or a name is wrong, a server cannot be reached, or the package is missing.
    """
    try:
        from verl.tools.utils.mcp_clients import McpConnection, McpServerError
    except ModuleNotFoundError as error:
        if error.name and error.name.split(".")[0] not in ("mcp", "mcp_types"):
            raise
        raise ConfigError(
            f"{where}: tools of MCP servers need the package mcp, 2.3 or newer: {install_command('agents')}."
        ) from error
    if not issubclass(tool_class, MCPBaseTool):
        raise ConfigError(f"{where}: {tool_class.__name__} is no subclass of verl.tools.mcp_base_tool.MCPBaseTool.")
    for key in mcp:
        if key not in MCP_KEYS:
            raise ConfigError(f"{where}: unknown key 'mcp.{key}'.{suggest(key, MCP_KEYS)}")
    tools: list[BaseTool] = []
    selected = mcp.get("tool_selected_list")
    for name, settings in _servers(mcp.get("mcp_servers_config_path"), where).items():
        connection = McpConnection(name, settings)
        try:
            listed = connection.list_tools()
        except McpServerError as error:
            raise ConfigError(f"{where}: {error} Check 'command' and 'args', or 'url'.") from error
        for tool_info in listed:
            if selected is not None and tool_info.name not in selected:
                continue
            function = {
                "name": tool_info.name,
                "description": tool_info.description or "",
                "parameters": tool_info.input_schema,
            }
            described = OpenAIFunctionToolSchema.model_validate({"type": "function", "function": function})
            with user_code(f"{where}: {tool_class.__name__} cannot be made"):
                tool = tool_class(config=dict(config), tool_schema=described)
            tool.connection = connection
            tools.append(tool)
    if missing := sorted(set(selected or ()) - {tool.name for tool in tools}):
        raise ConfigError(f"{where}: no server has the tools {', '.join(missing)} of mcp.tool_selected_list.")
    return tools


def _servers(path: object, where: str) -> Mapping[str, Mapping[str, object]]:
    file = Path(str(path)).expanduser()
    if not path or not file.is_file():
        raise ConfigError(f"{where}: mcp.mcp_servers_config_path={path} is no file. Give a JSON file of servers.")
    try:
        content = json.loads(file.read_text(), object_hook=_expand_variables)
    except ValueError as error:
        raise ConfigError(f"{where}: {file} is no JSON: {error}") from error
    servers = content.get("mcpServers") if isinstance(content, dict) else None
    if not isinstance(servers, dict) or not all(isinstance(server, dict) for server in servers.values()) or not servers:
        raise ConfigError(f'{where}: {file} must have the form {{"mcpServers": {{"name": {{"command": ...}}}}}}.')
    return servers


def _expand_variables(values: JsonObject) -> JsonObject:
    """An object of the file with the environment's values in its texts."""

    def fill(value: object) -> object:
        if isinstance(value, list):
            return [fill(item) for item in value]
        return os.path.expandvars(value) if isinstance(value, str) else value

    return {key: fill(value) for key, value in values.items()}
