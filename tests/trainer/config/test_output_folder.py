"""Folders and logs that Hydra makes for a run."""

from __future__ import annotations

from tests.forks import Program


def test_two_runs_of_one_moment_have_two_folders_and_no_empty_log(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "a", "responses": ["b"], "data_source": "openai/gsm8k"}\n')
    words = ["-m", "verl.trainer.main_eval", "data.path=rows.jsonl"]
    runs = [Program(words, tmp_path / f"out{i}", tmp_path / f"err{i}", tmp_path) for i in range(3)]
    assert [run.wait(timeout=60) for run in runs] == [2, 2, 2]  # the rows have no answers
    folders = [path.parent for path in tmp_path.glob("outputs/*/*/.hydra")]
    assert len(folders) == 3
    for folder in folders:
        assert (folder / ".hydra" / "config.yaml").read_text()
        assert [path.name for path in folder.iterdir()] == [".hydra"]
