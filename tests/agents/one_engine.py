"""Agent loops on an engine that stays between batches, without a trainer; and the trainer's log-probs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.support.chat_templates import chat_tokenizer
from tests.support.tiny_run import make_tiny_run, overrides
from tests.workers.support import make_engine
from verl.agents.manager import AgentLoopManager
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.testing.models import tiny_model
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils.tokenizer import hf_tokenizer
from verl.workers.engine import MicroBatchConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker


class OneEngine:
    """A tiny policy on one engine; it starts with the first batch.

    Args:
        folder: for the model.
        template: a family of ``tests.support.chat_templates``, whose tokenizer and chat template the policy has.
        family: of such a policy, as for ``tiny_model``.
        **changes: overrides of the run, by dotted key with ``__`` for dots.
    """

    def __init__(self, folder: Path, template: str | None = None, family: str = "qwen3", **changes: Any) -> None:
        self.folder, self.paths = folder, make_tiny_run(folder)
        if template is not None:
            self.paths["model"] = str(folder / template)
            tokenizer = chat_tokenizer(template)
            model = tiny_model(family, vocab=len(tokenizer), eos_token_id=tokenizer.eos_token_id)
            model.save_pretrained(folder / template)
            tokenizer.save_pretrained(folder / template)
        self.tokenizer = hf_tokenizer(self.paths["model"])
        self._changes = changes
        self._group: LocalWorkerGroup | None = None

    def answer(self, prompts: DataProto, loops: Path, **settings: Any) -> DataProto:
        """Answer by the loop ``mine`` of a file; ``settings`` are those of ``rollout.agent``."""
        agent = {"agent_loop_config_path": loops, "default_agent_loop": "mine", "max_failure_rate": 1} | settings
        keys = {f"actor_rollout_ref__rollout__agent__{name}": value for name, value in agent.items()}
        config = load_config(compose(overrides(self.paths, self.folder, **(self._changes | keys))))
        if self._group is None:
            worker = LocalWorkerGroup.describe(
                ActorRolloutRefWorker, config=config.actor_rollout_ref, role="rollout", device_name="cpu"
            )
            self._group = LocalWorkerGroup(ray_cls_with_init=worker)
            self._group.init_model()
        manager = AgentLoopManager(config, self._group, self.tokenizer)
        try:
            return manager.generate_sequences(prompts)
        finally:
            manager.shutdown()

    def trainers_log_probs(self, batch: DataProto) -> Tensor:
        """log p of all response tokens by the training engine."""
        engine = make_engine(self.paths["model"], trained=False)
        return engine.infer_batch(batch, {"log_probs"}, MicroBatchConfig())["log_probs"]


def prompts(does: list[str], question: str = "2?") -> DataProto:
    """One prompt for each of the names in the column ``does``."""
    ids = torch.full((len(does), 4), 9)
    raw = np.empty(len(does), dtype=object)
    raw[:] = [[{"role": "user", "content": question}] for _ in does]
    return DataProto.from_dict(
        tensors={"input_ids": ids, "attention_mask": torch.ones_like(ids)},
        non_tensors={
            "uid": np.array([f"1-{what}" for what in does], dtype=object),
            "sample_index": np.zeros(len(does), dtype=int),
            "does": np.array(does, dtype=object),
            "raw_prompt": raw,
        },
        meta_info={"global_steps": 1, "validate": False},
    )
