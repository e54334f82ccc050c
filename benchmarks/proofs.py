"""Every algorithm and its proofs: runs the tests that are marked as one, and writes docs/algorithms.md.

    python benchmarks/proofs.py                # run, print the table, fail if a proof is missing or fails
    python benchmarks/proofs.py --write        # the same, and write docs/algorithms.md
    python benchmarks/proofs.py --collect      # only look which proofs there are (what the test of the page does)

A test says what it proves by a mark: ``@pytest.mark.proof("by hand", "grpo", "rloo")``, or, if it is
parametrised over names, ``@pytest.mark.proof("masks", param="name")``.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from verl.trainer.ppo.core_algos import (
    LOSS_AGG_MODES,
    adv_needs,
    agg_loss,
    estimator_names,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
    policy_loss_info,
    policy_loss_names,
)
from verl.trainer.ppo.core_algos.kl import KL_KINDS
from verl.trainer.ppo.core_algos.rollout_correction import REJECTION_CRITERIA

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "algorithms.md"
KINDS = {
    "by hand": "values worked out by hand",
    "oracle": "equal to a slow form, written as a loop, on random input",
    "reductions": "what it equals at which parameters",
    "gradient": "gradient against finite differences",
    "masks": "what stands at masked places changes nothing",
    "edges": "groups of one, empty responses, all-masked rows",
    "partition": "the sum over any micro-batches and ranks is the whole",
    "peer": "equal to another package's code on random input",
}
LOSS_PROOFS = ("by hand", "oracle", "reductions", "gradient", "masks", "edges", "partition")


@dataclass(frozen=True)
class Section:
    """One kind of algorithm: its names, and the proofs without which none of them is done."""

    title: str
    setting: str
    names: tuple[str, ...]
    required: tuple[str, ...]


def sections() -> list[Section]:
    """All that the configuration can choose."""
    estimators, losses = tuple(estimator_names()), tuple(policy_loss_names())
    return [
        Section(
            "Advantage estimators",
            "algorithm.adv_estimator",
            estimators,
            ("by hand", "oracle", "reductions", "masks", "edges"),
        ),
        Section("Policy losses", "actor_rollout_ref.actor.policy_loss.loss_mode", losses, LOSS_PROOFS),
        Section(
            "Aggregation",
            "actor_rollout_ref.actor.loss_agg_mode",
            tuple(LOSS_AGG_MODES),
            ("by hand", "oracle", "masks", "edges", "partition"),
        ),
        Section(
            "KL kinds",
            "actor_rollout_ref.actor.kl_loss_type, algorithm.kl_penalty",
            tuple(KL_KINDS),
            ("by hand", "gradient"),
        ),
        Section(
            "Importance weights",
            "algorithm.rollout_correction.rollout_is",
            ("token", "sequence"),
            ("by hand", "oracle", "reductions", "masks", "edges"),
        ),
        Section(
            "Rejection",
            "algorithm.rollout_correction.rollout_rs",
            tuple(REJECTION_CRITERIA),
            ("by hand", "oracle", "reductions", "masks", "edges"),
        ),
    ]


@dataclass
class Proofs:
    """A pytest plugin: which test proves what, and how many of them passed."""

    only_collect: bool = False
    proves: dict[str, list[tuple[str, str]]] = field(default_factory=dict)
    found: dict[str, Counter] = field(default_factory=lambda: defaultdict(Counter))
    """name → kind → tests that passed (or, if only collected, that there are)."""
    failed: list[str] = field(default_factory=list)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that prove something."""
        for item in items:
            self.proves[item.nodeid] = list(_claims(item))
        items[:] = [item for item in items if self.proves[item.nodeid]]
        if self.only_collect:
            for item in items:
                self._count(item.nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Count what passed."""
        if report.when == "call" and report.passed and not self.only_collect:
            self._count(report.nodeid)
        elif report.failed:
            self.failed.append(report.nodeid)

    def _count(self, nodeid: str) -> None:
        for kind, name in self.proves[nodeid]:
            self.found[name][kind] += 1

    def missing(self) -> list[str]:
        """Proofs that an algorithm must have and has not; also marks that name nothing."""
        known = {name for section in sections() for name in section.names}
        gaps = [
            f"{section.title}: {name} has no proof '{kind}'"
            for section in sections()
            for name in section.names
            for kind in section.required
            if not self.found[name][kind]
        ]
        return gaps + [
            f"a proof is marked for '{name}', which is no algorithm" for name in self.found if name not in known
        ]


def _claims(item: pytest.Item) -> Iterable[tuple[str, str]]:
    for mark in item.iter_markers("proof"):
        kind, *names = mark.args
        if kind not in KINDS:
            raise pytest.UsageError(f"{item.nodeid}: unknown kind of proof '{kind}'; there are {', '.join(KINDS)}")
        if param := mark.kwargs.get("param"):
            names.append(str(item.callspec.params[param]))  # type: ignore[attr-defined]
        for name in names:
            yield kind, name


def run_proofs(only_collect: bool) -> Proofs:
    """Run the marked tests, or only find them."""
    proofs = Proofs(only_collect)
    arguments = [str(ROOT / "tests" / "algorithms"), "-q", "-p", "no:cacheprovider", "--rootdir", str(ROOT)]
    status = pytest.main([*arguments, *(["--collect-only", "-qq"] if only_collect else [])], plugins=[proofs])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"the tests did not run: {status!r}")
    return proofs


# ---- the page -------------------------------------------------------------------------------------


def first_sentence(function: Callable) -> str:
    """What a docstring says it computes."""
    return (inspect.getdoc(function) or "").split("\n\n")[0].replace("\n", " ").rstrip(".")


def formula(function: Callable) -> str:
    """The indented block of a docstring, before its sections."""
    text = re.split(r"\n(?:Args|Returns|Raises):", inspect.getdoc(function) or "")[0]
    blocks = re.findall(r"(?:^|\n\n)((?: {4,}.*\n?)+)", text)
    return "\n".join(inspect.cleandoc("\n" + block) for block in blocks).rstrip()


def link(paper: str) -> str:
    """A paper as a short link."""
    number = re.search(r"arxiv\.org/abs/([\d.]+)", paper)
    return f"[{number.group(1)}]({paper})" if number else f"[link]({paper})" if paper.startswith("http") else paper


def proof_table(proofs: Proofs, section: Section) -> str:
    """How many tests of each kind."""
    kinds = [kind for kind in KINDS if any(proofs.found[name][kind] for name in section.names)]
    lines = [f"| {section.title.lower()} | {' | '.join(kinds)} |", "|---" * (len(kinds) + 1) + "|"]
    for name in section.names:
        cells = " | ".join("yes" if proofs.found[name][kind] else "" for kind in kinds)
        lines.append(f"| `{name}` | {cells} |")
    return "\n".join(lines)


def settings_of(reproduces: dict[str, Sequence[str]] | Any) -> list[str]:
    """Published settings as command-line overrides."""
    lines = []
    for name, overrides in reproduces.items():
        lines += [f"{name}:", "", "```", *overrides, "```", ""]
    return lines


def entry(name: str, function: Callable, paper: str, reproduces: Any) -> list[str]:
    """One algorithm: what it computes, its formula, its paper, the settings of the paper."""
    lines = [f"### {name}", "", f"{first_sentence(function)}." + (f" Paper: {link(paper)}." if paper else ""), ""]
    if block := formula(function):
        lines += ["```text", block, "```", ""]
    return lines + settings_of(reproduces)


HEAD = """# Algorithms

Made from the registries and from the tests by `python benchmarks/proofs.py --write`, which runs every proof and fails
if one is missing. Your own estimators and losses: [extending](extending.md).

What the proofs are:

| proof | what is shown |
|---|---|
"""


def page(proofs: Proofs) -> str:
    """docs/algorithms.md."""
    parts = [HEAD + "\n".join(f"| {kind} | {meaning} |" for kind, meaning in KINDS.items())]
    by_title = {section.title: section for section in sections()}
    for title, section in by_title.items():
        lines = [f"## {title}", "", f"`{section.setting}`", "", proof_table(proofs, section), ""]
        if title == "Advantage estimators":
            for name in section.names:
                needs = adv_needs(name)
                lines += entry(name, get_adv_estimator_fn(name), needs.paper, needs.reproduces)
        elif title == "Policy losses":
            for name in section.names:
                info = policy_loss_info(name)
                lines += entry(name, get_policy_loss_fn(name), info.paper, info.reproduces)
        elif title == "Aggregation":
            lines += ["```text", formula(agg_loss), "```", ""]
        elif title == "KL kinds":
            lines += ["```text", formula(kl_penalty), "```", ""]
        else:
            lines += ["Formulas: [rollout correction](rollout_correction.md).", ""]
        parts.append("\n".join(lines).rstrip())
    return "\n\n".join(parts) + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write docs/algorithms.md")
    parser.add_argument("--collect", action="store_true", help="do not run the tests")
    args = parser.parse_args()
    proofs = run_proofs(only_collect=args.collect)
    for section in sections():
        print(f"\n{proof_table(proofs, section)}")
    total = sum(len(claims) for claims in proofs.proves.values() if claims)
    print(f"\n{total} claims by {sum(bool(claims) for claims in proofs.proves.values())} tests")
    problems = [*proofs.missing(), *(f"failed: {nodeid}" for nodeid in proofs.failed)]
    if problems:
        raise SystemExit("\n".join(problems))
    if args.write:
        PAGE.write_text(page(proofs))


if __name__ == "__main__":
    main()
