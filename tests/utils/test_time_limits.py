"""Time limits by the size of a model's files."""

from __future__ import annotations

from pathlib import Path

import pytest

from verl.utils.model_facts.time_limits import time_limits

GB = 10**9


def sparse(path: Path, size: int) -> None:
    """A file of so many bytes that takes none on the disk."""
    with path.open("wb") as file:
        file.truncate(size)


# 70B: 141 GB at 0.2 GB/s are read in 705 s.
@pytest.mark.parametrize(
    ("size", "collective_s", "call_s", "vllm_s", "sglang_s"),
    [(GB, 600, 1800, 600, 900), (141 * GB, 3525, 7050, 2115, 2115), (45 * GB, 1125, 2250, 675, 900)],
)
def test_limits_grow_with_the_files(
    size: int, collective_s: int, call_s: float, vllm_s: float, sglang_s: float, tmp_path: Path
) -> None:
    for index in range(2):
        sparse(tmp_path / f"model-{index}.safetensors", size // 2)
    sparse(tmp_path / "pytorch_model.bin", size // 3)  # the same weights in another format
    limits = time_limits(str(tmp_path))
    assert (limits.collective_s, limits.call_s) == (collective_s, call_s)
    assert (limits.start_s("vllm"), limits.start_s("sglang")) == (vllm_s, sglang_s)


def test_a_model_in_the_cache_of_the_hub_is_as_large_as_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    snapshot = tmp_path / "models--of--large" / "snapshots" / "1"
    snapshot.mkdir(parents=True)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("1")
    (snapshot / "config.json").write_text("{}")
    sparse(snapshot / "model.safetensors", 141 * GB)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert time_limits("of/large").collective_s == 3525
    for unknown in ("of/none", "/no/such/folder", "", None):
        assert time_limits(unknown).collective_s == 600
