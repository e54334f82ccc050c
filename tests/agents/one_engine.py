"""Agent loops on an engine that stays between batches, without a trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from verl.agents.manager import AgentLoopManager
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.tiny_run import make_tiny_run, overrides
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.fsdp_workers import ActorRolloutRefWorker


class OneEngine:
    """A tiny policy on one engine; it starts with the first batch."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.paths = folder, make_tiny_run(folder)
        self._group: LocalWorkerGroup | None = None

    def answer(self, prompts: DataProto, loops: Path, **settings: Any) -> DataProto:
        """Answer by the loop ``mine`` of a file; ``settings`` are those of ``rollout.agent``."""
        agent = {"agent_loop_config_path": loops, "default_agent_loop": "mine", "max_failure_rate": 1} | settings
        keys = {f"actor_rollout_ref__rollout__agent__{name}": value for name, value in agent.items()}
        config = load_config(compose(overrides(self.paths, self.folder, **keys)))
        if self._group is None:
            worker = LocalWorkerGroup.describe(
                ActorRolloutRefWorker, config=config.actor_rollout_ref, role="rollout", device_name="cpu"
            )
            self._group = LocalWorkerGroup(ray_cls_with_init=worker)
            self._group.init_model()
        manager = AgentLoopManager(config, self._group, hf_tokenizer(self.paths["model"]))
        try:
            return manager.generate_sequences(prompts)
        finally:
            manager.shutdown()
