"""``python -m verl.trainer.main_generation_server``: main_generation, with the keys and defaults of its public name.

``actor_rollout_ref.model.*``, ``actor_rollout_ref.rollout.*`` and ``data.train_files`` are other spellings there; the
engines are servers with ``rollout.name=vllm`` or ``sglang``.
"""

from __future__ import annotations

from verl.config import GenerationConfig
from verl.trainer.config.command_line import command
from verl.trainer.main_generation import run_generation


def main() -> None:
    """Run the command line."""
    command(run_generation, config_name="generation_server", root=GenerationConfig)()


if __name__ == "__main__":
    main()
