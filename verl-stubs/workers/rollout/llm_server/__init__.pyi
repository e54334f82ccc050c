from verl.agents.servers import LLMServerClient as LLMServerClient
