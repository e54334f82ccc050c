"""Coroutines called from plain code, from :mod:`verl.compat.toolkit.calls`."""

from verl.compat.import_hooks import old_names
from verl.compat.toolkit.calls import auto_await as auto_await
from verl.compat.toolkit.calls import get_event_loop as get_event_loop

__getattr__ = old_names(__name__)
