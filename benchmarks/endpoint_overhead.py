"""Conversations over the OpenAI endpoint against direct calls of the same engine with the same requests, in one run.

    python -m benchmarks.endpoint_overhead [--conversations 16] [--turns 4] [--rounds 5]

Both contestants hold the same conversations with the ``native`` engine, all at once: a question, and after each turn
of the policy another one. In one each turn is a POST to ``/v1/chat/completions`` with all messages so far, as an agent
program sends it, whose tokens the endpoint finds and records. The other writes tokens and calls
``server_manager.generate``, as an agent loop does. Both draw the same tokens.

The client, OpenAI's own, runs in the contestant's process, so its time counts; it is made before the time begins, as a
program makes it once. What it costs itself shows in a third contestant, which sends the same bodies with the least HTTP
that there is over a connection for each conversation: no client can make the first ratio larger than this one. The
processor times of all, which other programs change less than the times, are told too.

What a call costs does not depend on the model, and what the engine does for it does: so the ratio is measured with the
model of the other parts, and with one of the width and depth of SmolLM2-135M (Hugging Face, 2025), which is among the
smallest that people train.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import ssl
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AsyncExitStack
from dataclasses import replace
from functools import cache, partial
from typing import Any, Protocol, Self
from urllib.parse import urlsplit

from benchmarks import shape
from benchmarks.shape import TINY, Turns, Work

TARGET = 0.9
PROMPT, RESPONSE = 64, 32
"""Tokens that the first question may have, and of each turn of the policy."""
QUESTION = "and then?"
LARGER = Work(hidden=576, layers=30, heads=9, key_value_heads=3, intermediate=1536)
"""SmolLM2-135M but for its vocabulary."""
WAYS = ("OpenAI's client", "plain HTTP", "direct")


class EngineCalls:
    """The way from the conversations to the engine's queue; see :class:`verl.agents.policy.Connection`."""

    def __init__(self) -> None:
        from verl.workers.rollout.request_queue import RequestQueue

        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self.queue = RequestQueue(self._settle)

    def send(self, conversation: str, request: Any, on_part: object = None) -> EngineCall:
        """Send a request."""
        number, future = next(self._numbers), Future()
        self._asked[number] = future
        self.queue.put(number, request)
        return EngineCall(future)

    def _settle(self, number: int, answer: Any) -> None:
        future = self._asked.pop(number)
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)


class EngineCall:
    """A request under way."""

    def __init__(self, future: Future[Any]) -> None:
        self._future = future

    def future(self) -> Future[Any]:
        """Return what becomes of it."""
        return self._future

    def cancel(self) -> None:
        """Do nothing: no conversation is cancelled."""


class Post(Protocol):
    """Sends a body to the endpoint and returns its answer."""

    async def __call__(self, url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """Send it."""
        ...


class PlainConnection:
    """One connection, and HTTP without anything that this endpoint does not need."""

    def __init__(self) -> None:
        self._streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def __aenter__(self) -> Self:
        """Do nothing: the first call connects."""
        return self

    async def __aexit__(self, *_: object) -> None:
        """Close the connection."""
        if self._streams is not None:
            self._streams[1].close()

    async def post(self, url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        """See :class:`Post`."""
        place, data = urlsplit(url), json.dumps(body).encode()
        if self._streams is None:
            self._streams = await asyncio.open_connection(place.hostname, place.port)
        reader, writer = self._streams
        head = f"POST {place.path} HTTP/1.1\r\nhost: {place.netloc}\r\nauthorization: Bearer {key}\r\n"
        writer.write(f"{head}content-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n".encode() + data)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        assert answer.startswith(b"http/1.1 200 "), answer
        length = int(answer.partition(b"\r\ncontent-length:")[2].partition(b"\r\n")[0])
        return json.loads(await reader.readexactly(length))


async def connect(way: str, certificates: ssl.SSLContext, count: int, stack: AsyncExitStack) -> list[Post]:
    """Make what each conversation asks the endpoint by, until ``stack`` is closed."""
    import openai

    if way == "plain HTTP":
        return [(await stack.enter_async_context(PlainConnection())).post for _ in range(count)]
    http = openai.DefaultAsyncHttpxClient(trust_env=False, verify=certificates)
    client = await stack.enter_async_context(openai.AsyncOpenAI(api_key="-", http_client=http))

    @cache  # a program makes its client once, too
    def of(url: str, key: str) -> openai.AsyncOpenAI:
        return client.with_options(base_url=url.removesuffix("/chat/completions"), api_key=key)

    async def post(url: str, key: str, body: dict[str, Any]) -> dict[str, Any]:
        return (await of(url, key).chat.completions.create(**body)).model_dump()

    return [post] * count


def conversations(folder: str, count: int, turns: int, way: str) -> Callable[[], list[list[int]]]:
    """All conversations from their first to their last turn, in one of ``WAYS``; they return the tokens of each."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl.agents.chat_template import ChatTemplate
    from verl.agents.conversation import Conversation
    from verl.agents.parsers import get_tool_parser
    from verl.agents.policy import AsyncLLMServerManager, SampleId
    from verl.plugins.endpoint.recorder import RecorderSettings, TrajectoryRecorder
    from verl.plugins.endpoint.server import TrajectoryEndpoint
    from verl.utils import hf_tokenizer
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import SamplingParams, get_rollout_class

    config = RolloutConfig(
        name="native",
        dtype="float32",
        prompt_length=PROMPT,
        response_length=turns * (RESPONSE + PROMPT),
        free_cache_engine=False,
        tensor_model_parallel_size=1,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer = hf_tokenizer(folder)
    engine = get_rollout_class("native")(config, HFModelConfig(path=folder), tokenizer, "cpu")
    template = ChatTemplate(tokenizer)
    settings = RecorderSettings(
        template=template,
        parser=get_tool_parser("hermes", tokenizer),
        prompt_length=config.prompt_length,
        response_length=config.response_length,
    )
    endpoint = None if way == "direct" else TrajectoryEndpoint()
    certificates = ssl.create_default_context()  # a client reads them when it is made, also for http
    version = 0

    def asked(number: int) -> list[dict[str, Any]]:
        return [{"role": "user", "content": f"question {number}"}]

    async def direct(policy: AsyncLLMServerManager, number: int) -> list[int]:
        talk = Conversation(template, asked(number))
        for turn in range(turns):
            drawn = await policy.generate("talk", prompt_ids=talk.ids)
            said = tokenizer.decode(drawn.token_ids, skip_special_tokens=True)
            talk.add_drawn(drawn.token_ids, drawn.log_probs or [], {"content": said})
            if turn + 1 < turns:
                talk.add_messages([{"role": "user", "content": QUESTION}])
        return talk.ids

    async def over(post: Post, policy: AsyncLLMServerManager, number: int) -> list[int]:
        assert endpoint is not None
        recorder, messages = TrajectoryRecorder(policy, settings), asked(number)
        with endpoint.access(recorder) as access:
            for turn in range(turns):
                body = {"model": "policy", "messages": messages, "max_tokens": RESPONSE}
                reply = await post(f"{access.base_url}/chat/completions", access.api_key, body)
                said = reply["choices"][0]["message"]
                messages.append({"role": "assistant", "content": said["content"]})
                if turn + 1 < turns:
                    messages.append({"role": "user", "content": QUESTION})
        [output] = recorder.outputs()
        return [*output.prompt_ids, *output.response_ids]

    async def all_of_them(calls: EngineCalls) -> list[list[int]]:
        sampling = SamplingParams(max_tokens=RESPONSE, seed=0, ignore_eos=True)
        policies = [
            AsyncLLMServerManager(config, calls, SampleId(step=0, uid=str(n), sample_index=0), sampling)
            for n in range(count)
        ]
        async with AsyncExitStack() as stack:
            if way == "direct":
                holds = [direct] * count
            else:
                posts = await connect(way, certificates, count, stack)
                holds = [partial(over, post) for post in posts]
            return await asyncio.gather(*map(lambda hold, *of: hold(*of), holds, policies, range(count)))

    def run() -> list[list[int]]:
        nonlocal version
        version += 1  # nothing of an earlier round is used
        calls = EngineCalls()

        def converse() -> list[list[int]]:
            try:
                return asyncio.run(all_of_them(calls))
            finally:
                calls.queue.close()

        with ThreadPoolExecutor(1) as pool, engine.awake(model.named_parameters, version):
            found = pool.submit(converse)
            engine.serve(calls.queue)
        return found.result()

    return run


def main() -> None:
    """The command line."""
    arguments = shape.conversations_parser(__doc__, conversations=16, turns=4).parse_args()
    sizes = arguments.conversations, arguments.turns
    if arguments.contestant:
        run = conversations(arguments.model, *sizes, arguments.contestant)

        def turn() -> dict[str, int]:
            return {"tokens": sum(map(len, run()))}

        Turns().serve(turn, versions=shape.versions("torch", "transformers", "openai", "uvicorn"))
        return
    found, rows = shape.Comparison({}, {}), []
    for work in [TINY] if arguments.tiny else [LARGER, Work()]:
        one = shape.compare_conversations("endpoint_overhead", arguments, work, WAYS)
        rows += rows_of(one, f"{sizes[0]} conversations of {sizes[1]} turns", work)
        found |= one.named(f", {work.parameters / 1e6:.3g} M")
    found.print_times()
    found.write(
        arguments.json,
        part="endpoint_overhead",
        work=f"{Work().describe()}; {sizes[0]} conversations at once, {sizes[1]} turns of {RESPONSE} new tokens",
        rows=rows,
    )


def rows_of(found: shape.Comparison, what: str, work: Work) -> list[shape.Row]:
    """The rates over the endpoint with one model, by those of direct calls."""
    tokens = {reply["tokens"] for replies in found.replies.values() for reply in replies}
    assert len(tokens) == 1, tokens
    cpu = {name: min(reply["cpu_s"] for reply in replies) for name, replies in found.replies.items()}

    def row(way: str, told: str, target: float | None) -> shape.Row:
        made = shape.speed_row(told, "direct calls of the engine", found.seconds, way, "direct", target)
        return replace(made, detail=f"{made.detail}; processor time {cpu[way]:.3g} s : {cpu['direct']:.3g} s")

    over = f"{what} over the OpenAI endpoint (native, {work.parameters / 1e6:.3g} M parameters), OpenAI's client"
    bound = "the same with a client of bare HTTP, which bounds it"
    return [row("OpenAI's client", over, TARGET), row("plain HTTP", bound, None)]


if __name__ == "__main__":
    main()
