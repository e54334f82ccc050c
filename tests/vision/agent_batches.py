"""Agent loops on one engine with a tiny vision-language model, without a trainer; and the trainer's log-probs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from tests.support.tiny_run import make_tiny_run, overrides
from tests.support.vision_models import picture_rows, tiny_vision_model_dir, write_parquet
from tests.workers.support import make_engine
from verl.agents.manager import AgentLoopManager
from verl.datasets.rl_dataset import RLHFDataset, collate_fn
from verl.experience.sequences import with_prompts
from verl.protocol import DataProto
from verl.single_controller.local import LocalWorkerGroup
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config
from verl.utils import hf_processor, hf_tokenizer
from verl.workers.engine import MicroBatchConfig
from verl.workers.fsdp_workers import ActorRolloutRefWorker

P, R = 60, 40


class VisionAgents:
    """A tiny policy with images on one engine, answered by agent loops and by the engine alone."""

    def __init__(
        self,
        folder: Path,
        family: str = "qwen2_5_vl",
        name: str = "native",
        shape: Mapping[str, Any] = {},
        **settings: Any,
    ) -> None:
        self.path = tiny_vision_model_dir(folder / "vision", family, **shape)
        paths = make_tiny_run(folder) | {"model": self.path}
        keys = {
            "data__max_prompt_length": P,
            "data__max_response_length": R,
            "actor_rollout_ref__rollout__name": name,
            "actor_rollout_ref__rollout__agent__max_failure_rate": 1,
        }
        self.config = load_config(compose(overrides(paths, folder, **(keys | settings))))
        self._pool: Any = None
        arguments = {"config": self.config.actor_rollout_ref, "role": "rollout", "device_name": "cpu"}
        if self.config.trainer.controller == "local":
            worker = LocalWorkerGroup.describe(ActorRolloutRefWorker, **arguments)
            self.group: Any = LocalWorkerGroup(ray_cls_with_init=worker)
        else:
            from verl.single_controller.ray import RayResourcePool, RayWorkerGroup

            self._pool = RayResourcePool([1], use_gpu=False)
            worker = RayWorkerGroup.describe(ActorRolloutRefWorker, **arguments)
            self.group = RayWorkerGroup(self._pool, worker, device_name="cpu")
        self.group.init_model()
        self.tokenizer, self.processor = hf_tokenizer(self.path), hf_processor(self.path)
        self._folder = folder

    def prompts(self, rows: list[dict[str, Any]] | None = None, n: int = 2, **columns: list[Any]) -> DataProto:
        """Rows as the data set makes them, each ``n`` times."""
        file = write_parquet(self._folder / "rows.parquet", picture_rows(4, text_every=4) if rows is None else rows)
        section = {"max_prompt_length": self.config.data.max_prompt_length, "return_raw_chat": True}
        dataset = RLHFDataset(file, self.tokenizer, section, self.processor)
        batch = DataProto.from_single_dict(collate_fn([dataset[i] for i in range(len(dataset))]))
        more = {name: np.array(values, dtype=object) for name, values in columns.items()}
        batch = (batch | DataProto.from_dict(non_tensors=more)) if more else batch
        count = len(batch)
        batch = batch.repeat(n, interleave=True)
        batch.non_tensor_batch |= {"uid": np.repeat(np.arange(count), n), "sample_index": np.tile(np.arange(n), count)}
        return batch

    def answer(self, prompts: DataProto) -> DataProto:
        """Answer by agent loops, with the columns of the prompts as the trainer joins them."""
        manager = AgentLoopManager(self.config, self.group, self.tokenizer, self.processor)
        try:
            return with_prompts(prompts.select(batch_keys=[]), manager.generate_sequences(prompts))
        finally:
            manager.shutdown()

    def close(self) -> None:
        """End the ranks."""
        self.group.shutdown()
        if self._pool is not None:
            self._pool.release()

    def trainers_log_probs(self, batch: DataProto) -> Tensor:
        """log p of all response tokens by the training engine."""
        engine = make_engine(self.path, trained=False)
        return engine.infer_batch(batch, {"log_probs"}, MicroBatchConfig())["log_probs"]
