"""Data files: every format, and every way in which a file can be wrong."""

import json

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl.datasets.files import DataFile, choose_rows, open_files, require_columns
from verl.errors import DataError

ROWS = [{"prompt": "a", "truth": {"target": 3}}, {"prompt": "b\u2028c", "truth": {"target": 4}}]


def write(path, rows):
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False))
    else:
        path.write_text("\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n\n")
    return str(path)


@pytest.mark.parametrize("suffix", [".parquet", ".json", ".jsonl", ".ndjson"])
def test_every_format_gives_the_same_rows(tmp_path, suffix):
    (file,) = open_files(write(tmp_path / f"x{suffix}", ROWS), "data.train_files")
    assert len(file) == 2
    assert file.columns == ["prompt", "truth"]
    assert [file.row(0), file.row(1)] == ROWS
    assert list(file.column("prompt")) == ["a", "b\u2028c"]


def test_json_values_are_not_reinterpreted(tmp_path):
    # Columnar readers turn such texts into dates and refuse columns of mixed types.
    rows = [{"truth": "2024-01-01"}, {"truth": 7}, {"truth": [1, "x"]}, {}]
    (file,) = open_files(write(tmp_path / "x.jsonl", rows), "k")
    assert list(file.column("truth")) == ["2024-01-01", 7, [1, "x"], None]


def test_json_file_may_hold_lines(tmp_path):
    path = tmp_path / "x.json"
    path.write_text('{"prompt": "a"}\n{"prompt": "b"}\n')
    assert list(open_files(str(path), "k")[0].column("prompt")) == ["a", "b"]


def test_many_rows_in_row_groups(tmp_path):
    rows = [{"n": i} for i in range(1000)]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet", row_group_size=37)
    file = DataFile(tmp_path / "x.parquet")
    assert list(file.column("n")) == list(range(1000))
    assert [file.row(i)["n"] for i in (0, 36, 37, 999)] == [0, 36, 37, 999]


def test_lists_globs_home_and_variables(tmp_path, monkeypatch):
    for name in ("b.jsonl", "a.jsonl", "c.parquet"):
        write(tmp_path / name, ROWS)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("HERE", str(tmp_path))

    def names(paths):
        return [file.path.name for file in open_files(paths, "k")]

    assert names(["~/b.jsonl", "$HERE/c.parquet"]) == ["b.jsonl", "c.parquet"]
    assert names("$HERE/*.jsonl") == ["a.jsonl", "b.jsonl"]
    assert names(("${HERE}/a.jsonl",)) == ["a.jsonl"]


def test_a_name_with_glob_characters_is_a_name_first(tmp_path):
    assert open_files(write(tmp_path / "x[1].jsonl", ROWS), "k")[0].path.name == "x[1].jsonl"


@pytest.mark.parametrize(
    "name, content, says",
    [
        ("x.jsonl", '{"a": 1}\nnot json\n', ["x.jsonl", "line 2", "not json"]),
        ("x.jsonl", '{"a": 1}\n\n[1, 2]\n', ["line 3", "list", "[1, 2]"]),
        ("x.json", "[1, 2", ["x.json", "not valid JSON"]),
        ("x.json", '[{"a": 1}, 5]', ["element 1", "int", "5"]),
        ("x.json", "[]", ["x.json", "empty"]),
        ("x.jsonl", "", ["x.jsonl", "empty"]),
        ("x.jsonl", b"\xff\xfe\x00", ["x.jsonl", "UTF-8"]),
        ("x.parquet", "not a parquet file", ["x.parquet", "parquet"]),
        ("x.csv", "a,b", ["x.csv", ".parquet, .json, .jsonl"]),
    ],
)
def test_a_bad_file_is_named_with_what_is_wrong(tmp_path, name, content, says):
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError) as caught:
        open_files(str(path), "data.train_files")
    for part in says:
        assert part in str(caught.value)


def test_two_columns_of_one_name(tmp_path):
    pq.write_table(pa.table([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"]), tmp_path / "x.parquet")
    with pytest.raises(DataError, match="more than one column 'prompt'"):
        open_files(str(tmp_path / "x.parquet"), "data.train_files")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"prompt": ' + "[" * 100_000])
def test_json_too_deep_to_read(tmp_path, text):
    (tmp_path / "x.jsonl").write_text(text)
    with pytest.raises(DataError, match="not valid JSON"):
        open_files(str(tmp_path / "x.jsonl"), "data.train_files")


def test_empty_parquet(tmp_path):
    path = tmp_path / "x.parquet"
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), path)
    with pytest.raises(DataError, match="empty"):
        open_files(str(path), "k")


@pytest.mark.parametrize(
    "name, says",
    [
        ("nowhere/x.parquet", "data.val_files: there is no file 'nowhere/x.parquet'"),
        ("*.nothing", "there is no file"),
        ("$NOT_SET_ANYWHERE/x.parquet", "environment variable that is not set"),
        ("hdfs://host/x.parquet", "remote path"),
        (".", "is a folder"),
    ],
)
def test_a_path_that_is_no_file(name, says):
    with pytest.raises(DataError, match=r"data\.val_files") as caught:
        open_files(name, "data.val_files")
    assert says in str(caught.value)


def test_no_path_at_all():
    with pytest.raises(DataError, match=r"data\.train_files names no file"):
        open_files([], "data.train_files")


def test_a_missing_column_is_named_with_those_there_are(tmp_path):
    files = open_files([write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", [{"question": 1, "x": 2}])], "k")
    with pytest.raises(DataError) as caught:
        require_columns(files, {"prompt": "prompt_key"})
    message = str(caught.value)
    assert "b.jsonl has no column 'prompt'" in message
    assert "Its columns: question, x." in message
    assert "Set prompt_key" in message


def test_choose_rows(tmp_path):
    files = open_files([write(tmp_path / "a.jsonl", ROWS), write(tmp_path / "b.jsonl", ROWS * 3)], "k")
    everything = [(0, 0), (0, 1), *((1, n) for n in range(6))]
    assert choose_rows(files, -1, shuffle=True, seed=1) == everything
    assert choose_rows(files, 100, shuffle=True, seed=1) == everything
    assert choose_rows(files, 3, shuffle=False, seed=1) == everything[:3]
    chosen = choose_rows(files, 3, shuffle=True, seed=5)
    assert len(set(chosen)) == 3
    assert set(chosen) <= set(everything)
    assert chosen == choose_rows(files, 3, shuffle=True, seed=5)
    assert len({tuple(choose_rows(files, 3, shuffle=True, seed=seed)) for seed in range(8)}) > 1


def test_a_damaged_parquet_file_names_column_and_rows(tmp_path):
    path = tmp_path / "train.parquet"
    rows = {"prompt": [f"question {n} " * 20 for n in range(40)], "answer": [str(n) * 30 for n in range(40)]}
    kind = {"write_page_checksum": True, "use_dictionary": False, "compression": "none"}  # the checksum alone can tell
    pq.write_table(pa.table(rows), path, row_group_size=10, **kind)
    assert len(DataFile(path)) == 40
    meta = pq.ParquetFile(path).metadata.row_group(2).column(1)  # rows 20 to 29
    data = bytearray(path.read_bytes())
    data[meta.data_page_offset + meta.total_compressed_size - 5] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(DataError, match=r"train\.parquet is damaged in column 'answer' of rows 20 to 29: .*again"):
        DataFile(path)
    path.write_bytes(data[: len(data) // 2])  # a copy that broke off
    with pytest.raises(DataError, match=r"train\.parquet cannot be read as parquet"):
        DataFile(path)


def test_a_text_that_is_not_utf8_names_its_row(tmp_path):
    path = tmp_path / "train.parquet"
    texts = pa.array([b"fine", b"half \xc3", b"fine"], type=pa.binary()).view(pa.string())
    pq.write_table(pa.table({"n": [1, 2, 3], "prompt": texts}), path)
    file = DataFile(path)
    assert list(file.column("n")) == [1, 2, 3]
    assert file.row(2) == {"n": 3, "prompt": "fine"}
    with pytest.raises(DataError, match=r"train\.parquet, row 1, column 'prompt': a text is not UTF-8"):
        list(file.column("prompt"))
    with pytest.raises(DataError, match=r"train\.parquet, row 1: a text is not UTF-8"):
        file.row(1)


def test_a_line_that_was_cut_off_is_named(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"prompt": "a"}\n\n{"prompt": "b')
    with pytest.raises(DataError, match=r"train\.jsonl, line 3: not valid JSON"):
        DataFile(path)
