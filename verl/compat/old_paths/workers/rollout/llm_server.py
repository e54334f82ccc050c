"""Public path of the policy as agent loops see it."""

from verl.agents.servers import LLMServerClient as LLMServerClient
