"""Refusals, and the columns of ``generate_sequences``."""

from __future__ import annotations

import pytest
import torch

from verl.config import SamplingConfig
from verl.errors import RolloutError, SchemaError
from verl.testing.rollout_conformance.engine_under_test import (
    PROMPTS,
    VOCAB,
    EngineUnderTest,
    oracle_greedy,
    oracle_log_probs,
    prompt_batch,
    request,
    weights_of,
)
from verl.workers.rollout.base import BaseRollout

# ---- what is refused


def check_what_cannot_be_served_is_refused(engine: EngineUnderTest) -> None:
    running = engine.ready()
    for bad, words in (
        (request([]), "request 1 has an empty prompt"),
        (request([5, VOCAB]), "outside of the vocabulary of 104"),
        (request([5] * 8, max_tokens=13), "8 prompt tokens and asks for 13 more, but there is room for 20"),
    ):
        with pytest.raises(RolloutError, match=words):
            running.generate([request(PROMPTS[0]), bad])


def check_without_weights_nothing_is_generated(engine: EngineUnderTest) -> None:
    running = engine.build()
    running.wake()
    with pytest.raises(RolloutError, match="no weights"):
        running.generate([request(PROMPTS[0])])


# ---- columns


def check_the_columns_by_hand(engine: EngineUnderTest) -> None:
    greedy_responses = [oracle_greedy(prompt, 4) for prompt in ([10, 20, 30], [7])]
    end = greedy_responses[1][1]
    running = engine.build(response_length=4, eos=[end])
    batch = prompt_batch([[10, 20, 30], [7]], width=5, do_sample=False)
    with running.awake(weights_of, version=9):
        columns = running.generate_sequences(batch)
    # The second response ends with its second token, unless that token comes earlier, in either response.
    lengths = [next((i + 1 for i, token in enumerate(c) if token == end), 4) for c in greedy_responses]
    rows = [c[:n] + [0] * (4 - n) for c, n in zip(greedy_responses, lengths, strict=True)]
    mask = [[1] * n + [0] * (4 - n) for n in lengths]
    expected = {
        "prompts": [[99, 99, 10, 20, 30], [99, 99, 99, 99, 7]],
        "responses": rows,
        "response_mask": mask,
        "input_ids": [[99, 99, 10, 20, 30, *rows[0]], [99, 99, 99, 99, 7, *rows[1]]],
        "attention_mask": [[0, 0, 1, 1, 1, *mask[0]], [0, 0, 0, 0, 1, *mask[1]]],
        "position_ids": [
            [0, 0, 0, 1, 2, *[2 + min(i, lengths[0]) for i in range(1, 5)]],
            [0, 0, 0, 0, 0, *[0 + min(i, lengths[1]) for i in range(1, 5)]],
        ],
    }
    assert lengths[1] <= 2
    assert set(columns.batch.keys()) == {*expected, "rollout_log_probs", "weight_versions"}
    assert columns.batch["weight_versions"].tolist() == [[9] * n + [-1] * (4 - n) for n in lengths]
    assert columns.batch["weight_versions"].dtype == torch.int32
    for name, values in expected.items():
        assert columns.batch[name].dtype == torch.int64
        assert columns.batch[name].tolist() == values, name
    log_probs = columns.batch["rollout_log_probs"]
    assert log_probs.dtype == torch.float32
    assert log_probs.shape == (2, 4)
    for row, (prompt, response) in enumerate(zip(([10, 20, 30], [7]), greedy_responses, strict=True)):
        n = lengths[row]
        torch.testing.assert_close(
            log_probs[row, :n], oracle_log_probs(prompt, response[:n], 1.0, "qwen3"), atol=1e-5, rtol=1e-5
        )
        assert log_probs[row, n:].tolist() == [0.0] * (4 - n)
    assert set(columns.non_tensor_batch) == {"finish_reason", "weight_version"}
    assert columns.non_tensor_batch["finish_reason"].tolist() == [
        "stop" if end in c else "length" for c in greedy_responses
    ]
    assert columns.non_tensor_batch["weight_version"].tolist() == [9, 9]


def check_columns_do_not_depend_on_order_or_split(engine: EngineUnderTest) -> None:
    batch = prompt_batch(PROMPTS[:5] * 2, indices=[0] * 5 + [1] * 5)
    running = engine.ready()
    together = running.generate_sequences(batch).batch["responses"]
    assert not torch.equal(together[:5], together[5:])  # siblings differ
    parts = [running.generate_sequences(part).batch["responses"] for part in batch.chunk(2)]
    assert torch.equal(torch.cat(parts), together)
    order = [9, 3, 0, 7, 1, 2, 8, 4, 6, 5]
    assert torch.equal(running.generate_sequences(batch[order]).batch["responses"], together[order])


def check_step_and_seed_change_the_samples(engine: EngineUnderTest) -> None:
    running, other = engine.ready(), engine.ready(seed=43)
    responses = [
        engine_.generate_sequences(prompt_batch(PROMPTS[:3], global_steps=step)).batch["responses"].tolist()
        for engine_, step in ((running, 1), (running, 1), (running, 2), (other, 1))
    ]
    assert responses[0] == responses[1]
    assert responses[0] != responses[2] != responses[3] != responses[0]


def check_validation_has_parameters_of_its_own(engine: EngineUnderTest) -> None:
    greedy_response = oracle_greedy(PROMPTS[0], 12)
    running = engine.ready(ignore_eos=True)

    def responses(engine_: BaseRollout, **meta: object) -> list[list[int]]:
        return engine_.generate_sequences(prompt_batch([PROMPTS[0]] * 3, **meta)).batch["responses"].tolist()

    assert responses(running, validate=True) == [greedy_response] * 3  # greedy by default
    assert responses(running) != [greedy_response] * 3
    assert responses(running, do_sample=False) == [greedy_response] * 3
    sampled = engine.ready(ignore_eos=True, val_kwargs=SamplingConfig(do_sample=True, temperature=1.0))
    assert responses(sampled, validate=True) == responses(running)  # the same seeds, the same parameters
    top_1 = engine.ready(ignore_eos=True, val_kwargs=SamplingConfig(do_sample=True, temperature=1.0, top_k=1))
    assert responses(top_1, validate=True) == [greedy_response] * 3
    short = engine.ready(ignore_eos=True, val_kwargs=SamplingConfig(max_tokens=5, stop_token_ids=(greedy_response[2],)))
    cut = min(greedy_response.index(greedy_response[2]) + 1, 5)
    assert responses(short, validate=True) == [greedy_response[:cut] + [0] * (12 - cut)] * 3


def check_prompts_that_do_not_fit_are_refused_by_uid(engine: EngineUnderTest) -> None:
    running = engine.ready()
    empty = prompt_batch([[5, 6], [7]])
    empty.batch["attention_mask"][1] = 0
    with pytest.raises(RolloutError, match=r"prompt 'prompt-\[7\]' is empty"):
        running.generate_sequences(empty)
    with pytest.raises(RolloutError, match=r"prompt 'prompt-\[5.*has 9 tokens, more than prompt_length=8"):
        running.generate_sequences(prompt_batch([[7], [5] * 9], width=9))
    right = prompt_batch([[5, 6], [7]])
    right.batch["attention_mask"] = right.batch["attention_mask"].flip(-1)
    with pytest.raises(SchemaError, match="padded on the left"):
        running.generate_sequences(right)
