"""Public path of agent loops."""

from verl.agents.loop import AgentLoopBase as AgentLoopBase
from verl.agents.manager import AgentLoopManager as AgentLoopManager
from verl.agents.policy import AsyncLLMServerManager as AsyncLLMServerManager
from verl.agents.single_turn import SingleTurnAgentLoop as SingleTurnAgentLoop
from verl.agents.worker import AgentLoopWorker as AgentLoopWorker
