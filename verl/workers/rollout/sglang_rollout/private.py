"""Private parts of SGLang 0.5.23 that verl uses in this process; ``engine_side/verl_sglang.py`` has those in SGLang's.

``tests/workers/rollout/test_sglang.py`` fails if one of them is missing in another version.
"""

from __future__ import annotations

import asyncio
import atexit
from collections.abc import Callable, Coroutine
from typing import Any


def engine_classes() -> tuple[type[Any], type[Any]]:
    """SGLang's ``Engine`` with verl's sampler, and its ``ServerArgs``; ImportError if SGLang is not installed.

    The folder ``engine_side`` must be on ``sys.path``.
    """
    import verl_sglang
    from sglang.srt.entrypoints.engine import Engine
    from sglang.srt.server_args import ServerArgs

    class ContractEngine(Engine):
        run_scheduler_process_func = staticmethod(verl_sglang.run_scheduler_process)

    return ContractEngine, ServerArgs


def read_images_from_files() -> None:
    """Let engines of this process take images as ``verl_sglang`` reads them; may be called again."""
    import verl_sglang

    verl_sglang.read_images_from_files()


def stop_watchdog(engine: Any) -> None:
    """Stop the thread that ends this process when a child of SGLang dies."""
    watchdog = engine.tokenizer_manager._subprocess_watchdog
    if watchdog is not None:
        watchdog.stop()


def forget_shutdown(engine: Any) -> None:
    """Unregister SGLang's exit handler ``shutdown``, which ends every child of this process."""
    atexit.unregister(engine.shutdown)


def child_pids(engine: Any) -> list[int]:
    """Ids of the processes that the engine has started."""
    return engine.get_all_child_pids()


def call_soon(engine: Any, work: Callable[[], None]) -> None:
    """Schedule a function in the engine's event loop. Thread-safe."""
    engine.loop.call_soon_threadsafe(work)


def cancel_all(engine: Any) -> None:
    """Cancel all calls that wait for answers. Call it in the engine's event loop."""
    for task in asyncio.all_tasks(engine.loop):
        task.cancel()


def run(engine: Any, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine in the engine's event loop to its end."""
    engine.loop.run_until_complete(work)


def loads(engine: Any) -> list[Any]:
    """Return the newest report of its load that each scheduler has made, from shared memory. Thread-safe."""
    return engine.tokenizer_manager.load_snapshot_reader.read_all()


def abort(engine: Any, name: str) -> None:
    """Make SGLang abort one request. Call it in the engine's event loop."""
    engine.tokenizer_manager.abort_request(name)


def abort_all(engine: Any) -> None:
    """Make SGLang abort all requests that it has. Call it in the engine's event loop."""
    engine.tokenizer_manager.abort_request(abort_all=True)
