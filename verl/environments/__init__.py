"""Environments: what answers the policy's actions with observations and rewards."""
