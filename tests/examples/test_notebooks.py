"""The notebooks run from their first cell to their last, and show what their texts say."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[2] / "examples/notebooks"


def executed(name: str) -> Any:
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    return notebook


def outputs(notebook: Any, ending: str) -> list[Any]:
    """What the cell whose source ends so showed."""
    (cell,) = [c for c in notebook.cells if c.cell_type == "code" and c.source.endswith(ending)]
    return cell.outputs


def value(notebook: Any, ending: str) -> Any:
    (result,) = [o for o in outputs(notebook, ending) if o.output_type == "execute_result"]
    return ast.literal_eval(result.data["text/plain"])


@pytest.mark.slow
def test_the_tour_shows_what_it_says() -> None:
    tour = executed("tour.ipynb")
    assert value(tour, "\ngap") < 1e-5
    assert value(tour, "\ncorrelation") > 0.5
    pairs = value(tour, "strict=True))")
    assert len(pairs) == 8
    assert all(hand == pytest.approx(ours, abs=1e-5) for hand, ours in pairs)
    assert any("image/png" in o.get("data", {}) for o in outputs(tour, "\ncorrelation"))


@pytest.mark.slow
def test_one_call_trains_in_a_notebook() -> None:
    train = executed("train.ipynb")
    before, after = value(train, "\nbefore.mean, after.mean")
    assert after > before + 0.3
    shown = [o["data"]["text/html"] for o in outputs(train, "\nresult") if "progress" in str(o.get("data"))]
    assert len(shown) == 1  # one table, replaced in place
    assert "15/15 steps" in shown[0]
    assert value(train, "notebook lives").startswith("http://127.0.0.1:")
    said = value(train, '["conversation"]')
    assert [message["role"] for message in said][:2] == ["user", "assistant"]


@pytest.mark.parametrize("path", sorted(NOTEBOOKS.glob("*.ipynb")), ids=lambda path: path.name)
def test_notebooks_are_kept_without_results(path: Path) -> None:
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert [c.outputs for c in notebook.cells if c.cell_type == "code" and (c.outputs or c.execution_count)] == []
