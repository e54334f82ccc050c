"""The VeOmni training engine: VeOmni's models and kernels, trained as under FSDP2.

Importing this package needs VeOmni (the extra ``veomni``); the registry imports it when ``strategy=veomni`` asks for
it.
"""

from verl.plugins.veomni.engine import VeOmniEngine

__all__ = ["VeOmniEngine"]
