"""What pages name is there: keys, commands, targets of make, extras, settings of TRL."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from verl.cli.explain import all_settings

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.rglob("*.md"), *ROOT.glob("*.md"), *ROOT.glob("examples/cluster/*")], key=str)
ROOTS = ("actor_rollout_ref", "algorithm", "critic", "custom_reward_function", "data", "reward_model", "trainer")
KEY = re.compile(rf"(?<![\w./])\+?((?:{'|'.join(ROOTS)})\.[a-z_.]*[a-z_])(?==|`)")
OPEN = ("reward_kwargs", "scorer_kwargs", "engine_kwargs", "override_config")
"""Sections that take any name."""
NO_KEYS = {"data.pt", "data.my_switch", "reward_model.ground_truth", "actor_rollout_ref.rollout.temprature"}
"""A file, a key of a program, a column of the data, and the misspelt key of docs/errors.md."""


def known_keys() -> set[str]:
    return {setting.path for setting in all_settings()}


def test_every_key_of_every_page_exists():
    known, named = known_keys(), {}
    for page in PAGES:
        if page.parent.name == "configuration":  # these also list names of other versions
            continue
        for key in KEY.findall(page.read_text()):
            if not set(OPEN) & set(key.split(".")):
                named.setdefault(key, page.name)
    assert len(named) > 100
    assert {key: page for key, page in named.items() if key not in known | NO_KEYS} == {}


def test_every_module_and_target_of_every_page_exists():
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    lacking = []
    for page in PAGES:
        text = page.read_text()
        for module in re.findall(r"python3? -m ((?:verl|benchmarks|docs|examples)[\w.]*\w)", text):
            path = ROOT / module.replace(".", "/")
            if not path.with_suffix(".py").is_file() and not (path / "__main__.py").is_file():
                lacking.append((page.name, module))
        lacking += [
            (page.name, made) for made in re.findall(r"(?:`|^)make ([a-z-]+)", text, re.M) if made not in targets
        ]
    assert lacking == []


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings where Markdown is shown beside the code; mkdocs checks those of the site."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    headings = re.findall(r"^#+ (.+?)\s*$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("name", ["README.md", "CHANGELOG.md", "CONTRIBUTING.md"])
def test_every_link_outside_the_site_leads_somewhere(name):
    links = re.findall(r"\]\(([^)\s]+)\)", (ROOT / name).read_text())
    assert links
    broken = []
    for link in links:
        file, _, anchor = link.partition("#")
        target = ROOT / (file or name)
        if "://" not in link and (not target.exists() or (anchor and anchor not in anchors(target))):
            broken.append(link)
    assert broken == []


def test_every_extra_is_explained_and_no_other():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    table = re.findall(r"^\| (`.*?`) \|", (DOCS / "install.md").read_text(), re.MULTILINE)
    assert sorted(name for row in table for name in re.findall(r"`(\w+)`", row)) == sorted(extras)


def test_settings_of_trl_exist():
    trl = pytest.importorskip("trl", reason="the extra `peers`")
    known = {*trl.GRPOConfig.__dataclass_fields__, *trl.SFTConfig.__dataclass_fields__}
    known |= {*trl.DPOConfig.__dataclass_fields__, "tools", "environment_factory", "peft_config", "reward_funcs"}
    cells = re.findall(r"^\| (.*?) \|", (DOCS / "from_trl.md").read_text(), re.MULTILINE)
    named = {name for cell in cells for name in re.findall(r"`([a-z]\w*)", cell)} - {"messages"}
    assert len(named) > 40
    assert named <= known


def test_the_page_of_the_architecture_has_all_packages():
    packages = {folder.parent.name for folder in (ROOT / "verl").glob("*/__init__.py")}
    assert packages == set(re.findall(r"`verl/([a-z_]+)`", (ROOT / "docs/internals/architecture.md").read_text()))
