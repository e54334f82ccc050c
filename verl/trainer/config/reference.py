"""The reference of all settings, as a page of the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from verl.base_config import BaseConfig
from verl.trainer.config.aliases import ALIASES, RETIRED
from verl.trainer.config.describe import allowed_values
from verl.trainer.config.keys import Key, iter_keys
from verl.trainer.config.problems import shown

INTRO = """# Configuration

Every setting of every entry point, made from the configuration classes by
`python -m verl.trainer.config.generate`.

Set keys on the command line (`data.train_batch_size=64`), or in a YAML file of your own that lists
`ppo_trainer` in its defaults. `--cfg job` prints the composed configuration and stops. All keys are
checked before any model loads: unknown keys, values out of bounds, features that this version
lacks, and rules that span keys are reported together.

**Status**: a setting without one works. *not yet*: any other value than the default is refused.
*no effect*: accepted, and changes nothing here. A default in `${...}` is derived from another key.
"""

MODULES = {
    "ppo_trainer": "verl.trainer.main_ppo",
    "sft_trainer": "verl.trainer.sft_trainer",
    "rm_trainer": "verl.trainer.rm_trainer",
    "dpo_trainer": "verl.trainer.dpo_trainer",
    "generation": "verl.trainer.main_generation",
    "evaluation": "verl.trainer.main_eval",
}


def reference_page(roots: Mapping[str, type[BaseConfig]]) -> str:
    """Markdown: one chapter per entry point, one table per section, then the other spellings."""
    lines = [INTRO]
    for name, root in roots.items():
        lines += [f"## `python -m {MODULES[name]}`", "", f"`{name}.yaml`", ""]
        lines += _chapter(root)
    lines += ["## Other spellings", "", "Accepted for older scripts and published examples.", ""]
    lines += ["| spelling | key |", "|---|---|"]
    lines += [f"| `{alias.old}` | `{alias.new}` |" for alias in ALIASES]
    lines += ["", "Keys that are gone:", "", "| key | |", "|---|---|"]
    lines += [f"| `{retired.pattern}` | {retired.reason} |" for retired in RETIRED]
    return "\n".join(lines) + "\n"


def _chapter(root: type[BaseConfig]) -> Iterator[str]:
    keys = list(iter_keys(root))
    titles = {key.path: key.sentence for key in keys if key.section is not None}
    section = None
    for key in sorted((k for k in keys if k.section is None), key=lambda k: _order(k, keys)):
        parent = key.path.rpartition(".")[0]
        if parent != section:
            section = parent
            yield from ["", f"### {parent}", "", titles[parent], ""]
            yield from ["| key | type | default | meaning | status |", "|---|---|---|---|---|"]
        cells = (f"`{key.name}`", allowed_values(key.field), _default(key), key.sentence, _status(key))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def _order(key: Key, keys: list[Key]) -> tuple[int, int]:
    """Keys of one section together, sections in the order of the classes."""
    paths = [k.path for k in keys]
    return paths.index(key.path.rpartition(".")[0]), paths.index(key.path)


def _default(key: Key) -> str:
    return f"`{shown(key.yaml_default)}`"


def _status(key: Key) -> str:
    meta = key.meta
    if meta.refuse:
        return f"*not yet*: {meta.refuse}"
    if meta.refuse_values:
        return "; ".join(f"*{value} not yet*" for value in meta.refuse_values)
    return f"*no effect*: {meta.hint}" if meta.hint else ""
