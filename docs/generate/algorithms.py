"""Every algorithm and its proofs: runs the tests that are marked as one, and writes four pages.

    python -m docs.generate.algorithms                # run, print the table, fail if a proof is missing or fails
    python -m docs.generate.algorithms --write        # the same, and write the pages
    python -m docs.generate.algorithms --collect      # only look which proofs there are; --write then goes by the marks
    python -m docs.generate.algorithms --check        # as --collect, and fail if a page says anything else

The pages: docs/algorithms.md (names, each with a sentence), docs/papers.md (published settings); in
docs/internals, algorithm_reference.md (formulas and papers) and algorithm_proofs.md (which proofs there are of each
name).

A test says what it proves by a mark: ``@pytest.mark.proof("by hand", "grpo", "rloo")``, or, if it is
parametrised over names, ``@pytest.mark.proof("masks", param="name")``. Where an estimator and a loss have one name
(gpg), the file of the test says which is meant.

A test that needs a package which is not here is skipped. Then its mark stands on the page, but no required proof rests
on it.
"""

from __future__ import annotations

import argparse
import inspect
import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from typing import get_args

import pytest

from docs.generate import papers
from verl.algorithms import (
    LOSS_AGG_MODES,
    AdaptiveKLController,
    TargetEntropyController,
    adv_needs,
    agg_loss,
    bias_corrected_kl,
    compute_pf_ppo_reweight_data,
    compute_value_loss,
    estimator_names,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    kl_penalty,
    policy_loss_info,
    policy_loss_names,
    top_entropy_mask,
)
from verl.algorithms.distillation import DISTILLATION_LOSSES, distillation_loss_info
from verl.algorithms.kl import KL_KINDS
from verl.algorithms.preference import PreferenceLossType, bradley_terry_loss
from verl.algorithms.prepare import observation_weights
from verl.algorithms.rollout_correction import (
    REJECTION_CRITERIA,
    off_policy_sequence_mask,
)

ROOT = Path(__file__).resolve().parents[2]
TESTS = ("algorithms", "workers/engine/test_divergence.py")
"""Where the proofs are."""
KINDS = {
    "by hand": "values worked out by hand",
    "oracle": "equal to a slow implementation, written as a loop, on random input",
    "reductions": "equal to another algorithm for certain parameters",
    "gradient": "gradient against finite differences",
    "masks": "values at masked positions change nothing",
    "edges": "groups of one, empty responses, all-masked rows",
    "partition": "the sum over any split into micro-batches and ranks equals the whole",
    "peer": "equal to another package's code on random input",
}
LOSS_MODE = "actor_rollout_ref.actor.policy_loss.loss_mode"
DISTILLATION_MODE = "distillation.distillation_loss.loss_mode"
CHOSEN = {
    "bypass_mode": "Chosen by `algorithm.rollout_correction.bypass_mode=true`; common settings: "
    "[presets](internals/rollout_correction.md#presets).",
    "dro": f"Chosen by `{LOSS_MODE}=dro` with `actor_rollout_ref.actor.policy_loss.dro_beta`.",
}
"""How a loss is turned on that needs more than its name."""
LOSS_PROOFS = ("by hand", "oracle", "reductions", "gradient", "masks", "edges", "partition")


@dataclass(frozen=True)
class Section:
    """One kind of algorithm: its names, and the proofs without which none of them is done."""

    title: str
    setting: str
    names: tuple[str, ...]
    required: tuple[str, ...]
    files: tuple[str, ...] = ("*",)
    """Tests whose marks mean this section where another has the same name."""


def sections() -> list[Section]:
    """All that the configuration can choose."""
    estimators, losses = tuple(estimator_names()), tuple(policy_loss_names())
    usual = ("by hand", "oracle", "reductions", "masks", "edges")
    return [
        Section("Advantage estimators", "algorithm.adv_estimator", estimators, usual, ("test_advantage*",)),
        Section(
            "Policy losses",
            LOSS_MODE,
            losses,
            LOSS_PROOFS,
            ("test_policy_loss*", "test_partition_law.py"),
        ),
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
            ("test_kl.py", "test_peer_trl.py"),
        ),
        Section(
            "Distillation losses",
            DISTILLATION_MODE,
            tuple(DISTILLATION_LOSSES),
            ("by hand", "oracle", "gradient", "masks"),
            ("test_distillation.py", "test_divergence.py"),
        ),
        Section("Importance weights", "algorithm.rollout_correction.rollout_is", ("token", "sequence"), usual),
        Section("Rejection", "algorithm.rollout_correction.rollout_rs", tuple(REJECTION_CRITERIA), usual),
        Section(
            "Preference losses",
            "loss.loss_type",
            get_args(PreferenceLossType),
            ("by hand", "oracle", "reductions", "gradient", "masks"),
        ),
    ]


Claim = tuple[str, str, str]
"""(kind of proof, title of the section, name)."""


@dataclass
class Proofs:
    """A pytest plugin: which test proves what, and which of them passed."""

    claims: dict[str, list[Claim]] = field(default_factory=dict)
    """Test → what it is marked to prove; tests that prove nothing are left out."""
    passed: set[str] = field(default_factory=set)
    failed: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    """Test → why it did not run."""

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Keep the tests that prove something."""
        known = sections()
        self.claims = {item.nodeid: found for item in items if (found := list(_claims(item, known)))}
        items[:] = [item for item in items if item.nodeid in self.claims]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Take in what passed."""
        if report.skipped:
            self.skipped[report.nodeid] = str(report.longrepr[-1] if report.longrepr else "")  # type: ignore[index]
        elif report.failed:
            self.failed.append(report.nodeid)
        elif report.when == "call":
            self.passed.add(report.nodeid)

    def marked(self) -> Counter[Claim]:
        """How many tests are marked for each claim."""
        return Counter(claim for found in self.claims.values() for claim in found)

    def missing(self, only_collected: bool) -> list[str]:
        """Required proofs that no test gives; ``only_collected`` takes the marks for it."""
        tests = self.claims.keys() if only_collected else self.passed
        found = {claim for test in tests for claim in self.claims[test]}
        return [
            f"{section.title}: {name} has no proof '{kind}'"
            for section in sections()
            for name in section.names
            for kind in section.required
            if (kind, section.title, name) not in found
        ]


def _claims(item: pytest.Item, known: Sequence[Section]) -> Iterable[Claim]:
    for mark in item.iter_markers("proof"):
        kind, *names = mark.args
        if kind not in KINDS:
            raise pytest.UsageError(f"{item.nodeid}: unknown kind of proof '{kind}'; there are {', '.join(KINDS)}")
        if param := mark.kwargs.get("param"):
            names.append(str(item.callspec.params[param]))  # type: ignore[attr-defined]
        for name in names:
            yield kind, _section_of(name, item, known), name


def _section_of(name: str, item: pytest.Item, known: Sequence[Section]) -> str:
    titles = [section.title for section in known if name in section.names]
    if len(titles) > 1:
        titles = [section.title for section in known if name in section.names and _is_of(item, section)]
    if len(titles) != 1:
        raise pytest.UsageError(
            f"{item.nodeid}: a proof is marked for '{name}', which is no algorithm"
            if not titles
            else f"{item.nodeid}: a proof is marked for '{name}', which may be one of: {', '.join(titles)}"
        )
    return titles[0]


def _is_of(item: pytest.Item, section: Section) -> bool:
    return any(fnmatch(item.path.name, pattern) for pattern in section.files)


def run_proofs(only_collect: bool) -> Proofs:
    """Run the marked tests, or only find them."""
    proofs = Proofs()
    arguments = [
        *(str(ROOT / "tests" / path) for path in TESTS),
        "-q",
        "-p",
        "no:cacheprovider",
        "--rootdir",
        str(ROOT),
    ]
    status = pytest.main([*arguments, *(["--collect-only", "-qq"] if only_collect else [])], plugins=[proofs])
    if status not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
        raise SystemExit(f"the tests did not run: {status!r}")
    return proofs


# ---- the page -------------------------------------------------------------------------------------

ARXIV = re.compile(r"https?://arxiv\.org/abs/(\d{4}\.\d{5})|arXiv:(\d{4}\.\d{5})")


def linked(text: str) -> str:
    """Papers and addresses as links, references to code as code."""
    text = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", text).replace("``", "`")
    text = re.sub(r"(?<!\]\()https?://(?!arxiv)[^\s,;)]*[^\s,;).]", r"<\g<0>>", text)
    return ARXIV.sub(lambda found: _paper(found.group(1) or found.group(2)), text)


def _paper(number: str) -> str:
    return f"[arXiv:{number}](https://arxiv.org/abs/{number})"


def described(function: Callable) -> list[str]:
    """A docstring up to its arguments: prose as prose, what is indented as a block."""
    text = re.split(r"\n(?:Args|Returns|Raises|Example):", inspect.getdoc(function) or "")[0]
    lines: list[str] = []
    for paragraph in re.split(r"\n\s*\n", text.rstrip()):
        if all(line.startswith("    ") for line in paragraph.splitlines()):
            block = inspect.cleandoc("\n" + paragraph).splitlines()
            if lines[-2:] == ["```", ""]:  # two blocks in a row are one
                lines[-2:] = ["", *block, "```", ""]
            else:
                lines += ["```text", *block, "```", ""]
        else:
            prose = re.sub(r"::$", ":", paragraph.replace("\n", " "))
            lines += [linked(prose), ""]
    return lines


def proofs_of(marked: Mapping[Claim, int], section: Section, name: str) -> list[str]:
    """The kinds of proof that a name has."""
    return [kind for kind in KINDS if marked.get((kind, section.title, name))]


def proof_table(marked: Mapping[Claim, int], section: Section) -> list[str]:
    """The names of a section, by the kinds of proof that they have."""
    names: dict[str, list[str]] = {}
    for name in section.names:
        names.setdefault(", ".join(proofs_of(marked, section, name)), []).append(f"`{name}`")
    rows = (f"| {kinds} | {', '.join(proven)} |" for kinds, proven in names.items())
    return ["| proofs | of |", "|---|---|", *rows]


def paper_of(paper: str, function: Callable) -> list[str]:
    """Where it is described, unless its docstring says so."""
    is_missing = paper and paper.rpartition("/")[2] not in (inspect.getdoc(function) or "")
    return [f"Paper: {linked(paper)}.", ""] if is_missing else []


ESTIMATOR_NOTATION = (
    "R is the sum of the rewards r_t of a response; mean_g, std_g and max are over its siblings, the responses to the "
    "same prompt. A group of one has the baseline 0 and the scale 1."
)
LOSS_NOTATION = (
    "A is the advantage, r = π / π_old the ratio of a token, μ the policy that sampled; sg[x] has no gradient."
)


def estimator_entries() -> list[str]:
    """Every estimator; other names of one point to it."""
    lines, first = [ESTIMATOR_NOTATION, ""], {}
    for name in estimator_names():
        function, needs = get_adv_estimator_fn(name), adv_needs(name)
        lines += [f"### {name}", ""]
        if (known_as := first.setdefault(function, name)) != name:
            lines += [f"Another name of [{known_as}](#{known_as}).", ""]
            continue
        lines += described(function) + paper_of(needs.paper, function)
    return lines


def loss_entries() -> list[str]:
    """Every policy loss, with the aggregation that belongs to it."""
    lines = [LOSS_NOTATION, ""]
    for name in policy_loss_names():
        function, info = get_policy_loss_fn(name), policy_loss_info(name)
        lines += [f"### {name}", "", *described(function), *paper_of(info.paper, function)]
        if info.modes is not None:
            lines += [f"Suitable aggregations: {', '.join(f'`{mode}`' for mode in info.modes)}.", ""]
        lines += [CHOSEN[name], ""] if name in CHOSEN else []
    return lines


def distillation_entries() -> list[str]:
    """What divergences of sampled tokens descend, which the KL kinds estimate, and the divergences of distributions."""
    lines = [
        "Names of [KL kinds](#kl-kinds) are estimates from the sampled tokens; what their gradients descend, and more "
        "of all losses: [distillation](internals/distillation.md).",
        "",
    ]
    for name in DISTILLATION_LOSSES:
        info = distillation_loss_info(name)
        if info.reads != "sampled":
            lines += [f"### {name}", "", *described(info.function), *paper_of(info.paper, info.function)]
    return lines


CORRECTION = "Formulas: [rollout correction](rollout_correction.md)."
PREFERENCES = (
    "This is `sigmoid` of `verl.trainer.dpo_trainer`, and the loss of `verl.trainer.rm_trainer`. For the other losses, "
    "and SimPO as a setting of this one, see [preferences](supervised.md#direct-preference-optimisation)."
)
BODIES: dict[str, Callable[[], list[str]]] = {
    "Advantage estimators": estimator_entries,
    "Policy losses": loss_entries,
    "Aggregation": lambda: described(agg_loss),
    "KL kinds": lambda: described(kl_penalty),
    "Distillation losses": distillation_entries,
    "Importance weights": lambda: [CORRECTION],
    "Rejection": lambda: [CORRECTION],
    "Preference losses": lambda: [*described(bradley_terry_loss), PREFERENCES],
}

OTHERS: dict[str, tuple[Callable, str]] = {
    "Value loss": (compute_value_loss, "`critic.cliprange_value`."),
    "Adaptive KL weight": (AdaptiveKLController, "`algorithm.kl_ctrl.type=adaptive`."),
    "Entropy control": (
        TargetEntropyController,
        "`actor_rollout_ref.actor.entropy_target`; see [one training step](training_step.md#entropy).",
    ),
    "Learning from uncertain tokens alone": (
        top_entropy_mask,
        "`actor_rollout_ref.actor.policy_loss.top_entropy_quantile`; works with every policy loss that takes weights.",
    ),
    "Leaving out bad responses of an old policy": (
        off_policy_sequence_mask,
        "`actor_rollout_ref.actor.policy_loss.off_policy_mask_threshold`; works with every policy loss that takes "
        "weights.",
    ),
    "Unbiased divergence on samples of an old policy": (
        bias_corrected_kl,
        "`actor_rollout_ref.actor.use_bias_correction_kl`, with `actor_rollout_ref.actor.use_kl_loss`.",
    ),
    "Cross entropy of what the environment wrote": (
        observation_weights,
        "`actor_rollout_ref.actor.use_echo_loss`, `actor_rollout_ref.actor.echo_loss_coef`.",
    ),
    "PF-PPO": (
        compute_pf_ppo_reweight_data,
        "`algorithm.use_pf_ppo`, `algorithm.pf_ppo`; see [one training step](training_step.md#pf-ppo).",
    ),
}
"""What no registry chooses: its title, where its formula stands, how it is turned on."""

MADE = (
    "Generated by `make proofs` (`python -m docs.generate.algorithms --write`) from registries, docstrings and tests."
)

HEAD = """# Algorithms

What the configuration can choose, in one sentence each. For formulas, papers and published settings see the
[algorithm reference](internals/algorithm_reference.md); for the tests, [proofs](internals/algorithm_proofs.md); to add
estimators and losses, [extending](extending.md); for what other releases of verl compute differently,
[differences](differences.md).

"""

TAIL = """
## Choosing the samples that are trained on

- **Dynamic sampling** (DAPO) replaces prompts whose responses all have the same reward;
  [one training step](training_step.md#dynamic-sampling).
- **Overlong shaping** (DAPO): a penalty that grows over the last tokens before the limit;
  [reward managers](rewards.md#dapo).
- **Truncated sampling** and other differences between rollout and trainer: [rollout correction](rollout_correction.md).

"""

REFERENCE_HEAD = f"""# Algorithm reference

Formulas and papers of the [algorithms](../algorithms.md); [papers](../papers.md) has published settings. {MADE}

"""

PROOFS_HEAD = f"""# Proofs of the algorithms

Tests that prove what each algorithm of [algorithms](../algorithms.md) computes. {MADE} The command runs every proof,
and fails if a required one is missing.

| proof | meaning |
|---|---|
"""


def chosen_by(section: Section) -> str:
    """The keys that choose it."""
    return f"Chosen by {', '.join(f'`{key}`' for key in section.setting.split(', '))}."


def names_table(names: Sequence[str], of: Callable[[str], Callable], taken: Sequence[str] = ()) -> list[str]:
    """Each name with the first line of its docstring, linked to its title in the reference.

    A name that is ``taken`` is the second title of that name.
    """
    lines, first = ["| name | |", "|---|---|"], {}
    for name in names:
        known_as = first.setdefault(of(name), name)
        docstring = inspect.getdoc(of(name)) or ""
        said = linked(docstring.partition("\n")[0]) if known_as == name else f"Another name of `{known_as}`."
        anchor = f"{name}_1" if name in taken else name
        lines.append(f"| [`{name}`](internals/algorithm_reference.md#{anchor}) | {said} |")
    return lines


def users_page() -> str:
    """docs/algorithms.md."""
    estimators, losses, *others = sections()
    lines = [HEAD, f"## {estimators.title}", "", chosen_by(estimators), ""]
    lines += [*names_table(estimators.names, get_adv_estimator_fn), ""]
    lines += [f"## {losses.title}", "", chosen_by(losses), ""]
    lines += [*names_table(losses.names, get_policy_loss_fn, estimators.names), ""]
    for section in others:
        names = ", ".join(f"`{name}`" for name in section.names)
        anchor = section.title.lower().replace(" ", "-")
        lines += [f"## {section.title}", "", f"{chosen_by(section)} Names: {names}."]
        lines += [f"[What they compute](internals/algorithm_reference.md#{anchor}).", ""]
    lines += ["## Other settings", ""]
    for title, (_, setting) in OTHERS.items():
        anchor = title.lower().replace(" ", "-")
        lines += [f"- [{title}](internals/algorithm_reference.md#{anchor}): {setting}"]
    return _tidy([*lines, TAIL])


def reference_page() -> str:
    """docs/internals/algorithm_reference.md."""
    lines = [REFERENCE_HEAD]
    for section in sections():
        lines += [f"## {section.title}", "", chosen_by(section), "", *BODIES[section.title](), ""]
    lines += ["## Other settings", ""]
    for title, (function, setting) in OTHERS.items():
        lines += [f"### {title}", "", *described(function), f"Set by {setting}", ""]
    # Links are written as of docs/, where the other page stands that shares them.
    return re.sub(r"\]\((?!https?:|#|\.\./)", "](../", _tidy(lines)).replace("](../internals/", "](")


def proofs_page(marked: Mapping[Claim, int]) -> str:
    """docs/internals/algorithm_proofs.md."""
    lines = [PROOFS_HEAD + "\n".join(f"| {kind} | {meaning} |" for kind, meaning in KINDS.items()), ""]
    for section in sections():
        lines += [f"## {section.title}", "", *proof_table(marked, section), ""]
    return _tidy(lines)


def published(marked: Mapping[Claim, int]) -> Iterable[papers.Published]:
    """Estimators and losses with the settings in which papers have used them."""
    estimators, losses, *others = sections()
    distillation = next(section for section in others if section.setting == DISTILLATION_MODE)
    for name in estimators.names:
        needs = adv_needs(name)
        yield papers.Published(name, needs.paper, name, needs.reproduces, proofs_of(marked, estimators, name))
    for name in losses.names:
        info, anchor = policy_loss_info(name), f"{name}_1" if name in estimators.names else name
        yield papers.Published(name, info.paper, anchor, info.reproduces, proofs_of(marked, losses, name))
    for name in distillation.names:
        info = distillation_loss_info(name)
        anchor = name if info.reads != "sampled" else "distillation-losses"
        proofs = proofs_of(marked, distillation, name)
        yield papers.Published(name, info.paper, anchor, info.settings.reproduces, proofs)


def pages(marked: Mapping[Claim, int]) -> dict[Path, str]:
    """The text of each page."""
    docs = ROOT / "docs"
    return {
        docs / "algorithms.md": users_page(),
        docs / "papers.md": papers.page(published(marked), linked),
        docs / "internals" / "algorithm_reference.md": reference_page(),
        docs / "internals" / "algorithm_proofs.md": proofs_page(marked),
    }


def _tidy(lines: Sequence[str]) -> str:
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).rstrip() + "\n"


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true", help="write the pages")
    parser.add_argument("--collect", action="store_true", help="do not run the tests")
    parser.add_argument("--check", action="store_true", help="as --collect, and compare the pages")
    args = parser.parse_args()
    only_collect = args.collect or args.check
    started = time.monotonic()
    proofs = run_proofs(only_collect)
    marked = proofs.marked()
    for section in sections():
        print(f"\n{section.title}", *proof_table(marked, section), sep="\n")
    print(f"\n{marked.total()} claims by {len(proofs.claims)} tests in {time.monotonic() - started:.0f} s")
    for reason, count in Counter(proofs.skipped.values()).items():
        print(f"{count} of them skipped: {reason}")
    if problems := [*proofs.missing(only_collect), *(f"failed: {test}" for test in proofs.failed)]:
        raise SystemExit("\n".join(problems))
    written = pages(marked)
    stale = [str(path.relative_to(ROOT)) for path, text in written.items() if args.check and path.read_text() != text]
    if stale:
        raise SystemExit(
            f"{', '.join(stale)}: not what the registries and the tests say. Run `make proofs`, or, "
            "if only words have changed, `python -m docs.generate.algorithms --collect --write`."
        )
    if args.write:
        for path, text in written.items():
            path.write_text(text)


if __name__ == "__main__":
    main()
