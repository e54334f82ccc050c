"""Geometry3K (https://arxiv.org/abs/2105.04165), problems with a figure, as prompts with images for RL.

    python examples/data_preprocess/geo3k.py --local_dataset_path folder_with_train_and_test_parquet
    python examples/data_preprocess/geo3k.py                       # from the Hugging Face hub

Columns read: images, problem (with `<image>` where a figure belongs), answer. Images are bytes, paths (relative ones
begin at the current folder) or PIL images, and are written as bytes.
"""

from __future__ import annotations

import io
import os
import sys
from typing import Any

if __name__ == "__main__":  # the clone's root instead of this folder, whose math.py would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

from examples.data_preprocess._common import (
    Row,
    add_source,
    load_hub,
    load_splits,
    make_splits,
    parser,
    rl_row,
    run,
    save,
)
from verl.errors import DataError
from verl.vision.images import read_image
from verl.vision.messages import PLACEHOLDERS

IMAGE = PLACEHOLDERS["image"]
DATA_SOURCE = "hiyouga/geometry3k"
INSTRUCTION = (
    r"Think first, inside <think> </think>, and then give the final answer inside \boxed{}: "
    r"<think>...</think> \boxed{...}"
)


def make_row(row: Row, split: str, index: int) -> Row:
    """One problem with its figures; there is a placeholder for each, in front if the problem has none."""
    place = f"{split} row {index}"
    images = [{"bytes": _png(image, place), "path": None} for image in row["images"] or ()]
    problem = str(row["problem"])
    if IMAGE not in problem:
        problem = IMAGE * len(images) + problem
    if problem.count(IMAGE) != len(images):
        raise DataError(f"{place}: {len(images)} images and {problem.count(IMAGE)} {IMAGE}: {problem!r:.120}")
    answer = str(row["answer"])
    made = rl_row(
        DATA_SOURCE, f"{problem} {INSTRUCTION}", "math", answer, split, index, question=problem, answer=answer
    )
    return made | {"images": images}


def _png(image: Any, place: str) -> bytes:
    """The bytes of an image as they are, if it has any, else those of a PNG file of it."""
    given = image.get("bytes") if isinstance(image, dict) else image
    decoded = read_image(image, place)  # also refuses what a run could not read
    if isinstance(given, bytes):
        return given
    buffer = io.BytesIO()
    decoded.save(buffer, format="PNG")
    return buffer.getvalue()


def main() -> None:
    """Read, convert, write."""
    arguments = parser("Make Geometry3K prompts for RL.", "~/data/geo3k")
    add_source(arguments, DATA_SOURCE)
    args = arguments.parse_args()
    loaded = load_splits(args, ("images", "problem", "answer"), lambda: load_hub(DATA_SOURCE))
    save(make_splits(loaded, make_row, args), args.local_save_dir)


if __name__ == "__main__":
    run(main)
