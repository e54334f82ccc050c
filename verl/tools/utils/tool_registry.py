"""Tools of a configuration, and of a file of functions."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from jsonschema import Draft202012Validator, SchemaError
from pydantic import ValidationError

from verl.base.import_utils import user_code
from verl.base.types import JsonMapping
from verl.errors import ConfigError
from verl.tools.base_tool import BaseTool
from verl.tools.function_tool import load_function_tools
from verl.tools.schemas import OpenAIFunctionToolSchema
from verl.utils.class_entries import Entries, load_class, read_entries

KEYS = ("class_name", "config", "tool_schema", "mcp")
TYPES = ("native", "mcp")
SETTING = "tool_config_path"


def initialize_tools_from_config(tools_config_file: Entries) -> list[BaseTool]:
    """Make the tools of a YAML file with a list ``tools``, or of such a list.

    Each entry has ``class_name`` (``package.module.Class`` or ``file.py:Class``),
    ``config`` (``type``: ``native``, the default, or ``mcp``, and what the class reads), and ``tool_schema``, which
    a class that describes itself does without. An entry of the type ``mcp`` gives one tool for each tool of its
    servers; see :mod:`verl.tools.mcp_base_tool`.

    Raises:
        ConfigError: the file, an entry, a class or a description is wrong.
    """
    tools: list[BaseTool] = []
    for where, entry in read_entries(tools_config_file, SETTING, "tools", KEYS):
        tools += _tools_of_entry(entry, where)
    _check(tools, _source_name(tools_config_file))
    return tools


def _source_name(source: Entries) -> str:
    return str(source) if isinstance(source, str | Path) else SETTING


def initialize_tools(tool_config_path: Entries | None, function_tool_path: str | None = None) -> list[BaseTool]:
    """Make the tools of ``tool_config_path`` and of ``function_tool_path``; either may be null.

    Raises:
        ConfigError: as in :func:`initialize_tools_from_config` and :func:`load_function_tools`; two tools of one name.
    """
    tools = initialize_tools_from_config(tool_config_path) if tool_config_path else []
    tools += load_function_tools(function_tool_path) if function_tool_path else []
    _check(tools, " and ".join(_source_name(source) for source in (tool_config_path, function_tool_path) if source))
    return tools


def _tools_of_entry(entry: JsonMapping, where: str) -> list[BaseTool]:
    config = dict(entry.get("config") or {})
    kind = config.get("type", "native")
    if kind not in TYPES:
        raise ConfigError(f"{where}: config.type='{kind}' is unknown. Known: {', '.join(TYPES)}.")
    tool_class = load_class(entry.get("class_name"), BaseTool, f"{where}.class_name")
    if kind == "mcp":
        from verl.tools.mcp_base_tool import tools_of_servers  # needs the package mcp

        return tools_of_servers(tool_class, config, entry.get("mcp") or {}, where)
    try:
        schema = entry.get("tool_schema")
        described = OpenAIFunctionToolSchema.model_validate(schema) if schema else None
    except ValidationError as error:
        raise ConfigError(f"{where}: the tool_schema is wrong: {error}") from error
    try:
        with user_code(f"{tool_class.__name__} cannot be made"):
            return [tool_class(config=config, tool_schema=described)]
    except ConfigError as error:
        raise ConfigError(f"{where}: {error}") from error


def _check(tools: list[BaseTool], where: str) -> None:
    """Refuse two tools of one name, and descriptions that are no JSON schema."""
    if twice := [name for name, count in Counter(tool.name for tool in tools).items() if count > 1]:
        raise ConfigError(f"{where}: several tools are called {', '.join(twice)}. Give them different names.")
    for tool in tools:
        assert tool.tool_schema is not None
        try:
            Draft202012Validator.check_schema(tool.tool_schema.to_template()["function"].get("parameters", {}))
        except SchemaError as error:
            raise ConfigError(
                f"{where}: the parameters of the tool '{tool.name}' are no JSON schema: {error.message} "
                f"(at {error.json_path})."
            ) from error
