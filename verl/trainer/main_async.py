"""Train a policy on responses that other ranks sample meanwhile, with the settings of `fully_async_policy`.

`python -m verl.experimental.fully_async_policy.fully_async_main` and
`python -m verl.experimental.one_step_off_policy.main_ppo` begin here. Their settings become those of
`verl.trainer.main_ppo`, which has the same modes: docs/asynchronous.md.
"""

from __future__ import annotations

from verl.config import PPOConfig
from verl.trainer.config.command_line import command
from verl.trainer.main_ppo import run_ppo

fully_async = command(run_ppo, "fully_async_ppo_trainer", PPOConfig, restarts=True, module=globals())
one_step_off = command(run_ppo, "one_step_off_ppo_trainer", PPOConfig, restarts=True, module=globals())
