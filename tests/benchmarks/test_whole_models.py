"""Memory of paths that touch all weights, with a bound for each."""

from pathlib import Path

import pytest

from benchmarks.whole_models import shares, write_models

LAYER = 0.15  # of a model with few layers: one layer, or a file of a sixteenth of the model and one layer
PEAKS = {
    "load": 0.75,  # two ranks, each with its half
    "resume": LAYER,  # the weights have their memory before
    "merge": LAYER,
    "merge, LoRA": 0.3,  # a file, the adapters, and copies of one weight in fp32, in which it is merged
    "average": 0.6,  # its half of the average
    "export": 0.2,  # a file, and the weights that are gathered at a time, which the ranks share
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    write_models(folder, 0.5)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("name", PEAKS)
def test_no_process_holds_more_than_its_part(name: str, folder: Path) -> None:
    found = shares(name, folder, ranks=2, is_timed=False)
    assert max(found.peak) < PEAKS[name]
    assert sum(found.read) < 1.1
