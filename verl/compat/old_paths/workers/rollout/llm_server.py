"""Public path of the policy as agent loops see it."""

from verl.agents.servers import LLMServerClient as LLMServerClient
from verl.base.doors import old_names

__getattr__ = old_names(__name__)
