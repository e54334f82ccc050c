"""Public path of a response of the policy."""

from verl.agents.servers import TokenOutput as TokenOutput
