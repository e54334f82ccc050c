"""Where responses come from: the engines of the ranks, or the agent loops that ask them."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING, Any

from verl.agents.manager import AgentLoopManager
from verl.config import PPOConfig
from verl.experience.trajectories import unused_arguments, wants_agents
from verl.protocol import DataProto
from verl.utils.deferred import Deferred

if TYPE_CHECKING:
    from verl.judge.service import JudgeService

logger = logging.getLogger(__name__)


class ResponseSource:
    """Answers prompts by the policy.

    Args:
        config: the whole configuration.
        tokenizer: of the policy.
        processor: of the policy, if it sees images.
        judge: the generative reward model of the run, if it has one; agent loops may ask it too.
    """

    def __init__(self, config: PPOConfig, tokenizer: Any, processor: Any, judge: JudgeService | None) -> None:
        self._config, self._tokenizer, self._processor, self._judge = config, tokenizer, processor, judge
        self._told_unused = False
        self.agent_loops: AgentLoopManager | None = None
        """The manager of the agent loops; None before the first prompts for them."""

    def answer(self, prompts: DataProto, workers: Any, reward_workers: Any, step: int) -> DataProto:
        """Answer each row by the engines, or by agent loops if one is asked for.

        Args:
            prompts: rows as the data set gives them, repeated for each response.
            workers: the worker group of the policy.
            reward_workers: the worker group of the judge, which is awake meanwhile if agent loops may ask it.
            step: number of the step.
        """
        if not wants_agents(prompts, self._config.actor_rollout_ref.rollout):
            self._tell_unused(prompts)
            return workers.generate_sequences(prompts)
        judge = self._judge if self._judge is not None and self._config.judge_answers_agents else None
        if self.agent_loops is None:
            address = None if judge is None else judge.reward_router_address
            self.agent_loops = AgentLoopManager(self._config, workers, self._tokenizer, self._processor, address)
        self.agent_loops.worker_group = workers  # the workers may have been replaced
        held = Deferred([], partial(self.agent_loops.generate_sequences, prompts))
        if judge is None:
            return held.result()
        return judge.serve_while(reward_workers, step, lambda: held).result()

    def end_agent_loops(self) -> None:
        """End the processes and threads of agent loops; the next prompts for them start new ones."""
        if self.agent_loops is not None:
            self.agent_loops.shutdown()
            self.agent_loops = None

    def _tell_unused(self, prompts: DataProto) -> None:
        """Warn once of arguments for tools or users that a single turn does not use."""
        if not self._told_unused and (unused := unused_arguments(prompts)):
            self._told_unused = True
            logger.warning(
                "rows have %s, but the model answers them in one turn, without tools or users. Set "
                "actor_rollout_ref.rollout.multi_turn.enable=true, or give rows an agent_name.",
                " and ".join(unused),
            )
