"""Public path of the policy as agent loops see it."""

from verl.agents.servers import LLMServerClient as LLMServerClient
from verl.compat.import_hooks import old_names

__getattr__ = old_names(__name__)
