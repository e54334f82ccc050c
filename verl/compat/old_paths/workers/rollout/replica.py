"""Public path of a response of the policy."""

from verl.agents.servers import TokenOutput as TokenOutput
from verl.base.doors import old_names

__getattr__ = old_names(__name__)
