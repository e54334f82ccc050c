"""The manager of agent loops as public programs create it, beside the workers of a trainer."""

from __future__ import annotations

from typing import Any, NoReturn

from verl.compat.own_fit.ordered_group import OrderedGroup
from verl.errors import ConfigError
from verl.protocol import DataProto

NEVER_CALLED = frozenset(
    {"_init_agent_loop_workers", "_initialize_llm_servers", "_performance_metrics", "agent_loop_workers_class"}
)
"""What subclasses of public programs replace, and nothing here would call."""
SERVERS = ("llm_client", "teacher_client", "reward_loop_worker_handles")
"""Arguments of releases whose engines, teachers and rewards are servers on Ray."""


class ProgramAgentLoopManager:
    """Generates with the engines and agent loops of a trainer: its own step's, with the same samples.

    Args:
        config: of the run; the trainer's own is used.
        worker_group: ``trainer.actor_rollout_wg``.
        rollout_resource_pool: not used; engines have the pool that the configuration says.
        rm_resource_pool: not used; reward models are workers of the trainer.

    Raises:
        ConfigError: there is no such group.
    """

    def __init__(
        self,
        config: Any,
        worker_group: Any = None,
        rollout_resource_pool: object = None,
        rm_resource_pool: object = None,
    ) -> None:
        if not isinstance(worker_group, OrderedGroup):
            raise ConfigError(
                f"AgentLoopManager: worker_group is {type(worker_group).__name__}. Pass "
                "worker_group=trainer.actor_rollout_wg, whose engines it generates with."
            )
        self.config, self.worker_group = config, worker_group

    def __init_subclass__(cls, **kwargs: object) -> None:
        """Refuse a class with methods that nothing would call.

        Raises:
            ConfigError: names the first one.
        """
        super().__init_subclass__(**kwargs)
        for name in NEVER_CALLED & vars(cls).keys():
            raise ConfigError(
                f"{cls.__name__}.{name} would never be called. Replace generate_sequences, or write an agent loop "
                "(docs/agents.md)."
            )

    @classmethod
    def create(cls, *args: Any, **kwargs: Any) -> ProgramAgentLoopManager:
        """Create a manager; the arguments are those of the class.

        Raises:
            ConfigError: one of them is in :data:`SERVERS`.
        """
        if servers := [name for name in SERVERS if kwargs.get(name) is not None]:
            raise ConfigError(
                f"AgentLoopManager: {', '.join(servers)} belong to servers on Ray, which are not in this version. Pass "
                "worker_group=trainer.actor_rollout_wg alone; teachers and rewards are the trainer's."
            )
        return cls(*args, **kwargs)

    def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Generate a response to each row; see :meth:`RayPPOTrainer._generate_sequences`."""
        return self.worker_group.generate_sequences(prompts)

    @property
    def server_addresses(self) -> NoReturn:
        """Addresses of the engines, which have none for programs.

        Raises:
            ConfigError: says how a program reaches the policy by HTTP.
        """
        raise ConfigError(
            "server_addresses: no engine (native, hf, vllm, sglang) serves programs; vllm and sglang are servers of "
            "tokens for this run alone, which sleep between steps. An agent that calls an HTTP endpoint runs as agent "
            "loop: actor_rollout_ref.rollout.agent.default_agent_loop=program_agent gives each conversation an "
            "address (docs/plugins/endpoint.md)."
        )

    def wake_up(self) -> None:
        """Do nothing: an engine wakes when it generates."""

    def sleep(self) -> None:
        """Do nothing: an engine frees its memory after it generated."""

    def clear_kv_cache(self) -> None:
        """Do nothing: an engine drops computed keys and values when it takes new weights."""
