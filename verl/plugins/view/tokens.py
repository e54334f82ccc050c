"""The tokens of a sample with their numbers, from the file beside its file."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa

from verl.errors import DataError
from verl.plugins.view.samples import SamplePlace
from verl.utils.token_page import described


def tokens_of(location: SamplePlace) -> dict[str, object] | None:
    """Return the tokens of a sample, or None without a file of tokens that its run wrote for its step.

    Returns:
        what :func:`verl.utils.token_page.described` says of it.

    Raises:
        DataError: the file of tokens cannot be read.
    """
    path = location.file.with_suffix(".arrow")
    if not path.is_file():
        return None
    try:
        row_and_names = _row_of(path, location)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if row_and_names is None:
        return None
    row, texts = row_and_names
    return described(row, texts)


def _row_of(path: Path, location: SamplePlace) -> tuple[dict[str, object], dict[str, str]] | None:
    """Read the ids of all rows, then the one block that has the row."""
    occurrence = location.occurrence
    with pa.memory_map(str(path)) as file:
        reader = pa.ipc.open_file(file)
        metadata = reader.schema.metadata or {}
        if metadata.get(b"run", location.writer.encode()) != location.writer.encode():
            return None  # another run left the file, and this one wrote no tokens
        names = reader.schema.names
        keys = [names.index(name) for name in ("uid", "sample_index") if name in names]
        ids = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=keys))
        for block in range(reader.num_record_batches):
            for position, key in enumerate(ids.get_batch(block).to_pylist()):
                if (str(key.get("uid")), key.get("sample_index", location.sibling)) != (location.uid, location.sibling):
                    continue
                if occurrence == 0:
                    texts = json.loads(metadata.get(b"tokens", b"{}"))
                    return reader.get_batch(block).slice(position, 1).to_pylist()[0], texts
                occurrence -= 1
    return None
