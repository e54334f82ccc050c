"""Coroutines called from plain code, from :mod:`verl.toolkit.calls`."""

from verl.base.doors import old_names
from verl.toolkit.calls import auto_await as auto_await
from verl.toolkit.calls import get_event_loop as get_event_loop

__getattr__ = old_names(__name__)
