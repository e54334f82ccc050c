"""Scoring within a rollout: see :mod:`verl.experimental.reward_loop.reward_manager`."""
