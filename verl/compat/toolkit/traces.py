"""Traces of agent loops and tools that users write: what was called in which trajectory, with which result."""

from __future__ import annotations

import functools
import inspect
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from verl.errors import ConfigError

logger = logging.getLogger(__name__)

F = TypeVar("F", bound=Callable[..., Any])

_is_traced: ContextVar[bool] = ContextVar("is_traced", default=True)


@dataclass
class RolloutTraceConfig:
    """Destination of this process's traces: one setting for the process, made by :meth:`init`.

    A run of verl traces by itself what its agent loops return (``rollout.trace``). This is for programs with loops of
    their own, which call :meth:`init` in each process.
    """

    _instance: ClassVar[RolloutTraceConfig | None] = None

    backend: str | None = None
    client: Any = None
    token2text: bool = False
    project_name: str | None = None
    experiment_name: str | None = None
    max_samples_per_step_per_worker: int | None = None

    @classmethod
    def get_instance(cls) -> RolloutTraceConfig:
        """Return the setting of this process; without :meth:`init` it sends nothing."""
        if cls._instance is None:
            cls._instance = cls()
        return cls._instance

    @classmethod
    def init(
        cls,
        project_name: str,
        experiment_name: str,
        backend: str | None,
        token2text: bool = False,
        max_samples_per_step_per_worker: int | None = None,
    ) -> None:
        """Choose where traces go; a second call does nothing until :meth:`reset`.

        Args:
            project_name: the experiment of MLflow.
            experiment_name: tag of each trace.
            backend: ``mlflow``, with the server of ``MLFLOW_TRACKING_URI``; None sends nothing.
            token2text: whether loops shall add the text of tokens to what they trace.
            max_samples_per_step_per_worker: how many samples of a step loops shall trace; None is all.

        Raises:
            ConfigError: there is no such backend.
        """
        if cls._instance is not None and cls._instance.project_name is not None:
            return
        if backend not in (None, "mlflow"):
            raise ConfigError(f"backend={backend!r} sends no traces in this version. Use mlflow, or None.")
        instance = cls.get_instance()
        instance.backend, instance.token2text = backend, token2text
        instance.project_name, instance.experiment_name = project_name, experiment_name
        instance.max_samples_per_step_per_worker = max_samples_per_step_per_worker
        if backend == "mlflow":
            import mlflow

            mlflow.set_experiment(project_name)
            instance.client = mlflow

    @classmethod
    def get_backend(cls) -> str | None:
        """Return the name of the backend, or None."""
        return cls.get_instance().backend

    @classmethod
    def get_client(cls) -> Any:
        """Return the module of the backend, or None."""
        return cls.get_instance().client

    @classmethod
    def enable_token2text(cls) -> bool:
        """Return whether loops shall add the text of tokens."""
        return cls.get_instance().token2text

    @classmethod
    def reset(cls) -> None:
        """Forget the setting."""
        cls._instance = None


@contextmanager
def rollout_trace_attr(
    sample_index: object = None,
    step: int | None = None,
    rollout_n: int | None = None,
    name: str = "rollout_trace",
    validate: bool = False,
    trace: bool = True,
) -> Iterator[None]:
    """Trace the block as one trajectory: calls under :func:`rollout_trace_op` inside of it are its parts.

    Args:
        sample_index: which prompt of the step; a tag of the trace, as are the next two.
        step: training step.
        rollout_n: which response to the prompt.
        name: name of the trace.
        validate: whether it is a validation; a tag.
        trace: with False nothing in the block is traced.
    """
    config = RolloutTraceConfig.get_instance()
    if config.backend is None or not trace:
        token = _is_traced.set(trace)
        try:
            yield
        finally:
            _is_traced.reset(token)
        return
    tags = {"sample_index": sample_index, "step": step, "rollout_n": rollout_n, "validate": validate}
    tags["experiment_name"] = config.experiment_name
    with config.client.start_span(name=name):
        config.client.update_current_trace(tags={key: str(value) for key, value in tags.items() if value is not None})
        yield


def rollout_trace_op(func: F) -> F:
    """Trace each call of a function or method: its arguments, its result, its time, and whether it raised.

    Without a backend of :class:`RolloutTraceConfig` the call is logged at the level DEBUG, which
    ``VERL_LOGGING_LEVEL=DEBUG`` shows.
    """
    signature = inspect.signature(func)

    @contextmanager
    def traced(args: tuple[object, ...], kwargs: dict[str, object]) -> Iterator[list[object]]:
        config, results = RolloutTraceConfig.get_instance(), []
        if config.backend is not None and _is_traced.get():
            with config.client.start_span(name=func.__qualname__) as span:
                inputs = signature.bind(*args, **kwargs).arguments
                span.set_inputs({name: value for name, value in inputs.items() if name != "self"})
                yield results
                span.set_outputs(results[0])
            return
        began, outcome = time.monotonic(), "raised"
        try:
            yield results
            outcome = "returned"
        finally:
            logger.debug("%s %s after %.3f s", func.__qualname__, outcome, time.monotonic() - began)

    @functools.wraps(func)
    async def call_async(*args: object, **kwargs: object) -> object:
        with traced(args, kwargs) as results:
            results.append(await func(*args, **kwargs))
        return results[0]

    @functools.wraps(func)
    def call(*args: object, **kwargs: object) -> object:
        with traced(args, kwargs) as results:
            results.append(func(*args, **kwargs))
        return results[0]

    return call_async if inspect.iscoroutinefunction(func) else call  # type: ignore[return-value]
