"""``python -m verl.trainer.main_generation_server``: main_generation, with the keys and defaults of its public name.

``actor_rollout_ref.model.*``, ``actor_rollout_ref.rollout.*`` and ``data.train_files`` are other spellings there; the
engines are servers with ``rollout.name=vllm`` or ``sglang``.
"""

from __future__ import annotations

from verl.config import GenerationConfig
from verl.trainer.entry import entry

_, main, __getattr__ = entry(
    globals(), GenerationConfig, "verl.trainer.generation:GenerationRunner", config_name="generation_server"
)


if __name__ == "__main__":
    main()
