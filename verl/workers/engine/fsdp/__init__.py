"""The FSDP2 training engine for Transformers models."""

from verl.workers.engine.fsdp.engine import FSDPEngine

__all__ = ["FSDPEngine"]
