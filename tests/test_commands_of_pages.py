"""Each shell command of README and the docs is read by the program that it is for, up to where its work begins; and
the names of each Python block exist. ``-m slow`` runs to the end what a CPU without network can run."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import click
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from packaging.requirements import Requirement

from verl.base.requirements import install_command
from verl.cli.commands import MODULES
from verl.cli.main import cli
from verl.errors import ConfigError
from verl.trainer.config.command_line import compose
from verl.trainer.config.generate import ENTRIES
from verl.trainer.config.load import load_config
from verl.trainer.config.overrides import keys_set, override_problems

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BLOCK = re.compile(r"^(?P<indent> *)```(?P<language>\w+)[^\n]*\n(?P<text>.*?)^ *```", re.DOTALL | re.MULTILINE)
ELLIPSES = {"…", "..."}

NOT_OURS = {
    "git": "needs the address of a repository",
    "apt-get": "changes the machine",
    "cd": "of the shell",
    "bash": "runs a script of examples, whose settings tests/examples checks",
    "eval": "changes the shell that types it; tests/cli tries the completion",
    "export": "changes the shell that types it",
    "source": "changes the shell that types it",
    "sbatch": "needs Slurm; tests/examples runs the script",
    "kubectl": "needs Kubernetes; tests/examples checks the file",
    "docker": "needs Docker",
    "prometheus": "is Prometheus' own command",
    "vllm": "is vLLM's own command and needs a GPU",
    "ray": "starts or asks a cluster",
}
"""Programs whose command lines are not read here, and why. What they name below examples/ and docker/ must exist."""

GSM8K = "data/gsm8k/train.parquet data/gsm8k/test.parquet"
RUN = {
    "verl doctor": "",
    "verl doctor --json": "",
    "python -m benchmarks.agreement": "--kinds 'dense (Qwen3)'",
    f"python -m benchmarks.gsm8k_scores {GSM8K}": "",
    "python -m benchmarks.hostile_rewards --timeout_s 10": "--timeout_s 1",
    "python -m benchmarks.plan_accuracy": "--quick",
    "python -m benchmarks.plan_published": "--model Qwen2-7B",
    "python -m benchmarks.rollout_gap": "--rows 2 --samples 1",
}
"""Commands that the slow test runs to the end, with the options that make them shorter."""

NOT_RUN = {
    "make": "takes minutes; .ci/run runs tests, lint, docs and chaos, `make test-wheel` the quickstart in few steps",
    "pip": "installs; `make test-wheel` installs as docs/install.md says",
    "examples": "downloads data sets; tests/examples runs them on small files",
    "verl.trainer": "needs the models and data that the reader has; tests/trainer trains tiny ones with such settings",
    "verl.model_merger": "needs a checkpoint; tests/model_merger makes one",
    "verl view": "serves until it is ended; tests/plugins/view starts it",
    "verl": "needs runs or models of the reader; tests/cli and tests/plugins/view run it on made-up ones",
    "benchmarks.invariance": "trains in a dozen layouts; tests/trainer compares them, two at a time",
    "benchmarks.plan_published --factors": "a slow test runs it (tests/plugins/plan/test_suggest.py)",
}
"""Why the slow test leaves out the other commands, by the beginning of the program or module."""


@dataclass(frozen=True)
class Command:
    """One simple command of a page."""

    page: str
    words: tuple[str, ...]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)}"

    @property
    def program(self) -> tuple[str, ...]:
        """``python -m MODULE``, ``python FILE`` and ``verl`` without what stands before them in the line."""
        words = [word for word in self.words if not re.match(r"[A-Z_]+=", word)]
        if words and words[0] in ("python", "python3"):
            return ("python", *words[2:]) if words[1] == "-m" else ("python", words[1], *words[2:])
        return tuple(words)


def commands() -> Iterator[Command]:
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            if block["language"] in ("bash", "sh", "shell", "console"):
                found = []
                for line in block["text"].replace("\\\n", " ").splitlines():
                    found += _simple(str(page.relative_to(ROOT)), line)
                # Lines of settings alone are meant together.
                settings = [
                    one for one in found if "=" in one.words[0] and len(one.program) > 0 and "=" in one.program[0]
                ]
                yield from (one for one in found if one not in settings)
                if settings:
                    yield Command(settings[0].page, tuple(word for one in settings for word in one.words))


def _simple(page: str, line: str) -> Iterator[Command]:
    """Part a line at ``&&``, ``|``, ``;`` and ``&``."""
    lexer = shlex.shlex(re.sub(r"<[a-z ]+>", "THERE", line), posix=True, punctuation_chars="&|;")
    lexer.whitespace_split = True
    words: list[str] = []
    for word in [*lexer, ";"]:
        if set(word) <= set("&|;"):
            if words:
                yield Command(page, tuple(words))
            words = []
        else:
            words.append(word)


ALL = sorted(set(commands()), key=str)


class Parsed(BaseException):
    """The arguments were understood."""


BASE = {
    "ppo_trainer": (
        "actor_rollout_ref.model.path=Qwen/Qwen3-0.6B", "data.train_files=a.parquet", "data.val_files=b.parquet",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "critic.ppo_micro_batch_size_per_gpu=1",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1", "reward_model.micro_batch_size_per_gpu=1",
        "trainer.logger=[console]",
    ),
    "generation": ("model.path=Qwen/Qwen3-0.6B", "data.path=a.parquet"),
    "evaluation": ("data.path=a.parquet",),
}  # fmt: skip
"""What an ellipsis in a command stands for."""
OF_PAIRS = ("model.path=Qwen/Qwen3-0.6B", "data.train_files=a.parquet", "data.micro_batch_size_per_gpu=1")

ABSENT_HERE = re.compile(r"there is no such (?:file|folder)|is not installed|cannot be reached: ")
"""Problems of the reader's own files and packages, which are not here."""


def check_settings(command: Command, words: tuple[str, ...], name: str, data_only: bool = False) -> None:
    """Compose and check settings as the command does before it loads anything.

    Nothing may be wrong but that files and packages of the reader are not here, and that what the page's own Python
    blocks register is not known.
    """
    (entry,) = [entry for entry in ENTRIES if entry.name == name]
    given = [os.path.expandvars(word) for word in words if word not in ELLIPSES and not word.startswith("--")]
    given = [re.sub(r"=(…|\.\.\.)$", "=./there", word) for word in given]
    assert override_problems(given, entry.root) == []
    is_cut = ELLIPSES & set(words) or any(word.endswith(("=…", "=...")) for word in words)
    base = BASE.get(name, OF_PAIRS) if is_cut else ()
    filled = [setting for setting in base if setting.partition("=")[0] not in keys_set(given)]
    try:
        load_config(compose([*filled, *given], name), entry.root, keys_set(given), data_only)
    except ConfigError as error:
        own = "\n".join(text for page, text in python_blocks() if page == command.page)
        found = re.findall(r"^ +\d+\. (.*)$", str(error), re.MULTILINE) or [str(error)]
        registered = re.compile(r"unknown (?:advantage estimator|reward manager) '(\w+)'")
        left = [
            one for one in found
            if not ABSENT_HERE.search(one) and not ((mine := registered.search(one)) and f'"{mine[1]}"' in own)
        ]  # fmt: skip
        assert left == []


def parse_ours(module: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the module's own parser read the words, and stop there."""
    real = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, args: list[str] | None = None, namespace: object = None) -> None:
        real(self, args, namespace)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse)
    monkeypatch.setattr(sys, "argv", [module, *words])
    with pytest.raises(Parsed):
        importlib.import_module(module).main()


TRAINERS = {f"verl.trainer.{entry.module}": entry.name for entry in ENTRIES}
TRAINERS |= {one.module: one.configuration for one in MODULES.values() if one.configuration}


def check(command: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program, *words = command.program
    if program in NOT_OURS:
        check_of_others(command, words, monkeypatch, tmp_path)
    elif program == "verl" and words and words[0] in MODULES:
        check_module(command, MODULES[words[0]].module, tuple(words[1:]), monkeypatch)
    elif program == "verl" and words:
        read_by_click(words, monkeypatch, tmp_path)
    elif program == "verl":  # completion
        assert "_VERL_COMPLETE=" in " ".join(command.words)
    elif program == "python":
        check_module(command, words[0], tuple(words[1:]), monkeypatch)
    elif program == "make":
        subprocess.run(["make", "--dry-run", *words], cwd=ROOT, check=True, capture_output=True)
    elif program == "pip":
        check_pip(words)
    else:  # settings alone, to be added to a command
        assert "=" in program, f"nothing knows how to read '{program}'; if it is not ours, say so in NOT_OURS"
        check_settings(command, (program, *words, "…"), "ppo_trainer")


def check_of_others(command: Command, words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """What the programs of others are told of ours: files that exist, and commands that they start."""
    for word in words:
        if word.startswith(("examples/", "docker/")):
            assert (ROOT / word).exists(), f"{word} is not there"
    if "python3" in words:  # in a job of Ray, in a container
        check(Command(command.page, tuple(words[words.index("python3") :])), monkeypatch, tmp_path)
    elif "examples/cluster/slurm.sh" in words:
        after = words[words.index("examples/cluster/slurm.sh") + 1 :]
        check_settings(command, tuple(after), "ppo_trainer")


def check_module(command: Command, module: str, words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    if module == "verl.trainer.inspect_data":
        kind = words[0] if words[0] in ("sft", "rm", "dpo") else "ppo"
        check_settings(command, tuple(word for word in words if "=" in word), f"{kind}_trainer", data_only=True)
    elif module == "verl.trainer.plan":
        from verl.plugins.plan.command import make_plan

        make_plan([os.path.expandvars(word) for word in words if word not in ELLIPSES])
    elif module in TRAINERS:
        check_settings(command, words, TRAINERS[module])
    elif module.endswith(".py"):
        parse_ours(module.removesuffix(".py").replace("/", "."), words, monkeypatch)
    else:
        name = f"{module}.__main__" if (ROOT / module.replace(".", "/") / "__main__.py").is_file() else module
        parse_ours(name, words, monkeypatch)


def read_by_click(words: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the parser of ``verl`` read the words, without running the command."""
    monkeypatch.chdir(tmp_path)
    name, command, rest = cli.resolve_command(click.Context(cli), list(words))
    assert command is not None
    command.make_context(name, rest)


def check_pip(words: list[str]) -> None:
    assert words[0] == "install"
    assert "verl" not in words, "on the package index this is another project's name; install the clone: ."
    for before, word in pairwise(words):
        if before == "--constraint":
            assert (ROOT / word).is_file()
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for named in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
        assert set(named.split(",")) <= extras.keys()


def test_nothing_tells_to_install_the_other_project_of_this_name():
    wrong = re.compile(r"pip install[^\n&]* '?verl\b(?!/)|'verl\[\w+\]'|`verl\[\w+\]`")
    places = ("verl/**/*.py", "examples/**/*.py", "examples/**/*.ipynb", "docker/*", "CHANGELOG.md")
    files = [*PAGES, *(path for place in places for path in ROOT.glob(place))]
    told = [(str(path.relative_to(ROOT)), wrong.findall(path.read_text())) for path in files]
    assert [(path, found) for path, found in told if found] == []


@pytest.mark.parametrize("extra", ["agents", "s3", "megatron"])
def test_an_extra_is_installed_by_its_packages(extra):
    words = shlex.split(install_command(extra))
    assert words[:2] == ["pip", "install"]
    stated = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"][extra]
    assert [Requirement(word) for word in words[2:]] == [Requirement(text) for text in stated]


@pytest.mark.parametrize("command", ALL, ids=str)
def test_every_command_is_understood_by_its_program(command, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")  # where a cloud's machine would look for credentials
    check(command, monkeypatch, tmp_path)


def python_blocks() -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in BLOCK.finditer(page.read_text()):
            if block["language"] == "python":
                indent = len(block["indent"])
                text = "\n".join(line[indent:] for line in block["text"].splitlines())
                yield str(page.relative_to(ROOT)), text


@pytest.mark.parametrize("page", sorted({page for page, _ in python_blocks()}))
def test_what_python_blocks_import_from_verl_is_there(page):
    for name, text in python_blocks():
        if name == page:
            for node in ast.walk(ast.parse(text.replace("…", "..."))):
                if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] == "verl":
                    module = importlib.import_module(node.module)
                    for alias in node.names:
                        assert hasattr(module, alias.name) or importlib.util.find_spec(f"{node.module}.{alias.name}")
                elif isinstance(node, ast.Import):
                    for alias in node.names:
                        if alias.name.split(".")[0] == "verl":
                            importlib.import_module(alias.name)


def place_in_table(command: Command) -> str:
    """The row of RUN or NOT_RUN that a command of ours belongs to."""
    plain = " ".join(command.program).removeprefix("python ")
    for name in [row.removeprefix("python -m ") for row in RUN]:
        if plain == name:
            return name
    return next((name for name in sorted(NOT_RUN, key=len, reverse=True) if plain.startswith(name)), "")


def test_every_command_of_ours_is_run_or_has_its_reason():
    ours = [one for one in ALL if one.program[0] not in NOT_OURS and "=" not in one.program[0]]
    assert [str(one) for one in ours if not place_in_table(one)] == []
    known = {" ".join(one.words) for one in ALL}
    assert set(RUN) <= known, "RUN names a command that no page has"


def write_gsm8k(path: Path) -> None:
    """Two rows as examples/data_preprocess/gsm8k.py writes them."""
    texts = ["3 + 4 = <<3+4=7>>7.\n#### 7", "Half of 2,400 is 1,200.\n#### 1,200"]
    rows = [
        {"reward_model": {"ground_truth": text.split()[-1].replace(",", "")}, "extra_info": {"answer": text}}
        for text in texts
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("line", RUN)
def test_what_a_cpu_can_run_runs_to_the_end(line, tmp_path):
    for part in ("train", "test") if GSM8K in line else ():
        write_gsm8k(tmp_path / "data" / "gsm8k" / f"{part}.parquet")
    words = shlex.split(f"{line} {RUN[line]}")
    start = [sys.executable, *words[1:]] if words[0] == "python" else [sys.executable, "-m", *words]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(start, cwd=tmp_path, env=environment, capture_output=True, check=False)
    assert done.returncode in ((0, 1) if line.startswith("verl doctor") else (0,)), done.stderr.decode()[-2000:]
    assert done.stdout
