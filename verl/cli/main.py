"""The command line ``verl``: runs the commands of other modules with the same arguments, and explains settings.

Click parses the arguments and completes them in bash, zsh and fish; see docs/cli.md.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import click

import verl
from verl.base.lazy import importing
from verl.base.plugins import load
from verl.base.streams import printable
from verl.cli.commands import INSPECTIONS, MODULES, ModuleCommand
from verl.errors import ConfigError, VerlError
from verl.supervision.interruption import interruptible

MAX_COMPLETIONS = 200
"""Completions offered for the beginning of a key."""


def run_module(command: ModuleCommand, name: str, arguments: tuple[str, ...]) -> None:
    """Run the ``main`` of a module as if its own command line had been typed, and end with its exit status."""
    sys.argv = [f"verl {name}", *arguments]
    if not sys.flags.safe_path and os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as of `python -m`: VERL_USE_EXTERNAL_MODULES names modules of this folder
    with interruptible():
        with importing():
            module = importlib.import_module(command.module)
        sys.exit(module.main())


def complete_keys(configuration: str, beginning: str) -> list[str]:
    """Return the keys of a command that begin so, each with the ``=`` that follows."""
    from verl.trainer.config.generate import ENTRIES
    from verl.trainer.config.keys import leaves

    roots = {entry.name: entry.root for entry in ENTRIES}
    keys = leaves(roots[configuration]) if configuration in roots else {}
    return [f"{path}=" for path in keys if path.startswith(beginning)][:MAX_COMPLETIONS]


def quickstart_file() -> Path:
    """Return the program of the quickstart: of the installed package, or of the clone that runs."""
    package = Path(verl.__file__).parent
    for root in (package / "cli/bundled", package.parent):
        if (file := root / "examples/quickstart/quickstart.py").is_file():
            return file
    raise ConfigError(f"the quickstart is not in this installation ({package}). Install the wheel of verl again.")


def _delegating(name: str, command: ModuleCommand) -> click.Command:
    def run(arguments: tuple[str, ...]) -> None:
        run_module(command, name, arguments)

    def complete(context: click.Context, parameter: click.Parameter, incomplete: str) -> list[object]:
        return list(complete_keys(command.configuration, incomplete))

    argument = click.Argument(["arguments"], nargs=-1, type=click.UNPROCESSED, shell_complete=complete)
    settings = {"ignore_unknown_options": True, "help_option_names": []}
    return click.Command(
        name, callback=run, params=[argument], help=command.summary, add_help_option=False, context_settings=settings
    )


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(verl.__version__, prog_name="verl")
def cli() -> None:
    """Reinforcement-learning post-training of large language models.

    Every command answers --help. The commands that train take KEY=VALUE; `verl explain KEY` says what a key means.
    """


@cli.group("inspect")
def inspect_group() -> None:
    """Look at data before a run, or at the samples of one."""


for _name, _command in MODULES.items():
    cli.add_command(_delegating(_name, _command))
for _name, _command in INSPECTIONS.items():
    inspect_group.add_command(_delegating(_name, _command))


@cli.command(context_settings={"ignore_unknown_options": True})  # a flag of OpenRLHF is a word too
@click.argument("words", nargs=-1, required=True, metavar="KEY...")
def explain(words: tuple[str, ...]) -> None:
    """Say what settings mean: type, default, commands, what follows from them, where the code reads them.

    KEY is a whole key, the end of one, a part of one, a word of its meaning, or a name of TRL or OpenRLHF.
    """
    with importing():
        from verl.cli.explain import explanation
        from verl.utils.console import console

    has_setting = True
    for word in words:
        page, is_known = explanation(word)
        console().print(page)
        has_setting = has_setting and is_known
    sys.exit(0 if has_setting else 1)


@cli.command()
@click.option("--algorithm", type=click.Choice(["grpo", "ppo"]), default="grpo")
@click.option("--seed", default=1, help="of data, weights and sampling")
@click.option("--output_dir", default="outputs/quickstart", type=click.Path(path_type=Path))
@click.option("--warm_up_steps", type=click.IntRange(min=1), help="of supervised training; fewer: faster, learns less")
@click.option("--steps", type=click.IntRange(min=1), help="of reinforcement learning")
def quickstart(algorithm: str, seed: int, output_dir: Path, warm_up_steps: int | None, steps: int | None) -> None:
    """Train a tiny model on this machine: data, supervised warm-up, reinforcement learning, a report. No GPU needed."""
    options = {
        "algorithm": algorithm, "seed": seed, "output_dir": output_dir, "warm_up_steps": warm_up_steps, "steps": steps
    }  # fmt: skip
    arguments = [f"--{name}={value}" for name, value in options.items() if value is not None]
    with interruptible():
        sys.exit(subprocess.run([sys.executable, quickstart_file(), *arguments], check=False).returncode)


@cli.command("diff")
@click.argument("first", metavar="ONE")
@click.argument("second", metavar="OTHER")
@click.option("--json", "as_json", is_flag=True, help="write {key: [value in A, value in B]}")
def diff_command(first: str, second: str, as_json: bool) -> None:
    """Compare the settings of two runs or files.

    ONE and OTHER are YAML files, folders that Hydra wrote, checkpoints (global_step_N), logs of the tracker `file` or
    folders with one of these. Of runs of different kinds (SFT and PPO) only the keys of both are shown; --json has all.
    Exit status 1 says that they differ.
    """
    from verl.cli.differences import ABSENT, describe_kinds, differences, differences_table, kinds, read_settings
    from verl.utils.console import console

    left, right = read_settings(first), read_settings(second)
    changes = differences(left, right)
    if as_json:
        click.echo(json.dumps(changes, indent=2, default=str))
    elif kinds_text := describe_kinds(kinds(left), kinds(right), first, second):
        console().print(kinds_text)
        common = {key: pair for key, pair in changes.items() if ABSENT not in pair}
        console().print(differences_table(common, first, second))
    else:
        console().print(differences_table(changes, first, second))
    sys.exit(1 if changes else 0)


@cli.command()
@click.option("--json", "as_json", is_flag=True, help="write a list of {name, verdict, found, remedy}")
def doctor(as_json: bool) -> None:
    """Check this machine: what is installed, what is missing, what to do about it.

    Exit status 1 says that something fails that every run needs.
    """
    from verl.cli.doctor import examine, findings_table
    from verl.utils.console import console

    findings = examine()
    if as_json:
        click.echo(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        console().print(findings_table(findings))
    sys.exit(1 if any(finding.verdict == "fail" for finding in findings) else 0)


@cli.command()
@click.argument("folders", nargs=-1, required=True, metavar="FOLDER...", type=click.Path(path_type=Path))
@click.option("--port", default=0, help="port of the loopback address; 0 takes a free one")
@click.option("--open", "opens_browser", is_flag=True, help="open the page in the browser")
@click.option("--token", envvar="VERL_VIEW_TOKEN", help="fixed token instead of a random one")
def view(folders: tuple[Path, ...], port: int, opens_browser: bool, token: str | None) -> None:
    """Look into runs in the browser: curves, samples, tokens, times, alerts.

    FOLDER is a folder with runs, or a file of the tracker `file`. Runs that go on are followed.
    """
    serve = load("view.command:view")

    with interruptible():
        serve(list(folders), port, opens_browser, token)


@cli.command()
@click.argument("run", type=click.Path(path_type=Path))
@click.option("-o", "--output", default="report.html", type=click.Path(path_type=Path), help="file to write")
def report(run: Path, output: Path) -> None:
    """Write one HTML file about a run, to send to a colleague: curves, alerts, samples, tokens, settings.

    RUN is a folder with one run, or its file of the tracker `file`.
    """
    load("view.report:write_report")(run, output)
    click.echo(f"{output} has the report; it needs no network and runs no scripts.")


def main() -> None:
    """Run the command line; errors of verl are told in one sentence, with exit status 2."""
    try:
        cli(prog_name="verl")
    except VerlError as error:
        sys.stderr.write(printable(f"{type(error).__name__}: {error}\n"))
        sys.exit(2)
