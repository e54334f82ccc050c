"""Public path of a response of the policy."""

from verl.agents.servers import TokenOutput as TokenOutput
from verl.compat.import_hooks import old_names

__getattr__ = old_names(__name__)
