"""Public path of the policy as agent loops see it."""

from verl.agents.policy import LLMServerClient as LLMServerClient
