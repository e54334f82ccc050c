"""Public path of agent loops."""

from verl.agents.loop import AgentLoopBase as AgentLoopBase
from verl.agents.policy import AsyncLLMServerManager as AsyncLLMServerManager
from verl.agents.single_turn import SingleTurnAgentLoop as SingleTurnAgentLoop
from verl.agents.worker import AgentLoopWorker as AgentLoopWorker
from verl.compat.own_fit.agent_loops import ProgramAgentLoopManager as AgentLoopManager
