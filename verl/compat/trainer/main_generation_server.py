"""Public path of :mod:`verl.trainer.main_generation`, whose engines are servers with ``rollout.name=vllm, sglang``."""

from verl.config import GenerationConfig
from verl.trainer.config.command_line import command
from verl.trainer.main_generation import run_generation as run_generation


def main() -> None:
    """Run the command line."""
    command(run_generation, config_name="generation_server", root=GenerationConfig)()


if __name__ == "__main__":
    main()
