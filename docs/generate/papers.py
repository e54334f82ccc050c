"""docs/papers.md: every published setting that the registries hold, as overrides, with what is proven of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

HEAD = """# Paper index

Published settings, as overrides of one command, and what is proven of the algorithm that each of them chooses.
Made by `make proofs` (`python -m docs.generate.algorithms --write`) from the registries and the tests, which also
compose all of these overrides.

Put them behind your data, model and sizes, as in [GSM8K](gsm8k.md):

```text
python3 -m verl.trainer.main_ppo \\
    data.train_files=... data.val_files=... actor_rollout_ref.model.path=... \\
    <overrides>
```

They set what the paper says of the algorithm; learning rates, batch sizes and lengths are those of your model and
data, unless they stand here. The kinds of proof are those of the [table of proofs](internals/algorithm_proofs.md);
formulas stand in the [reference](internals/algorithm_reference.md). Nine of the algorithms are trained side by side in
[a small study](algorithm_study.md).
"""


@dataclass(frozen=True)
class Published:
    """An algorithm and the settings in which papers have used it."""

    name: str
    paper: str
    anchor: str
    """Its title in the reference."""
    reproduces: Mapping[str, Sequence[str]]
    proofs: Sequence[str]


def page(entries: Iterable[Published], linked: Callable[[str], str]) -> str:
    """The text of the page; ``linked`` turns the numbers of papers into links."""
    first: dict[str, Published] = {}  # several names may be one function, and an estimator may come with its loss
    for entry in entries:
        for setting in entry.reproduces:
            first.setdefault(setting, entry)
    ordered = sorted(first.items(), key=lambda found: found[0].lower())
    return HEAD + "".join(_section(entry, setting, linked) for setting, entry in ordered)


def title_of(setting: str) -> str:
    """The name of published settings, without the number of a paper behind it."""
    return setting.partition(" (arXiv")[0]


def _section(entry: Published, setting: str, linked: Callable[[str], str]) -> str:
    title = title_of(setting)
    paper = linked(setting.removeprefix(title).strip(" ()") or entry.paper)
    formula = f"[`{entry.name}`](internals/algorithm_reference.md#{entry.anchor})"
    facts = f"{paper}. Formula: {formula}. Proven: {', '.join(entry.proofs)}."
    return f"\n## {title}\n\n{facts}\n\n" + "\n".join(["```text", *entry.reproduces[setting], "```", ""])
