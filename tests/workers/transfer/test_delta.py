"""Changes of tensors: how many bytes they take, and that they give the new tensor from the old one."""

from __future__ import annotations

import torch

from verl.workers.transfer.delta import Changes, _joined, apply, changes_of


def sent(new: torch.Tensor, old: torch.Tensor) -> tuple[int, int, int]:
    """Width of the gaps, elements that are sent, bytes of the payload; -1 without changes."""
    changes, pieces, _ = changes_of(new, old, 0)
    payload = _joined(pieces, torch.device("cpu"))
    memory = old.clone().view(torch.uint8)
    if changes is not None:
        apply([changes], payload, memory)
    assert torch.equal(memory, new.view(torch.uint8))
    return (-1, 0, 0) if changes is None else (changes.width, changes.entries, len(payload))


def test_gaps_are_as_wide_as_makes_the_whole_smallest():
    old = torch.zeros(1_000_000, dtype=torch.int16)
    assert sent(old.clone(), old) == (-1, 0, 0)
    new = old.clone()
    new[[0, 1, 300]] = 7
    # 1 byte: 298 elements are skipped before 300, so one more is sent: 4 entries, 4 -> 8 bytes and 8 bytes of values
    assert sent(new, old) == (1, 4, 16)
    new[[0, 1, 300]] = 0
    new[[999_999]] = 7
    # 2 bytes: 999,999 // 65,536 = 15 more, (15 + 1) * 4 = 64 bytes; 4 bytes: 4 + 2 = 6 bytes, 8 + 8 with alignment
    assert sent(new, old) == (4, 1, 16)
    new[::40_000] = 7
    # 25 of every 40,000th and the last one: 26 entries, 52 -> 56 bytes each
    assert sent(new, old) == (2, 26, 112)
    new[::40_000] = 0
    new[::3] = 7
    assert sent(new, old) == (1, 333_334, 333_336 + 666_672)  # each takes 3 of 6 bytes, with alignment
    new[:] = 7
    assert sent(new, old) == (0, 1_000_000, 2_000_000)


def test_random_changes_of_every_size_and_share_are_exact():
    generator = torch.Generator().manual_seed(0)
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        for share in (1e-5, 1e-3, 0.01, 0.3, 0.9):
            old = torch.randint(0, 100, (200_001,), generator=generator).to(dtype)
            new = torch.where(torch.rand(200_001, generator=generator) < share, old + 1, old)
            sent(new, old)


def test_changes_are_of_bits():
    old = torch.tensor([0.0, float("nan"), 1.0])
    new = torch.tensor([-0.0, float("nan"), 1.0])
    changes, _, count = changes_of(new.view(torch.int32), old.view(torch.int32), 64)
    assert (changes, count) == (Changes(start=64, nbytes=12, itemsize=4, width=1, entries=1), 1)
