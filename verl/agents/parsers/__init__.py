"""Tool calls in what the policy drew, by format: ``get_tool_parser("hermes", tokenizer)``.

Each format is that of the public chat templates of its models. A call that cannot be read is reported with the reason,
so that the model can be told.
"""

from __future__ import annotations

from verl.agents.parsers.base import (
    FunctionCall,
    MalformedCall,
    ParsedTurn,
    ToolParser,
    get_tool_parser,
    is_built_in_parser,
)
from verl.agents.parsers.deepseek import DeepSeekToolParser
from verl.agents.parsers.harmony import GptOssToolParser
from verl.agents.parsers.json_calls import HermesToolParser, Llama3JsonToolParser, MistralToolParser
from verl.agents.parsers.pythonic import PythonicToolParser
from verl.agents.parsers.tagged import GlmToolParser, Qwen3CoderToolParser

__all__ = [
    "DeepSeekToolParser",
    "FunctionCall",
    "GlmToolParser",
    "GptOssToolParser",
    "HermesToolParser",
    "Llama3JsonToolParser",
    "MalformedCall",
    "MistralToolParser",
    "ParsedTurn",
    "PythonicToolParser",
    "Qwen3CoderToolParser",
    "ToolParser",
    "get_tool_parser",
    "is_built_in_parser",
]
