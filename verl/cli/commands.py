"""The commands of ``verl`` that are those of other modules."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ModuleCommand:
    """A command whose arguments another module parses."""

    module: str
    """Has a function ``main()`` that reads ``sys.argv``."""
    summary: str
    configuration: str = ""
    """Name of the YAML file whose keys the command takes."""


MODULES: dict[str, ModuleCommand] = {
    "train": ModuleCommand("verl.trainer.main_ppo", "Train a policy: PPO, GRPO and their relatives.", "ppo_trainer"),
    "plan": ModuleCommand("verl.trainer.plan", "Memory and time of a run, before it starts.", "ppo_trainer"),
    "sft": ModuleCommand("verl.trainer.sft_trainer", "Supervised fine-tuning.", "sft_trainer"),
    "rm": ModuleCommand("verl.trainer.rm_trainer", "Train a reward model from preferences.", "rm_trainer"),
    "dpo": ModuleCommand("verl.trainer.dpo_trainer", "Train a policy from preferences.", "dpo_trainer"),
    "generate": ModuleCommand("verl.trainer.main_generation", "Generate responses to a file of prompts.", "generation"),
    "serve": ModuleCommand("verl.trainer.main_serve", "Serve a model that clients train, by HTTP (Tinker).", "serve"),
    "eval": ModuleCommand("verl.trainer.main_eval", "Score a file of responses.", "evaluation"),
    "merge": ModuleCommand("verl.model_merger.__main__", "Make a model folder of a sharded checkpoint."),
}
COMMAND_OF_CONFIGURATION = {command.configuration: f"verl {name}" for name, command in reversed(MODULES.items())}
"""Configuration → the first command that takes it."""
INSPECTIONS: dict[str, ModuleCommand] = {
    "data": ModuleCommand("verl.trainer.inspect_data", "The data of a run before it starts.", "ppo_trainer"),
    "rollouts": ModuleCommand("verl.trainer.inspect_rollouts", "The samples that a run has written."),
}
