"""Write the pages of docs/configuration from the configuration classes and the table of keys without a field.

python -m docs.generate.configuration

A section that several commands have, or that stands below several roles, is printed once, with all of its places.
"""

from __future__ import annotations

import argparse
import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from markdown.extensions.toc import slugify

from verl.config import BaseConfig
from verl.config.problems import shown
from verl.trainer.config.fully_async import MOVED
from verl.trainer.config.generate import ENTRIES, Entry, status
from verl.trainer.config.key_table import ALIASES, RETIRED
from verl.trainer.config.keys import InactiveKey, Key, allowed_values, inactive_keys, iter_keys

FOLDER = Path(__file__).resolve().parents[1] / "configuration"

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

TOPICS: Mapping[str, tuple[str, Sequence[str]]] = {
    "run": ("Runs: length, checkpoints, recovery, Ray", ("ppo", "trainer")),
    "asynchronous": ("Asynchronous training", ("asynchronous",)),
    "data": ("Data of reinforcement learning", ("data",)),
    "policy": ("Policy, reference and critic", ("actor", "critic")),
    "algorithm": ("Algorithm", ("algorithm", "rollout_correction")),
    "rollout": ("Rollout and agents", ("rollout", "agent")),
    "rewards": ("Rewards", ("reward",)),
    "distillation": ("Distillation", ("distillation",)),
    "model": ("Models, optimizers and FSDP", ("model", "prediction")),
    "megatron": ("Megatron", ("megatron",)),
    "supervised": ("Supervised training and preferences", ("sft", "preference")),
    "services": ("Generation, evaluation and the service", ("generation", "serve")),
    "observation": ("Profiles, traces and metrics", ("profiler", "observation")),
}
"""Pages: their titles, and the modules of `verl.config` whose sections they have."""


@dataclass(frozen=True)
class Place:
    """Where a section stands: the command, the path of the section, and its keys."""

    entry: Entry
    path: str
    sentence: str
    fields: Sequence[Key]


Section = type[BaseConfig]
MIN_REPEATED = 5
"""Rows that two sections must have in common before the later one refers to the earlier one in their place."""


def places(entries: Iterable[Entry] = ENTRIES) -> dict[Section, list[Place]]:
    """Map each section's class to its places, in the order of the commands; a command's root is a place too."""
    mapping: dict[Section, list[Place]] = defaultdict(list)
    for entry in entries:
        keys = list(iter_keys(entry.root))
        sections = [("", entry.root, "Keys outside of any section.")]
        sections += [(key.path, key.section, key.sentence) for key in keys if key.section]
        for path, section, sentence in sections:
            fields = [key for key in keys if key.section is None and key.path.rpartition(".")[0] == path]
            mapping[section].append(Place(entry, path, sentence, fields))
    return mapping


def reference_pages() -> dict[str, str]:
    """Render the Markdown reference: file name to text."""
    section_places = places()
    rows = {section: _rows(section_list) for section, section_list in section_places.items()}
    pages = {"index.md": _index(section_places)}
    for name, (title, modules) in TOPICS.items():
        lines = [f"# {title}", "", "[How to set keys, and all commands](index.md)."]
        for module in modules:
            for section in section_places:
                if section.__module__ == f"verl.config.{module}":
                    lines += _section(section, section_places, rows)
        pages[f"{name}.md"] = "\n".join(lines) + "\n"
    return pages


def topic_of(section: Section) -> str:
    """Return the page of a section."""
    module = section.__module__.rpartition(".")[2]
    return next(name for name, (_, modules) in TOPICS.items() if module in modules)


def _index(section_places: Mapping[Section, Sequence[Place]]) -> str:
    lines = [INTRO]
    for entry in ENTRIES:
        lines += [f"## `python -m verl.trainer.{entry.module}`", "", f"`{entry.name}.yaml`", ""]
        lines += ["| section | contents | page |", "|---|---|---|"]
        for section, section_list in section_places.items():
            for place in section_list:
                if place.entry is entry and place.path and "." not in place.path:
                    topic = topic_of(section)
                    lines.append(_row(f"`{place.path}`", place.sentence, f"[{TOPICS[topic][0]}]({topic}.md)"))
        lines.append("")
    lines += ["## Other spellings", "", "Accepted for older scripts and published examples.", ""]
    lines += ["| spelling | key |", "|---|---|"]
    lines += [f"| `{alias.old}` | `{alias.new}` |" for alias in ALIASES]
    lines += [
        "",
        "Keys of `fully_async_main` and `one_step_off_policy.main_ppo` ([asynchronous](../asynchronous.md)):",
        "",
    ]
    lines += ["| key there | key of `main_ppo` |", "|---|---|"]
    lines += [f"| `{old}` | `{new}` |" for old, new in MOVED.items()]
    lines += ["", "Keys that are gone:", "", "| key | |", "|---|---|"]
    lines += [f"| `{retired.pattern}` | {retired.reason} |" for retired in RETIRED]
    return "\n".join(lines) + "\n"


def _rows(section_places: Sequence[Place]) -> dict[str, str]:
    """Render the rows of a section: name of a key to its row."""
    rows = {}
    for index, key in enumerate(section_places[0].fields):
        not_yet = "".join(f" *{value}: not yet*." for value in key.meta.refuse_values)
        defaults = _defaults([(place, place.fields[index]) for place in section_places])
        rows[key.name] = _row(f"`{key.name}`", allowed_values(key.field), defaults, key.sentence + not_yet)
    return rows


def _section(
    section: Section, section_places: Mapping[Section, Sequence[Place]], rows: Mapping[Section, Mapping[str, str]]
) -> Iterator[str]:
    """Render one section; rows that an earlier section has too are replaced by a reference to that."""
    place, *others = section_places[section]
    inactive = list(inactive_keys(section))
    if not place.fields and not inactive:
        return
    yield from ["", f"## {_heading(place)}", "", place.sentence, ""]
    if others:
        yield from [f"Also {_named(others)}.", ""]
    model, repeated = _repeated(section, rows)
    if model is not None:
        model_place = section_places[model][0]
        names = ", ".join(f"`{name}`" for name in repeated)
        yield from [f"As in [`{_heading(model_place)}`]({topic_of(model)}.md#{_anchor(model_place)}): {names}.", ""]
    remaining = [row for name, row in rows[section].items() if name not in repeated]
    if remaining:
        yield from ["| key | type | default | meaning |", "|---|---|---|---|", *remaining]
    yield from _inactive_rows(inactive)


def _repeated(section: Section, rows: Mapping[Section, Mapping[str, str]]) -> tuple[Section | None, list[str]]:
    """Return the earlier section with most of the same rows, and the names of these rows."""
    model, repeated = None, list[str]()
    for earlier in itertools.takewhile(lambda other: other is not section, rows):
        names = [name for name, row in rows[section].items() if rows[earlier].get(name) == row]
        if len(names) >= max(MIN_REPEATED, len(repeated) + 1):
            model, repeated = earlier, names
    return model, repeated


def _heading(place: Place) -> str:
    if not place.path:
        return place.entry.module
    return place.path + ("" if place.entry is ENTRIES[0] else f" of {place.entry.module}")


def _anchor(place: Place) -> str:
    """Return the anchor of a heading, as the site makes it."""
    return slugify(_heading(place), "-")


def _named(section_places: Sequence[Place]) -> str:
    """Name places: their paths, with the commands unless these are ``main_ppo``."""
    by_path: dict[str, list[str]] = defaultdict(list)
    for place in section_places:
        by_path[place.path].append("" if place.entry is ENTRIES[0] else f"`{place.entry.module}`")
    return ", ".join(
        f"`{path}`" + (f" of {_enumeration(modules)}" if any(modules) else "") for path, modules in by_path.items()
    )


def _enumeration(words: Sequence[str]) -> str:
    return " and ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def _defaults(keys: Sequence[tuple[Place, Key]]) -> str:
    """Render the default at the first place, and the others with their places."""
    by_default: dict[str, list[Place]] = defaultdict(list)
    for place, key in keys:
        by_default[f"`{shown(key.yaml_default)}`"].append(place)
    first, *others = by_default
    return "; ".join([first, *(f"{default} in {_named(by_default[default])}" for default in others)])


def _inactive_rows(keys: Sequence[InactiveKey]) -> Iterator[str]:
    by_status: dict[str, list[InactiveKey]] = {}
    for key in keys:
        if not key.path.endswith("_target_"):
            by_status.setdefault(status(key), []).append(key)
    if by_status:
        yield from ["", "| without effect | default | |", "|---|---|---|"]
    for text, group in by_status.items():
        names = ", ".join(f"`{key.path}`" for key in group)
        kind, _, why = text.partition(": ") if text.startswith(("not yet", "no effect")) else ("", "", text)
        defaults = ", ".join(f"`{shown(key.yaml_default)}`" for key in group)
        yield _row(names, defaults, f"*{kind}*: {why}" if kind else why)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"


def main() -> None:
    """The command line."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    FOLDER.mkdir(exist_ok=True)
    pages = reference_pages()
    for name, text in pages.items():
        (FOLDER / name).write_text(text)
    for page in FOLDER.glob("*.md"):
        if page.name not in pages:
            page.unlink()


if __name__ == "__main__":
    main()
