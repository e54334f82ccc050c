"""Memory and reading of every path that touches all weights, with bounds for each; no time is asserted."""

from pathlib import Path

import pytest

from benchmarks.whole_models import ROUTES, shares, write_models

LAYER = 0.15  # of a model with few layers: one layer, or a file of a sixteenth of the model and one layer
PEAKS = {
    "load": 0.5 + LAYER,  # two ranks, each with its half
    "load, experts": 0.5 + LAYER,
    "load, Megatron TP": 0.5 + LAYER,
    "from folder to engine": LAYER,
    "from folder to engine, experts": LAYER,
    "to engine": 0.5 + LAYER,  # the ranks share the weights in memory
    "average": 1.0 + LAYER,
    "export": 1.0 + LAYER,  # the files of each rank
    "save": LAYER,
    "save, Megatron TP": LAYER,
    "save, LoRA": LAYER,
    "resume": LAYER,
    "merge": LAYER,
    "merge, Megatron TP": LAYER,
    "merge, LoRA": LAYER,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, 0.5)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", ROUTES)
def test_no_process_holds_more_than_its_part(name: str, folder: Path) -> None:
    found = shares(name, folder, ranks=2)
    assert max(found.peak) < PEAKS[name]
