"""Seconds for conversations of several turns, with and without reuse of what earlier turns computed, in one run.

    python -m benchmarks.prefix_reuse [--conversations 8] [--turns 8] [--rounds 5]

Both contestants are the ``native`` engine, which serves each conversation's turns one after the other and all
conversations at once: a turn's prompt is the text so far and a tool's answer, as an agent loop sends it. They draw the
same number of tokens; of the prompts, one computes only what is new (``rollout.enable_prefix_caching``).
"""

from __future__ import annotations

import random
from collections.abc import Callable

from benchmarks import shape
from benchmarks.shape import FIRST_ORDINARY_TOKEN, TINY, Turns, Work

TARGET = 2.0
FIRST_PROMPT, TOOL_ANSWER, RESPONSE = 128, 96, 16
"""Tokens of the first prompt, of what comes between two turns, and of each turn's response."""


def conversations(folder: str, work: Work, count: int, turns: int, reuses: bool) -> Callable[[], None]:
    """All conversations from their first to their last turn."""
    import torch
    from transformers import AutoModelForCausalLM

    from verl.utils import hf_tokenizer
    from verl.workers.config import HFModelConfig, RolloutConfig
    from verl.workers.rollout.base import RolloutOutput, RolloutRequest, SamplingParams, get_rollout_class
    from verl.workers.rollout.request_queue import Answer, RequestQueue

    config = RolloutConfig(
        name="native",
        dtype="float32",
        prompt_length=FIRST_PROMPT + turns * (TOOL_ANSWER + RESPONSE),
        response_length=RESPONSE,
        free_cache_engine=False,
        tensor_model_parallel_size=1,
        enable_prefix_caching=reuses,
    )
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    engine = get_rollout_class("native")(config, HFModelConfig(path=folder), hf_tokenizer(folder), "cpu")
    version = 0

    def run() -> None:
        nonlocal version
        version += 1  # nothing of an earlier round is used
        chance = random.Random(0)

        def some(tokens: int) -> list[int]:
            return chance.choices(range(FIRST_ORDINARY_TOKEN, work.vocabulary), k=tokens)

        texts = [some(FIRST_PROMPT) for _ in range(count)]
        between = [[some(TOOL_ANSWER) for _ in range(turns)] for _ in range(count)]
        ended: list[int] = []

        def ask(number: int) -> None:
            which = number % count
            sampling = SamplingParams(max_tokens=RESPONSE, seed=number, ignore_eos=True)
            queue.put(number, RolloutRequest(texts[which], sampling))

        def on_answer(number: int, answer: Answer) -> None:
            assert isinstance(answer, RolloutOutput), answer
            assert len(answer.token_ids) == RESPONSE
            turn, which = divmod(number, count)
            texts[which] = texts[which] + answer.token_ids + between[which][turn]
            if turn + 1 < turns:
                ask(number + count)
            else:
                ended.append(which)
                if len(ended) == count:
                    queue.close()

        queue = RequestQueue(on_answer)
        with engine.awake(model.named_parameters, version):
            for which in range(count):
                ask(which)
            engine.serve(queue)
        assert len(ended) == count

    return run


def main() -> None:
    """The command line."""
    arguments = shape.conversations_parser(__doc__, conversations=8, turns=8).parse_args()
    work = TINY if arguments.tiny else Work()
    sizes = arguments.conversations, arguments.turns
    if arguments.contestant:
        turns = Turns()
        turns.serve(
            conversations(arguments.model, work, *sizes, arguments.contestant == "reuse"),
            versions=shape.versions("torch", "transformers"),
        )
        return
    found = shape.compare_conversations("prefix_reuse", arguments, work, ("reuse", "without"))
    found.print_times()
    what = f"{sizes[0]} conversations of {sizes[1]} turns, turns/s (native)"
    row = shape.speed_row(what, "without reuse of prefixes", found.seconds, "reuse", "without", TARGET)
    print(f"{what}: {row.ratio:.2f} times as many (target {TARGET:g})")
    found.write(
        arguments.json,
        part="prefix_reuse",
        work=(
            f"{work.describe()}; {sizes[0]} conversations of {FIRST_PROMPT} tokens, then {sizes[1]} turns of "
            f"{RESPONSE} new tokens and {TOOL_ANSWER} of a tool"
        ),
        rows=[row],
    )


if __name__ == "__main__":
    main()
