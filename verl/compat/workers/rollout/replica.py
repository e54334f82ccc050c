"""Public path of a response of the policy."""

from verl.agents.servers import TokenOutput as TokenOutput
from verl.base.doors import absent_names

__getattr__ = absent_names(__name__)
