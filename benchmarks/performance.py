"""Everything that docs/performance.md and docs/internals/performance.md say, measured by one command: ``make bench``.

    python -m benchmarks.performance --write             all of it, on a quiet machine, about ten minutes
    python -m benchmarks.performance --page agents_performance --write     the same of docs/agents_performance.md
    python -m benchmarks.performance --only grpo_step    one part, printed
    python -m benchmarks.performance --tiny --write x.md     the page in its form, with figures that mean nothing

Each part runs in a process of its own, one after the other, and compares two things within its run; what it finds
comes back as JSON. A target that is missed is no error: the page says by how much. A part that fails is one, and then
nothing is written. The page has the table, and the page of the same name in the folder ``internals`` beside it has
each part. What stands there between the lines ``<!-- notes: … -->`` and ``<!-- end of notes -->`` is written by hand
and stays.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import shape
from benchmarks.shape import ROOT, Row, Work

Result = Mapping[str, Any]


# ---- the parts ------------------------------------------------------------------------------------


def own_rows(result: Result) -> list[Row]:
    """Of a part that makes its rows itself."""
    return [Row(**row) for row in result["rows"]]


def training_step_rows(result: Result) -> list[Row]:
    """The share of the matrix-product peak, by the library whose products are the fastest."""
    engine = result["passes"]["engine"]
    library, peak = max(result["peak_gflops"].items(), key=lambda item: item[1])
    detail = f"{engine['useful_gflops']:.0f} of {peak:.0f} GFLOP/s ({library}), {engine['seconds']:.2f} s"
    what, against = "forward + backward, useful FLOP/s", "fp32 matrix product peak of the same run"
    return [Row(what, against, engine["useful_gflops"] / peak, 0.65, True, detail)]


def memory_rows(result: Result) -> list[Row]:
    """Peak memory in shares of that of full logits."""
    ours, full = (result["ways"][way]["bytes"] / 2**20 for way in ("chunked", "full logits"))
    what = f"peak memory of log-prob + entropy, {result['work']}"
    rows = [Row(what, "full logits", result["ratio"], 0.25, False, f"{ours:,.0f} MiB : {full:,.0f} MiB")]
    for kind, ratio in result["divergences"].items():
        theirs = result["ways"][kind]["bytes"] / 2**20
        detail = f"{theirs:,.0f} MiB : {ours:,.0f} MiB"
        what = f"the same of {kind} from a teacher of that size"
        rows.append(Row(what, "log-prob + entropy", ratio, 1.3, False, detail))
    return rows


def transfer_rows(result: Result) -> list[Row]:
    """There and back in plain copies."""
    setting, found = result["setting"], result["results"]
    trip, copy = found["there_and_back"]["min_ms"], found["copy"]["min_ms"]
    what = f"{setting['bytes'] / 1e6:.0f} MB DataProto to {setting['ranks']} Ray workers and back"
    detail = f"{trip:.1f} ms : {copy:.1f} ms; by the medians {found['there_and_back_per_copy_median']:.2f}"
    return [Row(what, "a plain memory copy of the same bytes", trip / copy, 6.0, False, detail)]


def scaling_rows(result: Result) -> list[Row]:
    """Times over linear growth from the first measurement of each part, and over those of ranks that are apart."""
    rows, first = [], {}
    apart = {found["part"]: found for found in result["results"] if found["groups"] > 1}
    for found in result["results"]:
        start = first.setdefault(found["part"], found)
        if start is found or found["groups"] > 1:
            continue
        key = found["part"]
        floor = apart.get(key)
        for kind in ("rollout", "step"):
            what = f"{kind} time, {key} {start[key]:,} → {found[key]:,}"
            seconds, linear = f"{kind}_s", f"{kind}_of_linear"
            detail = f"{start[seconds]:.2f} s → {found[seconds]:.2f} s"
            rows.append(Row(what, "linear", found[linear], 1.0, False, detail))
            if floor is not None:
                against = f"{floor['groups']} separate runs, side by side, that share the work"
                detail = f"{found[seconds]:.2f} s : {floor[seconds]:.2f} s, which is {floor[linear]:.3g} of linear"
                rows.append(Row(what, against, found[seconds] / floor[seconds], None, False, detail))
    return rows


@dataclass(frozen=True)
class Part:
    """A benchmark and the targets that it measures."""

    name: str
    """Of its file."""
    title: str
    rows: Callable[[Result], list[Row]] = own_rows
    arguments: tuple[str, ...] = ()
    """Settings of a full run; ``{rollout}`` and ``{vllm_python}`` are filled in."""
    tiny: tuple[str, ...] = ("--tiny", "--rounds", "1", "--threads", "1")
    """Its smallest form, which tests run."""

    def command(self, arguments: argparse.Namespace) -> list[str]:
        """As it is run, and as the page shows it."""
        filled = [text.format(**vars(arguments)) for text in self.arguments]
        return ["python", "-m", f"benchmarks.{self.name}", *filled, *(self.tiny if arguments.tiny else ())]


ROLLOUT = ("--rollout", "{rollout}")
PARTS = (
    Part("rollout_speed", "Rollout", arguments=(*ROLLOUT, "--vllm_python", "{vllm_python}")),
    Part("grpo_step", "A whole GRPO step", arguments=ROLLOUT),
    Part(
        "training_step",
        "Forward and backward",
        training_step_rows,
        tiny=("--sequences", "2", "--prompt", "4", "--response", "8", "--repeats", "1"),
    ),
    Part("prompt_sharing", "Prompts that responses share"),
    Part("logprob_memory", "Memory of log-probs and entropy", memory_rows, tiny=()),
    Part(
        "dataproto_transfer",
        "The data plane",
        transfer_rows,
        tiny=("--mb", "1", "--ranks", "1", "--rounds", "1"),
    ),
    Part("weight_update", "Weights to the rollout engine", arguments=ROLLOUT),
    Part(
        "scaling",
        "Scaling",
        scaling_rows,
        arguments=ROLLOUT,
        tiny=("--parts", "ranks", "--repeats", "1"),
    ),
)


def run_part(part: Part, arguments: argparse.Namespace, folder: Path) -> Result:
    """What it found.

    Raises:
        SystemExit: it failed.
    """
    path = folder / f"{part.name}.json"
    command = part.command(arguments)
    print(f"--- {' '.join(command)}", flush=True)
    started = time.monotonic()
    done = subprocess.run([sys.executable, *command[1:], "--json", str(path)], check=False, cwd=ROOT)
    if done.returncode or not path.exists():
        raise SystemExit(f"{part.name} failed with exit code {done.returncode}; nothing was written.")
    print(f"    {time.monotonic() - started:.0f} s", flush=True)
    return json.loads(path.read_text())


# ---- the page -------------------------------------------------------------------------------------

RATIOS = """Every figure is a ratio of two
measurements in one run on one machine, because absolute times say little about another machine. The compared processes
take turns, so that both see the same state of the machine. Speeds are compared by each one's shortest time, because
other programs can only add to a time; the medians are listed too.
"""

GPU = """## On a GPU

On one H200, with `liger-kernel` installed and activations recomputed, an RL step of a model with the shape of
Qwen3-0.6B, one sequence of 16,384 tokens, made 1.97 times the tokens per second that prime-rl publishes for one H100,
which has slower memory; a supervised step on 8,192 tokens made 0.75 times as many. prime-rl recomputes activations too,
and compiles its layers, which ours does not. `native` drew 64 responses of 512 tokens in 3.7 s with recorded decoding
passes, in 14.0 s without, 2.9 to 3.2 times as fast as Transformers `generate` (target: 8); since then its attention
reads each row alone, which was measured for one call only (0.040 ms in place of 0.076). [The figures, their commands,
what is unlike in them, and what would close the supervised gap](internals/gpu.md).

```text
make bench-gpu
python -m benchmarks.gpu --json gpu.json
```

It needs neither Ray nor vLLM. Where a GPU machine has PyTorch and Transformers but no package index, see
`docs/internals/measuring.md` for what to carry there.
"""

AGENT_PARTS = (
    Part(
        "tool_latency",
        "Slow tools",
        tiny=("--tiny", "--rounds", "1", "--threads", "1", "--conversations", "2", "--trajectories", "4"),
    ),
    Part("agent_step", "A whole GRPO step over conversations"),
    Part("prefix_reuse", "Reuse of what earlier turns computed"),
    Part("endpoint_overhead", "The endpoint against direct calls"),
)


@dataclass(frozen=True)
class Page:
    """A page of figures."""

    name: str
    """Of its file in docs/, without the suffix."""
    head: str
    parts: tuple[Part, ...]
    tail: str = ""

    @property
    def path(self) -> Path:
        """Where it is written."""
        return ROOT / "docs" / f"{self.name}.md"


PAGES = {
    page.name: page
    for page in (
        Page(
            "performance",
            f"# Performance\n\nGenerated by `make bench` (`python -m benchmarks.performance --write`). {RATIOS}",
            PARTS,
            GPU,
        ),
        Page(
            "agents_performance",
            "# Performance of agents\n\nGenerated by `make bench PAGE=agents_performance` "
            f"(`python -m benchmarks.performance --page agents_performance --write`). {RATIOS}",
            AGENT_PARTS,
        ),
    )
}

NOTES = re.compile(r"<!-- notes: (\w+) -->\n(.*?)<!-- end of notes -->\n", re.DOTALL)


def notes_of(page: str) -> dict[str, str]:
    """What was written by hand, by part."""
    return dict(NOTES.findall(page))


def measured(row: Row) -> str:
    """The ratio, as the table shows it."""
    return "not measured" if row.ratio is None else f"{row.ratio:.3g}"


def verdict(row: Row) -> str:
    """Met, or by how much it falls short."""
    if row.ratio is None:
        return row.detail
    if row.target is None:
        return "for comparison"
    if row.is_met:
        return "met"
    factor = row.target / row.ratio if row.at_least else row.ratio / row.target
    return f"missed by a factor of {factor:.2f}"


def target(row: Row) -> str:
    """The target, as the table shows it."""
    return "" if row.target is None else f"{'≥' if row.at_least else '≤'} {row.target:g}"


def table(rows: Sequence[Row]) -> list[str]:
    """All targets."""
    lines = ["| what | against | target | measured | verdict |", "|---|---|---|---|---|"]
    return lines + [
        f"| {row.what} | {row.against} | {target(row)} | {measured(row)} | {verdict(row)} |" for row in rows
    ]


def figures(row: Row) -> str:
    """One line below a part's title."""
    shown = measured(row) if row.ratio is None else f"{measured(row)} ({row.detail})"
    return f"- {row.what} against {row.against}: {shown}"


def seconds_table(result: Result) -> list[str]:
    """Every contestant of a part that says how long each took."""
    seconds = result.get("seconds")
    if not seconds:
        return []
    lines = ["| | least, s | median, s | runs |", "|---|---|---|---|"]
    for name, times in seconds.items():
        lines.append(f"| {name} | {times['min']:.3f} | {times['median']:.3f} | {len(times['all'])} |")
    return [*lines, ""]


def stages_line(result: Result) -> list[str]:
    """Where the time of our step goes."""
    stages = {name: value for name, value in (result.get("stages") or {}).items() if value >= 0.001}
    if not stages:
        return []
    shown = ", ".join(f"{name} {value:.3f} s" for name, value in stages.items())
    return [f"Stages of our step, medians: {shown}.", ""]


def text_of(page: Page, results: Mapping[str, Result]) -> str:
    """The page in Markdown: what was measured on, and all targets."""
    rows = [row for part in page.parts if part.name in results for row in part.rows(results[part.name])]
    here = shape.machine()
    packages = {**shape.versions("torch", "transformers", "ray", "trl"), **versions_in(results)}
    lines = [
        page.head,
        f"Machine: {here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB. Python {here['python']}, "
        f"{', '.join(f'{name} {version}' for name, version in packages.items())}.",
        "",
        f"Work, unless stated otherwise: {Work().describe()}, fp32.",
        "",
        *table(rows),
        "",
        f"The command of each part, its seconds, and what bounds it: [part by part](internals/{page.name}.md).",
        "",
    ]
    return "\n".join([*lines, page.tail] if page.tail else lines)


def parts_of(page: Page, results: Mapping[str, Result], arguments: argparse.Namespace, notes: Mapping[str, str]) -> str:
    """The page of the parts in Markdown."""
    title = page.head.partition("\n")[0]
    lines = [
        f"{title}, part by part",
        "",
        f"For the machine, the work and all targets see [the table](../{page.name}.md).",
        "",
    ]
    for part in page.parts:
        if part.name not in results:
            continue
        shown, rows = " ".join(part.command(arguments)), part.rows(results[part.name])
        lines += [f"## {part.title}", "", "```text", shown, "```", "", *map(figures, rows), ""]
        lines += [*seconds_table(results[part.name]), *stages_line(results[part.name])]
        lines += [f"<!-- notes: {part.name} -->\n{notes.get(part.name, '')}<!-- end of notes -->", ""]
    return "\n".join(lines)


def versions_in(results: Mapping[str, Result]) -> dict[str, str]:
    """vLLM's, whose environment is another."""
    facts = results.get("rollout_speed", {}).get("facts", {})
    found = {}
    for player in facts.values():
        found |= {name: version for name, version in player["versions"].items() if name.startswith("vllm")}
    return found


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = tuple(part.name for page in PAGES.values() for part in page.parts)
    written = "write the page and that of its parts, to another place if a path follows"
    parser.add_argument("--page", choices=tuple(PAGES), default="performance", help="which page's parts")
    parser.add_argument("--write", nargs="?", type=Path, const=Path(), metavar="PATH", help=written)
    parser.add_argument("--only", nargs="+", choices=names, help="these parts alone")
    parser.add_argument("--rollout", default="native", help="rollout.name of our engine")
    parser.add_argument("--vllm_python", default=".venv-vllm/bin/python", help="Python of the environment with vLLM")
    parser.add_argument("--tiny", action="store_true", help="the smallest work, to test the benchmarks themselves")
    parser.add_argument("--json", type=Path, help="write what all parts found there")
    arguments = parser.parse_args()
    page = PAGES[arguments.page]
    goal = page.path if arguments.write == Path() else arguments.write
    if goal == page.path and (arguments.tiny or arguments.only):
        parser.error(f"docs/{page.path.name} takes all parts in full size, or it would be of several runs")
    parts = [part for part in page.parts if not arguments.only or part.name in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        results = {part.name: run_part(part, arguments, Path(folder)) for part in parts}
    print(*table([row for part in parts for row in part.rows(results[part.name])]), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if goal:
        below = goal.parent / "internals" / goal.name
        below.parent.mkdir(exist_ok=True)
        notes = notes_of(below.read_text()) if below.exists() else {}
        goal.write_text(text_of(page, results))
        below.write_text(parts_of(page, results, arguments, notes))
        print(f"written: {goal}, {below}")
    if goal == page.path and page.path.name not in (ROOT / "mkdocs.yml").read_text():
        print(f"mkdocs.yml does not name it yet: add {page.path.name} to its nav.")


if __name__ == "__main__":
    main()
