"""Write docs/internals/columns.md from verl/schema.py; takes seconds.

python -m docs.generate.columns
"""

from __future__ import annotations

import argparse
from pathlib import Path

from verl.schema import COLUMNS

PAGE = Path(__file__).resolve().parents[1] / "internals" / "columns.md"
HEAD = """# Table of columns

Made by `python -m docs.generate.columns` from `verl/schema.py`. What a batch is: [batches](../data_protocol.md).

`sequence_length` is `prompt_length + response_length`; while there are only prompts, it is `prompt_length`. Columns of
dtype `object` are in `non_tensor_batch`, all others in `batch`.

| column | dtype | dimensions | meaning | made by | read by |
|---|---|---|---|---|---|
"""


def page() -> str:
    """All columns as a Markdown page."""
    lines = []
    for column in COLUMNS.values():
        dims, consumers = ", ".join(column.dims), ", ".join(column.consumers)
        lines.append(
            f"| `{column.name}` | {column.dtype} | ({dims}) | {column.meaning} | {column.producer} | {consumers} |"
        )
    return HEAD + "\n".join(lines) + "\n"


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
