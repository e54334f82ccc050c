"""Processor time that log-probs in JSON take, for each 1,000 tokens, on both sides of a server of vLLM.

python -m benchmarks.answer_json
.venv-vllm/bin/python -m benchmarks.answer_json --server    # vLLM's own objects, in its environment
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

TOKENS = 1_000
ROUNDS = 50


def fastest_ms(work: Callable[[], object]) -> float:
    times = []
    for _ in range(ROUNDS):
        began = time.process_time()
        work()
        times.append(time.process_time() - began)
    return 1000 * min(times)


def read() -> dict[str, float]:
    """What our process does with an answer of vLLM's, and with one of plain lists."""
    top = {"token": "token_id:123456", "logprob": -0.123456789, "bytes": None}
    content = [top | {"top_logprobs": [top]} for _ in range(TOKENS)]
    tokens = [123456] * TOKENS
    answer = json.dumps({"choices": [{"logprobs": {"content": content}, "token_ids": tokens}]})
    plain = json.dumps({"logprobs": [-0.123456789] * TOKENS, "token_ids": tokens})

    def take() -> list[float]:
        return [entry["logprob"] for entry in json.loads(answer)["choices"][0]["logprobs"]["content"]]

    return {"objects of vLLM": fastest_ms(take), "plain lists": fastest_ms(lambda: json.loads(plain))}


def written() -> dict[str, float]:
    """What the server does: an object for each token, then their JSON."""
    from vllm.entrypoints.openai.chat_completion.protocol import (  # pyright: ignore[reportMissingImports]
        ChatCompletionLogProb,
        ChatCompletionLogProbs,
        ChatCompletionLogProbsContent,
    )

    def made() -> ChatCompletionLogProbs:
        one = {"token": "token_id:123456", "logprob": -0.123456789}
        return ChatCompletionLogProbs(
            content=[
                ChatCompletionLogProbsContent(**one, top_logprobs=[ChatCompletionLogProb(**one)]) for _ in range(TOKENS)
            ]
        )

    return {"objects": fastest_ms(made), "their JSON": fastest_ms(made().model_dump_json)}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--server", action="store_true", help="measure vLLM's side, with vLLM installed")
    for name, ms in (written() if parser.parse_args().server else read()).items():
        print(f"{name}: {ms:.2f} ms for {TOKENS:,} tokens")
