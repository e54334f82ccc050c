"""Source of responses: stored files, the engines of the ranks, or agent loops that ask the engines."""

from __future__ import annotations

import logging
from functools import partial
from typing import TYPE_CHECKING

from verl.agents.manager import AgentLoopManager
from verl.config import PPOConfig
from verl.experience.stored_rollouts import StoredRollouts
from verl.experience.trajectories import unused_arguments, wants_agents
from verl.experience.workers import CurrentWorkers
from verl.protocol import DataProto
from verl.utils.deferred import Deferred
from verl.utils.metric import Metrics

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.experience.judge import ServedJudge

logger = logging.getLogger(__name__)


class ResponseSource:
    """Answers prompts by the policy.

    Args:
        config: the whole configuration.
        tokenizer: of the policy.
        processor: of the policy, if it sees images.
        workers: returns the worker groups of the run.
        judge: the generative reward model of the run, if it has one; agent loops may ask it too.
    """

    def __init__(
        self,
        config: PPOConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None,
        workers: CurrentWorkers,
        judge: ServedJudge | None,
    ) -> None:
        self._config, self._tokenizer, self._processor = config, tokenizer, processor
        self._workers, self._judge = workers, judge
        self._stored = StoredRollouts(config, self._sample)
        self._warned_of_unused = False
        self.agent_loops: AgentLoopManager | None = None
        """The manager of the agent loops; None before the first prompts for them."""

    def answer(self, prompts: DataProto) -> DataProto:
        """Answer each row by stored responses, engines or agent loops, which may make several rows of it.

        Args:
            prompts: rows as the data set gives them, repeated for each response, with ``uid`` and ``sample_index``;
                ``meta_info`` has ``global_steps``, the training step.
        """
        return self._stored.answer(prompts)

    def metrics(self) -> Metrics:
        """See :meth:`StoredRollouts.metrics`."""
        return self._stored.metrics()

    def _sample(self, prompts: DataProto) -> DataProto:
        policy, reward = self._workers()
        if not wants_agents(prompts, self._config.actor_rollout_ref.rollout):
            self._warn_of_unused(prompts)
            return policy.generate_sequences(prompts)
        judge, agents = self._agents_judge, self.agents()
        conversations = Deferred([], partial(agents.generate_sequences, prompts))
        if judge is None:
            return conversations.result()
        assert reward is not None  # a judge is served by these workers
        return judge.serve_while(reward, int(prompts.meta_info["global_steps"]), lambda: conversations).result()

    @property
    def _agents_judge(self) -> ServedJudge | None:
        """The judge, if agents may ask it."""
        return self._judge if self._judge is not None and self._config.judge_answers_agents else None

    def agents(self) -> AgentLoopManager:
        """Return the manager of agent loops, for the workers as they are now; another one if it has ended.

        It starts with the first call.
        """
        policy, _ = self._workers()
        if self.agent_loops is not None and self.agent_loops.has_ended:
            self.end_agent_loops()
        if self.agent_loops is None:
            judge = self._agents_judge
            address = None if judge is None else judge.reward_router_address
            self.agent_loops = AgentLoopManager(self._config, policy, self._tokenizer, self._processor, address)
        self.agent_loops.worker_group = policy  # the workers may have been replaced
        return self.agent_loops

    def end_agent_loops(self) -> None:
        """End the processes and threads of agent loops; the next prompts for them start new ones."""
        if self.agent_loops is not None:
            self.agent_loops.shutdown()
            self.agent_loops = None

    def _warn_of_unused(self, prompts: DataProto) -> None:
        """Warn once of arguments for tools or users that a single turn does not use."""
        if not self._warned_of_unused and (unused := unused_arguments(prompts)):
            self._warned_of_unused = True
            logger.warning(
                "rows have %s, but the model answers them in one turn, without tools or users. Set "
                "actor_rollout_ref.rollout.multi_turn.enable=true, or give rows an agent_name.",
                " and ".join(unused),
            )
