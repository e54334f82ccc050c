"""A run over several nodes of a real cluster on this machine, one of which dies: the same numbers, bit by bit."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

CLOCKS = ("timing", "perf/", "global_seqlen/")


def metrics_of(folder: Path, *arguments: str) -> list[dict[str, Any]]:
    folder.mkdir()
    run = subprocess.run(
        [sys.executable, "-m", "tests.trainer.train_on_nodes", str(folder), *arguments],
        cwd=Path(__file__).parents[2], capture_output=True, text=True, timeout=850,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-5000:]
    return [record["data"] for record in json.loads(run.stdout.splitlines()[-1])]


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("shared", ["ulysses", "megatron", "vllm"])
def test_a_run_that_loses_a_node_ends_with_the_numbers_of_one_that_does_not(shared: str, tmp_path: Path):
    if shared == "megatron":
        pytest.importorskip("verl.plugins.megatron.library")
    if shared == "vllm":  # in its own environment: make test-vllm SLOW=1
        pytest.importorskip("vllm")
    whole, lost = metrics_of(tmp_path / "whole", shared), metrics_of(tmp_path / "lost", shared, "lose")
    assert len(whole) == 3
    assert lost[-1]["recovery/restarts"] == 1
    for one, other in zip(whole, lost, strict=True):
        kept = [{k: v for k, v in m.items() if not k.startswith((*CLOCKS, "recovery/"))} for m in (one, other)]
        assert kept[0] == kept[1]
    assert whole[-1]["actor/grad_norm"] > 0
