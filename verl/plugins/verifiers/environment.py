"""Environments of verifiers (``vf.load_environment``), whose rubric scores the episode.

``env.run_rollout`` runs as it always does, with a client that hands each request for the model to the agent loop and
waits for the policy's turn. So the environment's own code decides on everything but the tokens.
"""

from __future__ import annotations

import asyncio
import functools
import json
import time
from typing import Any

from verl.base.requirements import install_command
from verl.base.types import JsonMapping, JsonObject
from verl.environments.base import Environment
from verl.errors import ConfigError

KEYS = ("env_id", "env_args", "per_episode")


class VerifiersEnvironment(Environment):
    """An environment of verifiers 0.3: SingleTurnEnv, MultiTurnEnv, ToolEnv and what derives from them.

    ``config`` has ``env_id`` and ``env_args``, as ``vf.load_environment`` takes them. It is loaded once in a process,
    unless ``per_episode`` is true: a rubric that keeps connections, to a judge for example, needs its own in each
    episode, as these have event loops of their own.

    A row's ``environment_kwargs`` have ``example``, a row of the environment's own training data set, whose prompt
    takes the place of the row's; or ``answer`` and ``info`` for the row's own prompt.
    """

    def __init__(self, config: JsonObject) -> None:
        super().__init__(config)
        load = _load_env if config.get("per_episode") else _cached_env
        self._env = load(config["env_id"], json.dumps(config.get("env_args") or {}))
        self._requests: asyncio.Queue[list[JsonObject]] = asyncio.Queue()
        self._known: list[JsonObject] = []
        self._turn: asyncio.Future[object] | None = None
        self._run: asyncio.Task[JsonMapping] | None = None

    @classmethod
    def check(cls, config: JsonObject) -> None:
        """See :meth:`verl.environments.base.Environment.check`."""
        if unknown := sorted(set(config) - set(KEYS)):
            raise ConfigError(f"unknown: {', '.join(unknown)}. Known: {', '.join(KEYS)}.")
        if not isinstance(config.get("env_id"), str):
            raise ConfigError(f"env_id={config.get('env_id')!r} must be the name of an installed environment.")
        env = _cached_env(config["env_id"], json.dumps(config.get("env_args") or {}))
        if env.requires_group_rollouts:
            raise ConfigError(f"{config['env_id']} scores groups of rollouts, and an episode is scored by itself here.")

    async def reset(
        self,
        *,
        seed: int,
        messages: list[JsonObject],
        example: int | None = None,
        answer: str = "",
        info: JsonMapping | None = None,
        **kwargs: object,
    ) -> list[JsonObject]:
        """Begin the rollout, and return its first request.

        Raises:
            ValueError: there is no such example, or the environment asks for nothing.
        """
        task = {"prompt": messages, "example_id": 0, "answer": answer, "info": dict(info or {})}
        if example is not None:
            data = self._env.get_dataset()
            if not 0 <= example < len(data):
                raise ValueError(f"example={example}: the environment has the examples 0 to {len(data) - 1}.")
            task = dict(data[example])
        self._run = asyncio.create_task(self._env.run_rollout(task, _client(self), "policy", {}))
        first = await self._next()
        if first is None:
            raise ValueError(f"the environment ended before its first request: {self._outcome()}.")
        self._known = first
        return first

    async def step(
        self, action: str, tool_calls: list[JsonObject] | None = None, **kwargs: object
    ) -> tuple[list[JsonObject], float | None, bool, bool, JsonObject]:
        """Answer the request by the policy's turn, and return what the next one adds.

        Raises:
            ValueError: the environment rewrote the conversation.
        """
        assert self._turn is not None
        self._turn.set_result(_response(action, tool_calls or []))
        request = await self._next()
        if request is None:
            outcome = self._outcome()
            return [], float(outcome["reward"] or 0.0), True, False, dict(outcome["metrics"] or {})
        new = request[len(self._known) + 1 :]
        if request[: len(self._known)] != self._known or not new or any(m["role"] == "assistant" for m in new):
            raise ValueError(
                "the environment rewrote the conversation, or made two requests without a message between them; "
                "use an agent program behind an endpoint for such environments"
            )
        self._known = request
        return new, None, False, False, {}

    async def score(self) -> float | None:
        """Return the rubric's score of an episode that a limit of the agent loop ended."""
        if self._run is None or self._run.done() or self._turn is None:
            return None
        from verifiers.errors import OverlongPromptError

        self._turn.set_exception(OverlongPromptError("a limit of turns or tokens is reached"))
        await self._run
        return float(self._outcome()["reward"] or 0.0)

    async def close(self) -> None:
        """End the rollout."""
        if self._run is not None and not self._run.done():
            self._run.cancel()
            await asyncio.wait([self._run])

    async def ask_policy(self, messages: list[JsonObject], tools: list[JsonObject]) -> object:
        """Hand a request to the agent loop and wait for the policy's turn; called by the client."""
        self.tools = tools
        self._turn = asyncio.get_running_loop().create_future()
        self._requests.put_nowait(messages)
        return await self._turn

    async def _next(self) -> list[JsonObject] | None:
        """The next request, or None if the rollout has ended."""
        assert self._run is not None
        asking = asyncio.create_task(self._requests.get())
        await asyncio.wait([asking, self._run], return_when=asyncio.FIRST_COMPLETED)
        if asking.done():
            return asking.result()
        asking.cancel()
        return None

    def _outcome(self) -> JsonMapping:
        assert self._run is not None
        outcome = self._run.result()
        if outcome.get("error"):
            raise RuntimeError(f"the rollout failed: {outcome['error']}")
        return outcome


def _load_env(env_id: str, arguments: str) -> Any:
    try:
        import verifiers
    except ImportError as error:
        raise ConfigError(
            f"verifiers is not installed: {install_command('verifiers')}, in an environment without the extra agents, "
            "whose mcp is a later one."
        ) from error
    if not hasattr(verifiers, "load_environment"):
        raise ConfigError("this version of verifiers has no load_environment; the adapter is for 0.3.")
    load = verifiers.load_environment  # pyright: ignore[reportAttributeAccessIssue]  without the package, this folder
    return load(env_id, **json.loads(arguments))


_cached_env = functools.cache(_load_env)
"""One for all episodes: loading may read a data set."""


def _client(environment: VerifiersEnvironment) -> object:
    """Make the client that a rollout asks for the model's turns."""
    from verifiers import Client  # pyright: ignore[reportAttributeAccessIssue]

    class PolicyClient(Client):
        async def get_response(
            self, prompt: Any, model: str, sampling_args: object, tools: Any = None, **kwargs: object
        ) -> Any:
            functions = [
                {"name": t.name, "description": t.description, "parameters": t.parameters} for t in tools or []
            ]
            descriptions = [{"type": "function", "function": function} for function in functions]
            return await environment.ask_policy([_message(one) for one in prompt], descriptions)

        def _unused(self, *args: object) -> object:
            raise NotImplementedError("the policy answers requests as they are")

        setup_client = to_native_tool = to_native_prompt = get_native_response = _unused
        raise_from_native_response = from_native_response = _unused

        async def close(self) -> None:
            return

    return PolicyClient(None)


def _message(message: Any) -> JsonObject:
    """A message as an OpenAI client would hold it."""
    plain = message.model_dump(exclude_none=True)
    if calls := plain.get("tool_calls"):
        plain["tool_calls"] = [
            {"id": c["id"], "type": "function", "function": {"name": c["name"], "arguments": c["arguments"]}}
            for c in calls
        ]
    return plain


def _response(action: str, calls: list[JsonObject]) -> object:
    from verifiers.types import Response, ResponseMessage, ToolCall

    made = [ToolCall(id=call["id"], **call["function"]) for call in calls]
    message = ResponseMessage(
        content=action, tool_calls=made or None, finish_reason="tool_calls" if made else "stop", is_truncated=False
    )
    return Response(id="policy", created=int(time.time()), model="policy", message=message)
