"""Public path of a response of the policy."""

from verl.agents.policy import TokenOutput as TokenOutput
