"""Public path of what agent loops are made of."""

from verl.agents.loop import AgentLoopBase as AgentLoopBase
from verl.agents.loop import AgentLoopMetrics as AgentLoopMetrics
from verl.agents.loop import AgentLoopOutput as AgentLoopOutput
from verl.agents.loop import DictConfigWrap as DictConfigWrap
from verl.agents.loop import register as register
from verl.agents.policy import AsyncLLMServerManager as AsyncLLMServerManager
from verl.agents.policy import TokenOutput as TokenOutput
from verl.agents.worker import AgentLoopWorker as AgentLoopWorker
from verl.compat.own_fit.agent_loops import ProgramAgentLoopManager as AgentLoopManager
from verl.compat.toolkit.agents import ToolListWrap as ToolListWrap
from verl.compat.toolkit.agents import get_trajectory_info as get_trajectory_info
