"""Write docs/configuration.md from the configuration classes and the table of keys without a field; takes seconds.

python -m docs.generate.configuration
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from verl.config import BaseConfig
from verl.config.problems import shown
from verl.trainer.config.fully_async import MOVED
from verl.trainer.config.generate import ENTRIES, Entry, status
from verl.trainer.config.key_table import ALIASES, RETIRED
from verl.trainer.config.keys import InactiveKey, allowed_values, inactive_keys, iter_keys

PAGE = Path(__file__).resolve().parents[1] / "configuration.md"

INTRO = """# Configuration

All settings of all commands, generated from the configuration classes by
`python -m docs.generate.configuration`.

Set keys on the command line (`data.train_batch_size=64`), or in your own YAML file that lists
`ppo_trainer` in its defaults. `--cfg job` prints the composed configuration and stops; `--help` lists the usual keys,
`--help SECTION` those of a section. All keys are checked before any model loads. Unknown keys, values out of bounds,
unsupported features and violated rules between keys are reported together.

A default in `${...}` is derived from another key. Keys *without effect* exist in other versions, so scripts may set
them. *not yet*: any value other than the default is rejected. *no effect*: accepted and ignored.
"""


def reference_page(entries: Iterable[Entry] = ENTRIES) -> str:
    """Render the Markdown reference: a chapter per entry point, a table per section, then other spellings."""
    lines = [INTRO]
    for entry in entries:
        lines += [f"## `python -m verl.trainer.{entry.module}`", "", f"`{entry.name}.yaml`", ""]
        lines += _chapter(entry.root)
    lines += ["## Other spellings", "", "Accepted for older scripts and published examples.", ""]
    lines += ["| spelling | key |", "|---|---|"]
    lines += [f"| `{alias.old}` | `{alias.new}` |" for alias in ALIASES]
    lines += [
        "",
        "Keys of `fully_async_main` and `one_step_off_policy.main_ppo` ([asynchronous](asynchronous.md)):",
        "",
    ]
    lines += ["| key there | key of `main_ppo` |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in MOVED.items()]
    lines += ["", "Keys that are gone:", "", "| key | |", "|---|---|"]
    lines += [f"| `{retired.pattern}` | {retired.reason} |" for retired in RETIRED]
    return "\n".join(lines) + "\n"


def _chapter(root: type[BaseConfig]) -> Iterator[str]:
    keys = list(iter_keys(root))
    for section in (key for key in keys if key.section is not None):
        assert section.section is not None
        fields = [k for k in keys if k.section is None and k.path.rpartition(".")[0] == section.path]
        inactive = list(inactive_keys(section.section))
        if fields or inactive:
            yield from ["", f"### {section.path}", "", section.sentence, ""]
        if fields:
            yield from ["| key | type | default | meaning |", "|---|---|---|---|"]
            for key in fields:
                not_yet = "".join(f" *{value}: not yet*." for value in key.meta.refuse_values)
                default = f"`{shown(key.yaml_default)}`"
                yield _row(f"`{key.name}`", allowed_values(key.field), default, key.sentence + not_yet)
        yield from _inactive_rows(inactive)
    yield from ["", "### Without effect, outside of any section", ""] if any(inactive_keys(root)) else []
    yield from _inactive_rows(list(inactive_keys(root)))
    yield ""


def _inactive_rows(keys: Sequence[InactiveKey]) -> Iterator[str]:
    by_status: dict[str, list[InactiveKey]] = {}
    for key in keys:
        if not key.path.endswith("_target_"):
            by_status.setdefault(status(key), []).append(key)
    if by_status:
        yield from ["", "| without effect | default | |", "|---|---|---|"]
    for said, group in by_status.items():
        names = ", ".join(f"`{key.path}`" for key in group)
        kind, _, why = said.partition(": ") if said.startswith(("not yet", "no effect")) else ("", "", said)
        defaults = ", ".join(f"`{shown(key.yaml_default)}`" for key in group)
        yield _row(names, defaults, f"*{kind}*: {why}" if kind else why)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    PAGE.write_text(reference_page())


if __name__ == "__main__":
    main()
