from verl.agents.parsers import FunctionCall as FunctionCall
from verl.agents.parsers import ToolParser as ToolParser
