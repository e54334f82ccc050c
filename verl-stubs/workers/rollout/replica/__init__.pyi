from verl.agents.servers import TokenOutput as TokenOutput
