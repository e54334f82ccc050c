"""Conversations over the OpenAI endpoint against direct calls of the same engine with the same requests, in one run.

    python -m benchmarks.endpoint_overhead [--conversations 16] [--turns 4] [--rounds 5]

Both contestants hold the same conversations with the ``native`` engine, all at once: a question, and after each turn
of the policy another one. In one each turn is a POST to ``/v1/chat/completions`` with all messages so far, as an agent
program sends it, whose tokens the endpoint finds and records. The other writes tokens and calls
``server_manager.generate``, as an agent loop does. Both draw the same tokens. The HTTP client runs in the contestant's
process, so its time counts.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import sys
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

from benchmarks import shape
from benchmarks.shape import TINY, Turns, Work

TARGET = 0.9
PROMPT, RESPONSE = 64, 32
"""Tokens that the first question may have, and of each turn of the policy."""
QUESTION = "and then?"


class EngineCalls:
    """The way from the conversations to the engine's queue; see :class:`verl.agents.servers.Connection`."""

    def __init__(self) -> None:
        from verl.workers.rollout.serving import RequestQueue

        self._numbers = itertools.count()
        self._asked: dict[int, Future[Any]] = {}
        self.queue = RequestQueue(self._settle)

    def send(self, conversation: str, request: Any) -> EngineCall:
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


def conversations(folder: str, count: int, turns: int, over_http: bool) -> Callable[[], list[list[int]]]:
    """All conversations from their first to their last turn; they return the tokens of each."""
    import httpx2
    import torch
    from transformers import AutoModelForCausalLM

    from verl.agents.chat_template import ChatTemplate
    from verl.agents.conversation import Conversation
    from verl.agents.endpoint.recorder import RecorderSettings, TrajectoryRecorder
    from verl.agents.endpoint.server import TrajectoryEndpoint
    from verl.agents.parsers import get_tool_parser
    from verl.agents.servers import AsyncLLMServerManager, SampleId
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
    endpoint = TrajectoryEndpoint() if over_http else None
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

    async def over(client: httpx2.AsyncClient, policy: AsyncLLMServerManager, number: int) -> list[int]:
        assert endpoint is not None
        recorder, messages = TrajectoryRecorder(policy, settings), asked(number)
        with endpoint.access(recorder) as access:
            for turn in range(turns):
                reply = await client.post(
                    f"{access.base_url}/chat/completions",
                    json={"model": "policy", "messages": messages, "max_tokens": RESPONSE},
                    headers={"authorization": f"Bearer {access.api_key}"},
                )
                said = reply.raise_for_status().json()["choices"][0]["message"]
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
        async with httpx2.AsyncClient(timeout=600, trust_env=False) as client:
            hold = partial(over, client) if over_http else direct
            return await asyncio.gather(*map(hold, policies, range(count)))

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
    parser = shape.parser(__doc__)
    parser.add_argument("--conversations", type=int, default=16)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--contestant", help=shape.argparse.SUPPRESS)
    parser.add_argument("--model", help=shape.argparse.SUPPRESS)
    arguments = parser.parse_args()
    work = TINY if arguments.tiny else Work()
    sizes = arguments.conversations, arguments.turns
    if arguments.contestant:
        run = conversations(arguments.model, *sizes, over_http=arguments.contestant == "endpoint")

        def turn() -> dict[str, int]:
            return {"tokens": sum(map(len, run()))}

        Turns().serve(turn, versions=shape.versions("torch", "transformers", "httpx2", "uvicorn"))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = work.save_model(os.path.join(name, "model"))
        options = ["--conversations", str(sizes[0]), "--turns", str(sizes[1]), *(["--tiny"] if arguments.tiny else [])]
        command: list[Any] = [sys.executable, "-m", "benchmarks.endpoint_overhead", *options, "--model", folder]
        threads = {"OMP_NUM_THREADS": str(arguments.threads)}
        field = {title: ([*command, "--contestant", title], threads) for title in ("endpoint", "direct")}
        found = shape.compare(field, arguments.rounds)
    tokens = {reply["tokens"] for replies in found.replies.values() for reply in replies}
    assert len(tokens) == 1, tokens
    found.print_times()
    what = f"{sizes[0]} conversations of {sizes[1]} turns over the OpenAI endpoint (native)"
    row = shape.speed_row(what, "direct calls of the engine", found.seconds, "endpoint", "direct", TARGET)
    print(f"{what}: {row.ratio:.2f} of the rate of direct calls (target {TARGET:g})")
    found.write(
        arguments.json,
        part="endpoint_overhead",
        work=f"{work.describe()}; {sizes[0]} conversations at once, {sizes[1]} turns of {RESPONSE} new tokens",
        rows=[row],
    )


if __name__ == "__main__":
    main()
