"""``python -m verl.trainer.inspect_rollouts``: dumps of samples with and without conversations."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from verl.plugins.inspect.rollouts import main


def line(name: str, status: str, conversation: list[dict], score: float = 0.0, message: str = "") -> dict:
    trajectory = {
        "id": name, "agent_name": "tool_agent", "agent": "main", "status": status, "message": message,
        "conversation": conversation, "turn_scores": [0.0, score], "prompt_ids": [1, 2], "response_ids": [3, 4, 5],
        "response_mask": [[1, 1], [0, 1], [1, 1]],
    }  # fmt: skip
    return {"input": "2*21?", "output": "42", "gts": "42", "score": score, "step": 3, "trajectory": trajectory}


CALL = {"id": "call00000", "type": "function", "function": {"name": "double", "arguments": '{"number": 21}'}}
TALK = [
    {"role": "user", "content": "2*21?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL], "seconds": 0.5},
    {"role": "tool", "name": "double", "content": "42", "seconds": 0.25, "failure": "tool_timeout"},
    {"role": "assistant", "content": "It is 42.", "seconds": 1.0},
]
PLAIN = [{"role": "assistant", "content": "drawn"}, {"role": "others", "content": "not drawn"}]


@pytest.fixture
def dump(tmp_path: Path) -> str:
    lines = [
        line("3-0/0", "done", TALK, 1.0),
        line("3-0/1", "timeout", PLAIN, message="it took longer than 9 s"),
        line("3-1/0", "done", PLAIN, 0.5),
        {"input": "1+1?", "output": "2", "gts": "2", "score": 1.0, "step": 3},
    ]
    (tmp_path / "3.jsonl").write_text("".join(json.dumps(one) + "\n" for one in lines))
    return str(tmp_path / "3.jsonl")


def test_a_conversation_is_shown_turn_by_turn(dump: str, capsys: pytest.CaptureFixture[str]):
    main([dump, "--id", "3-0/0", "--tokens"])
    out = capsys.readouterr().out
    table, _, shown = out.partition("---")
    cells = [[cell.strip() for cell in row.split("│")[1:-1]] for row in table.splitlines() if "│" in row]
    assert cells == [["(one turn)", "1", "1"], ["done", "2", "0.75"], ["timeout", "1", "0"]]
    assert [text.strip() for text in shown.splitlines()] == [
        "3-0/0 (tool_agent, main): done, score 1",
        "[user]",
        "2*21?",
        "[assistant] (0.50 s, score 0)",
        '→ double({"number": 21})',
        "[tool double] (0.25 s, tool_timeout)",
        "42",
        "[assistant] (1.00 s, score 1)",
        "It is 42.",
        "prompt_ids: [1, 2]",
        "response_ids: [3, 4, 5]",
        "response_mask: [[1, 1], [0, 1], [1, 1]]",
    ]


def test_scores_that_are_not_finite_are_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    row = line("3-0/0", "done", TALK)
    row["score"] = row["trajectory"]["turn_scores"][1] = None
    (tmp_path / "3.jsonl").write_text(json.dumps(row) + "\n" + json.dumps({"input": "", "output": "", "score": None}))
    main([str(tmp_path / "3.jsonl")])
    out = capsys.readouterr().out
    assert all(text in out for text in ("done, score nan", "(1.00 s, score nan)", "--- score nan"))


def test_samples_are_chosen_by_status_and_by_prompt(dump: str, capsys: pytest.CaptureFixture[str]):
    main([dump, "--status", "timeout"])
    shown = capsys.readouterr().out.partition("---")[2]
    assert all(text in shown for text in ("3-0/1", "it took longer than 9 s", "[others]"))
    assert "3-1/0" not in shown
    main([dump, "--id", "3-0", "--limit", "1"])
    shown = capsys.readouterr().out.partition("---")[2]
    assert all(text in shown for text in ("3-0/0", "1 more; --limit shows them"))
    assert "3-0/1" not in shown
    with pytest.raises(SystemExit) as ended:
        main([dump, "--status", "cancelled"])
    assert ended.value.code == 1


def test_other_files_are_refused(tmp_path: Path):
    (tmp_path / "other.jsonl").write_text('{"prompt": 1}\n')
    with pytest.raises(SystemExit, match="no dump of samples"):
        main([str(tmp_path / "other.jsonl")])
    with pytest.raises(SystemExit, match="cannot be read"):
        main([str(tmp_path / "none.jsonl")])


@pytest.mark.parametrize(
    "change",
    [
        {"score": "high"},
        {"score": 10**400},
        {"input": 3},
        {"trajectory": []},
        {"trajectory": {"status": ["done"]}},
        {"trajectory": line("1", "done", [{"content": "no role"}])["trajectory"]},
        {"trajectory": line("1", "done", PLAIN)["trajectory"] | {"turn_scores": None}},
    ],
)
def test_damaged_records_are_told_in_a_sentence(tmp_path: Path, change: dict):
    (tmp_path / "3.jsonl").write_text(json.dumps({"input": "1+1?", "output": "2", "score": 1.0} | change))
    with pytest.raises(SystemExit, match=r"3\.jsonl has a damaged record: .*Name a file"):
        main([str(tmp_path / "3.jsonl")])


def test_texts_cannot_write_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    texts = {"input": "\u2028in", "output": "\x1b]52;c;cm0=\x07"}
    (tmp_path / "3.jsonl").write_text(json.dumps(texts | {"score": 1.0}, ensure_ascii=False))
    main([str(tmp_path / "3.jsonl")])
    assert capsys.readouterr().out.endswith("[U+2028]in\n[U+001B]]52;c;cm0=\n")
