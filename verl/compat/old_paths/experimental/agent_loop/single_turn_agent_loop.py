"""Public path of the agent loop of one turn."""

from verl.agents.single_turn import SingleTurnAgentLoop as SingleTurnAgentLoop
