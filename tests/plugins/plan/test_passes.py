"""Tokens of passes whose rows share prompts: by hand, by counting, and against measured times and memory."""

import pytest

from benchmarks.shape import Work as Measured
from verl.plugins.plan.hardware import Cluster, gpu_named
from verl.plugins.plan.memory import ModelMemory, RankLayout
from verl.plugins.plan.passes import PassTokens, Rows
from verl.plugins.plan.shapes import ModelShape
from verl.plugins.plan.timing import Work, pass_seconds


def test_tokens_by_hand():
    # prompts of 10, responses of 3; four rows share a prompt
    alone, shared = Rows(10, 3), Rows(10, 3, 4)
    assert alone.for_rows(8) == PassTokens(8 * 13, 8 * 3, 8 * 13)
    assert shared.for_rows(8) == PassTokens(2 * 10 + 8 * 3, 8 * 3, 8 * 13)
    assert shared.for_rows(2) == PassTokens(10 + 2 * 3, 2 * 3, 2 * 13)
    # Passes of 6 begin at 0, 6, 12, ...: the first has 4 + 2 rows, the second 2 + 4.
    assert shared.for_rows(6) == PassTokens(2 * 10 + 6 * 3, 6 * 3, 6 * 13)
    # A budget of 16 has room for two responses to a prompt, one of 22 for all four; one of 44 for two such groups.
    assert shared.within(16) == PassTokens(16, 2 * 3, 2 * 13)
    assert shared.within(44) == PassTokens(44, 8 * 3, 8 * 13)
    assert alone.within(26) == PassTokens(26, 2 * 3, 26)
    assert [shared.prompts_per_row_within(tokens) for tokens in (13, 16, 19, 22, 44)] == [1, 1 / 2, 1 / 2, 1 / 4, 1 / 4]
    assert alone.prompts_per_row_within(44) == 1


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 6, 8, 12, 16])
def test_prompts_of_passes_are_those_that_one_counts(n, size):
    passes = [{row // n for row in range(start, start + size)} for start in range(0, size * n, size)]
    assert Rows(1, 0, n).prompts_per_row(size) * size * n == pytest.approx(sum(map(len, passes)))
    assert Rows(1, 0, n).for_rows(size).computed == max(map(len, passes))


@pytest.mark.parametrize(
    ("prompt", "response", "speed", "memory"), [(512, 128, 2.78, 271 / 746), (128, 512, 1.16, 705 / 780)]
)
def test_a_plan_agrees_with_what_was_measured(prompt, response, speed, memory):
    # docs/performance.md: log-probs and an update of 2 prompts with 8 responses, on a CPU. Fewer tokens reach
    # less of the peak there, which a plan does not know.
    work = Measured()
    fields = {
        "model_type": "qwen3", "hidden_size": work.hidden, "intermediate_size": work.intermediate,
        "num_hidden_layers": work.layers, "num_attention_heads": work.heads, "head_dim": work.head_dim,
        "num_key_value_heads": work.key_value_heads, "vocab_size": work.vocabulary, "tie_word_embeddings": True,
    }  # fmt: skip
    shape, layout = ModelShape.from_fields(fields, "config.json"), RankLayout(compute_bytes=4, is_gathered=False)
    model = ModelMemory(shape=shape, layout=layout, trained=shape.parameters(), checkpoints=False)
    cluster = Cluster(gpu=gpu_named("h100"), gpus=1, gpus_per_node=1, memory_gb=80, mfu=0.4)
    seconds, peak = {}, {}
    for group in (1, 8):
        rows = Rows(prompt, response, group)
        tokens, of_step = rows.for_rows(16), Work(16, prompt, response, rows.prompts_per_row(16))
        seconds[group] = sum(pass_seconds(model, cluster, of_step, tokens.computed, trains) for trains in (False, True))
        peak[group] = sum(model.training_pass(tokens).values())
    assert seconds[1] / seconds[8] == pytest.approx(speed, rel=0.12)
    assert peak[8] / peak[1] == pytest.approx(memory, rel=0.11)
