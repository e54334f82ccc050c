"""The tokens of a sample with their numbers, from the file beside its file."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pyarrow as pa

from verl.errors import DataError
from verl.vision.families import IMAGE_TOKEN
from verl.vision.texts import image_word, runs

MOST_TOKENS = 40_000
"""Tokens of a response that a page is sent."""


def tokens_of(samples: Path, uid: str, sibling: Any, occurrence: int) -> dict[str, Any] | None:
    """Return the tokens of a sample, or None without a file of tokens for its step.

    Args:
        samples: the file of the sample, ``{step}.jsonl``; ``{step}.arrow`` is beside it.
        uid: group of the sample.
        sibling: its ``sample_index``.
        occurrence: its number among the samples with both, from 0.

    Returns:
        ``prompt`` and ``response`` as lists of {id, text}, ``mask``, ``numbers`` by column, ``weight_version``; and
        ``images``, first and last place of each image in the response and the word that stands for it.

    Raises:
        DataError: the file of tokens cannot be read.
    """
    path = samples.with_suffix(".arrow")
    if not path.is_file():
        return None
    try:
        found = _row_of(path, uid, sibling, occurrence)
    except (OSError, pa.ArrowInvalid) as error:
        raise DataError(f"{path} cannot be read ({error}).") from error
    if found is None:
        return None
    row, texts = found
    return _described(row, texts)


def _row_of(path: Path, uid: str, sibling: Any, occurrence: int) -> tuple[dict[str, Any], dict[str, str]] | None:
    """Read the ids of all rows, then the one block that has the row."""
    with pa.memory_map(str(path)) as file:
        whole = pa.ipc.open_file(file)
        names = whole.schema.names
        keys = [names.index(name) for name in ("uid", "sample_index") if name in names]
        ids = pa.ipc.open_file(file, options=pa.ipc.IpcReadOptions(included_fields=keys))
        for block in range(whole.num_record_batches):
            for position, key in enumerate(ids.get_batch(block).to_pylist()):
                if (str(key.get("uid")), key.get("sample_index", sibling)) != (uid, sibling):
                    continue
                if occurrence == 0:
                    texts = json.loads((whole.schema.metadata or {}).get(b"tokens", b"{}"))
                    return whole.get_batch(block).slice(position, 1).to_pylist()[0], texts
                occurrence -= 1
    return None


def _described(row: dict[str, Any], texts: dict[str, str]) -> dict[str, Any]:
    count = min(len(row["response_ids"]), MOST_TOKENS)
    lists = {name: values for name, values in row.items() if isinstance(values, list)}
    others = ("prompt_ids", "response_ids", "response_mask")
    numbers = {name: _finite(values[:count]) for name, values in lists.items() if name not in others}
    if {"old_log_probs", "rollout_log_probs"} <= lists.keys():
        pairs = zip(lists["old_log_probs"][:count], lists["rollout_log_probs"][:count], strict=True)
        numbers["log_prob_gap"] = [old - rollout for old, rollout in pairs]
    # Of the update, and so only on tokens that it trained on: elsewhere they are NaN in the file.
    if {"old_log_probs", "update_log_probs"} <= lists.keys():
        pairs = zip(lists["old_log_probs"][:count], lists["update_log_probs"][:count], strict=True)
        numbers["ratio"] = _finite([_exp(new - old) for old, new in pairs])
    response = _tokens(row["response_ids"][:count], texts)
    mask = row["response_mask"][:count]
    of_images = [token["text"] == IMAGE_TOKEN and not own for token, own in zip(response, mask, strict=True)]
    return {
        "prompt": _tokens(row["prompt_ids"][-MOST_TOKENS:], texts),
        "response": response,
        "mask": mask,
        "images": [(start, end - 1, image_word(end - start)) for is_image, start, end in runs(of_images) if is_image],
        "numbers": numbers,
        "weight_version": row.get("weight_version"),
        "left_out": len(row["response_ids"]) - count,
    }


def _tokens(ids: list[int], texts: dict[str, str]) -> list[dict[str, Any]]:
    return [{"id": one, "text": texts.get(str(one), f"<{one}>")} for one in ids]


def _exp(log_ratio: float) -> float:
    return math.exp(log_ratio) if log_ratio < 700 else math.inf  # above it a float overflows


def _finite(values: list[float]) -> list[float | None]:
    return [value if value == value and abs(value) != float("inf") else None for value in values]
