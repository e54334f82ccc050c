"""The compiled attention of packed sequences against PyTorch's own in fp64, values and gradients."""

from __future__ import annotations

from itertools import accumulate

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from verl.backends.cpu.kernels import CPUKernels, cpu_kernels

CASES = {
    "one block and a bit": ([33], 4, 2, 64, None),
    "ragged": ([1, 5, 70, 31, 152], 6, 2, 20, None),
    "a window inside of a block": ([100, 3], 4, 1, 128, 17),
    "a window over several blocks": ([150], 8, 2, 80, 70),
    "each token sees itself alone": ([40, 32], 3, 3, 8, 1),
    "a window longer than the text": ([20, 9], 2, 2, 16, 64),
    "blocks that fit exactly": ([64, 32, 96], 2, 1, 32, None),
}


def kernels() -> CPUKernels:
    found = cpu_kernels()
    if found is None:
        pytest.skip("no C compiler here")
    return found


def reference(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float, window: int | None
) -> Tensor:
    """Sequence by sequence, with a mask of all pairs."""
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        visible = torch.ones(len(q), len(q), dtype=torch.bool).tril()
        visible = visible if window is None else visible.triu(1 - window)
        heads = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(*heads, attn_mask=visible, scale=scale, enable_gqa=True)
        outputs.append(out.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


def inputs(
    lengths: list[int], heads: int, kv_heads: int, head_dim: int
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(sum(lengths))
    tokens = sum(lengths)
    query, grad = torch.randn(tokens, heads, head_dim), torch.randn(tokens, heads, head_dim)
    key, value = torch.randn(tokens, kv_heads, head_dim), torch.randn(tokens, kv_heads, head_dim)
    return query, key, value, grad, torch.tensor([0, *accumulate(lengths)])


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients(case: str) -> None:
    lengths, heads, kv_heads, head_dim, window = CASES[case]
    query, key, value, grad, starts = inputs(lengths, heads, kv_heads, head_dim)
    out, log_sums = kernels().attention_forward(query, key, value, starts, 0.3, window)
    found = kernels().attention_backward(grad, out, log_sums, query, key, value, starts, 0.3, window)
    wide = [x.double().requires_grad_() for x in (query, key, value)]
    expected = reference(wide[0], wide[1], wide[2], lengths, 0.3, window)
    expected.backward(grad.double())
    torch.testing.assert_close(out.double(), expected.detach(), atol=5e-6, rtol=1e-5)
    for ours, leaf in zip(found, wide, strict=True):
        assert leaf.grad is not None
        torch.testing.assert_close(ours.double(), leaf.grad, atol=2e-5, rtol=1e-4)


@pytest.mark.parametrize("case", CASES)
def test_queries_of_the_last_tokens_alone(case: str) -> None:
    """Some, all and one of the queries of each sequence, over all of its keys; the others' gradients are zero."""
    lengths, heads, kv_heads, head_dim, window = CASES[case]
    query, key, value, grad, key_starts = inputs(lengths, heads, kv_heads, head_dim)
    expected, sums = kernels().attention_forward(query, key, value, key_starts, 0.3, window)
    for kept in ([(n + 1) // 2 for n in lengths], lengths, [1] * len(lengths)):
        chosen = torch.cat([torch.arange(end - n, end) for n, end in zip(kept, accumulate(lengths), strict=True)])
        starts = torch.tensor([0, *accumulate(kept)])
        few = query[chosen]
        out, log_sums = kernels().attention_forward(few, key, value, starts, 0.3, window, key_starts)
        torch.testing.assert_close(out, expected[chosen], atol=1e-6, rtol=1e-6)
        # The gradients of a loss that reads these queries' outputs alone.
        read = torch.zeros_like(grad)
        read[chosen] = grad[chosen]
        whole = kernels().attention_backward(read, expected, sums, query, key, value, key_starts, 0.3, window)
        of = grad[chosen], out, log_sums, few, key, value, starts, 0.3, window, key_starts
        found = kernels().attention_backward(*of)
        torch.testing.assert_close(found, (whole[0][chosen], *whole[1:]), atol=1e-5, rtol=1e-5)


def test_threads_change_nothing() -> None:
    query, key, value, grad, starts = inputs([50, 7, 33], 4, 2, 64)
    results = []
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            out, log_sums = kernels().attention_forward(query, key, value, starts, 0.125)
            results.append((out, *kernels().attention_backward(grad, out, log_sums, query, key, value, starts, 0.125)))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_large_scores_do_not_overflow_and_nan_stays_in_its_sequence() -> None:
    query, key, value, _, starts = inputs([20, 20], 2, 2, 16)
    out, _ = kernels().attention_forward(query * 100, key * 100, value, starts, 1.0)
    torch.testing.assert_close(
        out.double(), reference((query * 100).double(), (key * 100).double(), value.double(), [20, 20], 1.0, None)
    )
    query[3, 1, 5] = float("nan")
    out, _ = kernels().attention_forward(query, key, value, starts, 0.25)
    is_nan = out.isnan().flatten(1).any(-1)
    assert is_nan.nonzero().flatten().tolist() == [3]
