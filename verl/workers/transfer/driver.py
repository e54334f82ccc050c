"""The driver's side of a transfer: which transport, between whom, and what happens when a process is lost."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import Any, Self
from uuid import uuid4

from verl.config import ActorRolloutRefConfig
from verl.errors import ConfigError, ProcessLostError, RolloutError
from verl.single_controller.base.worker_group import WorkerGroup
from verl.workers.transfer.link import Link, StoreAddress
from verl.workers.transfer.plan import RankFacts, TransferPlan, TransferReport
from verl.workers.transfer.transport import WeightTransport, transport_class

_GIVE_UP_S = 5.0
"""Longest wait for the store of a transfer that failed: it may have been lost with its process."""


class WeightTransfer:
    """Moves the policy's weights from the ranks that train it to ranks that only sample.

    ::

        transfer = WeightTransfer.from_config(config.actor_rollout_ref)
        metrics = transfer.update(actor_group, rollout_group, version=updates)

    Args:
        config: of the policy; ``rollout.checkpoint_engine`` names the transport.
    """

    def __init__(self, config: ActorRolloutRefConfig) -> None:
        self._config = config.rollout.checkpoint_engine
        self._ranks: tuple[tuple[str, int], ...] = ()
        self._session: tuple[str, StoreAddress] | None = None
        """Transport and store between the current processes."""

    @classmethod
    def from_config(cls, config: ActorRolloutRefConfig) -> Self:
        """Make one for a policy.

        Raises:
            ConfigError: ``custom_backend_module`` does not exist, or does not register ``backend``.
        """
        transfer = cls(config)
        transfer._transport_class("shared_memory" if transfer._config.backend == "naive" else transfer._config.backend)
        return transfer

    def update(self, actor_group: WorkerGroup, rollout_group: WorkerGroup, version: int) -> dict[str, float]:
        """Send the newest weights to all ranks of the rollout, which load them when they next wake.

        Both groups must be at rest: their engines sleep, and no other call is under way.

        Args:
            actor_group: workers of role ``actor``.
            rollout_group: workers of role ``rollout``.
            version: number of the weights, at least 0; responses drawn with them have it.

        Returns:
            ``timing_s/param_sync`` and ``weight_transfer/*``: ``bytes_sent`` to each receiving machine,
            ``bytes_of_weights``, ``seconds``.

        Raises:
            ProcessLostError: a rank of a group died or hangs. After it was replaced, the next update works.
            WorkerError: a rank failed.
            ConfigError: the transport cannot connect these groups.
        """
        began = time.perf_counter()
        receivers: list[RankFacts] = rollout_group.transfer_facts()
        senders: list[RankFacts] = actor_group.transfer_facts()
        transport, address = self._connected(actor_group, senders, receivers)
        machines = sorted({facts.machine for facts in receivers})
        held = receivers[0].held.items()
        plan = TransferPlan(
            version=version,
            transport=transport,
            address=address,
            transfer=uuid4().hex,
            machines=[machines.index(facts.machine) for facts in receivers],
            held={name: digest for name, digest in held if all(facts.held.get(name) == digest for facts in receivers)},
        )
        with contextlib.ExitStack() as on_error:
            on_error.callback(self.close)
            report = self._run(actor_group, rollout_group, plan)
            on_error.pop_all()
        seconds = time.perf_counter() - began
        return {
            "timing_s/param_sync": seconds,
            "weight_transfer/seconds": seconds,
            "weight_transfer/bytes_sent": float(report.bytes_sent),
            "weight_transfer/bytes_of_weights": float(report.bytes_of_weights),
        }

    def close(self) -> None:
        """Forget the connections; the next update makes new ones."""
        self._session = None

    def _transport_class(self, name: str) -> type[WeightTransport]:
        return transport_class(self._config, name)

    def _connected(
        self, actor_group: WorkerGroup, senders: Sequence[RankFacts], receivers: Sequence[RankFacts]
    ) -> tuple[str, StoreAddress]:
        """Return transport and store of the session; begin another one if the processes changed."""
        ranks = tuple((facts.machine, facts.pid) for facts in (*senders, *receivers))
        if self._session is not None and ranks == self._ranks:
            return self._session
        sender = senders[0]
        is_one_machine = all(facts.machine == sender.machine for facts in receivers)
        is_one_process = all((facts.machine, facts.pid) == (sender.machine, sender.pid) for facts in receivers)
        name = self._config.backend
        if name == "naive":
            name = "shared_memory" if is_one_machine else "nccl"
        transport = self._transport_class(name)
        if transport.needs_one_machine and not is_one_machine:
            raise ConfigError(
                f"rollout.checkpoint_engine.backend={name} reaches only rollout ranks on the machine of the trainer's "
                "first rank. Set it to naive or nccl."
            )
        if is_one_process and not transport.sends_before_receiving:
            raise ConfigError(
                f"rollout.checkpoint_engine.backend={name} connects processes, and trainer and rollout are one process "
                "here. Set it to naive."
            )
        session = uuid4().hex
        if is_one_process:
            address = StoreAddress("", None, session)
        else:
            host = actor_group.master_address
            address = StoreAddress(host, actor_group.execute_rank_zero_sync("serve_transfer_store", host), session)
        self._session, self._ranks = (name, address), ranks
        return self._session

    def _run(self, actor_group: WorkerGroup, rollout_group: WorkerGroup, plan: TransferPlan) -> TransferReport:
        started = [
            (actor_group, actor_group.send_weights(plan)),
            (rollout_group, rollout_group.receive_weights(plan, plan.version)),
        ]
        with ThreadPoolExecutor(len(started), "weight-transfer") as threads:
            waits = [threads.submit(group.wait_for, outputs) for group, outputs in started]
            done: set[Future[list[Any]]] = set()
            try:
                done, _ = wait(waits, return_when=FIRST_EXCEPTION)
            finally:
                if not done:  # Ctrl-C or SIGTERM: the threads, which are waited for, end with the ranks' calls
                    self._give_up(plan)
            first = [future.exception() for future in done if future.exception() is not None]
            if first:
                self._give_up(plan)
        errors = [*first, *(future.exception() for future in waits if future not in done)]
        errors = [error for error in errors if error is not None]
        if errors:
            raise next((error for error in errors if isinstance(error, ProcessLostError)), errors[0])
        return waits[0].result()[0]

    def _give_up(self, plan: TransferPlan) -> None:
        """Make the ranks that still wait for others raise."""
        with contextlib.suppress(RolloutError):  # the store was lost with its process, which all of them notice
            Link(plan.address.connect(_GIVE_UP_S), plan.transfer).give_up()
