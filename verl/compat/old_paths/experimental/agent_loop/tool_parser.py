"""Public path of the parsers of tool calls."""

from verl.agents.parsers import FunctionCall as FunctionCall
from verl.agents.parsers import ToolParser as ToolParser
from verl.agents.parsers.harmony import GptOssToolParser as GptOssToolParser
from verl.agents.parsers.json_calls import HermesToolParser as HermesToolParser
from verl.agents.parsers.tagged import GlmToolParser as GLMToolParser
from verl.agents.parsers.tagged import Qwen3CoderToolParser as Qwen3XMLToolParser
