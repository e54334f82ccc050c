from verl.toolkit.calls import auto_await as auto_await
from verl.toolkit.calls import get_event_loop as get_event_loop
