"""For tests of what is computed on a CPU: how many threads compute, and numbers to compute with."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor


def threads_fixture(*counts: int) -> Any:
    """A fixture that lets PyTorch compute with each of these numbers of threads."""

    @pytest.fixture(params=counts, ids=lambda n: f"{n} threads")
    def threads(request: pytest.FixtureRequest) -> Iterator[int]:
        before = torch.get_num_threads()
        torch.set_num_threads(request.param)
        yield request.param
        torch.set_num_threads(before)

    return threads


def normal(*size: int, seed: int = 0) -> Tensor:
    """Draws from the standard normal distribution, the same for the same seed."""
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))
