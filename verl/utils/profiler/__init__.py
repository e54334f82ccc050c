"""Configuration of profilers; the profilers themselves are not in this version."""

from verl.utils.profiler.config import ProfilerConfig

__all__ = ["ProfilerConfig"]
