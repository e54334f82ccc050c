from verl.compat.toolkit.calls import auto_await as auto_await
from verl.compat.toolkit.calls import get_event_loop as get_event_loop
