"""Measure everything on docs/performance.md by one command: ``make bench``.

    python -m benchmarks.performance --write             all of it, on a quiet machine
    python -m benchmarks.performance --only grpo_step    one part, printed
    python -m benchmarks.performance --tiny --write x.md     the page in its form, with figures that mean nothing

Each part runs in a process of its own, one after the other, and compares two things within its run; what it finds
comes back as JSON. A target that is missed is no error: the page says by how much. A part that fails is one, and then
nothing is written.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
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
    rows: Callable[[Result], list[Row]] = own_rows
    arguments: tuple[str, ...] = ()
    """Settings of a full run; ``{rollout}`` and ``{vllm_python}`` are filled in."""
    tiny: tuple[str, ...] = ("--tiny", "--rounds", "1", "--threads", "1")
    """Its smallest form, which tests run."""

    def command(self, arguments: argparse.Namespace) -> list[str]:
        """The command line of the part."""
        filled = [text.format(**vars(arguments)) for text in self.arguments]
        return ["python", "-m", f"benchmarks.{self.name}", *filled, *(self.tiny if arguments.tiny else ())]


ROLLOUT = ("--rollout", "{rollout}")
PARTS = (
    Part("rollout_speed", arguments=(*ROLLOUT, "--vllm_python", "{vllm_python}")),
    Part("grpo_step", arguments=ROLLOUT),
    Part(
        "training_step",
        training_step_rows,
        tiny=("--sequences", "2", "--prompt", "4", "--response", "8", "--repeats", "1"),
    ),
    Part("prompt_sharing"),
    Part("logprob_memory", memory_rows, tiny=()),
    Part("dataproto_transfer", transfer_rows, tiny=("--mb", "1", "--ranks", "1", "--rounds", "1")),
    Part("weight_update", arguments=ROLLOUT),
    Part("scaling", scaling_rows, arguments=ROLLOUT, tiny=("--parts", "ranks", "--repeats", "1")),
    Part(
        "tool_latency",
        tiny=("--tiny", "--rounds", "1", "--threads", "1", "--conversations", "2", "--trajectories", "4"),
    ),
    Part("agent_step"),
    Part("prefix_reuse"),
    Part("endpoint_overhead"),
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

PAGE = ROOT / "docs" / "performance.md"

HEAD = """# Performance

Generated by `make bench` (`python -m benchmarks.performance --write`). Every figure is a ratio of two measurements in
one run on one machine, because absolute times say little about another machine. The compared processes take turns, so
that both see the same state of the machine. Speeds are compared by each one's shortest time, because other programs can
only add to a time. The benchmark in the last column measures a row alone and prints its times: `python -m
benchmarks.rollout_speed`. [What bounds the figures](internals/measuring.md#what-bounds-the-figures).
"""

GPU = """## On a GPU

On one H200, with `liger-kernel` installed and activations recomputed, an RL step of a model with the shape of
Qwen3-0.6B, one sequence of 16,384 tokens, made 1.97 times the tokens per second that prime-rl publishes for one H100,
which has slower memory; a supervised step on 8,192 tokens made 0.75 times as many. prime-rl recomputes activations too,
and compiles its layers. `native` drew 64 responses of 512 tokens in 3.7 s, 2.9 to 3.2 times as fast as Transformers
`generate`. [The figures, their commands, and what is unlike in the comparisons](internals/gpu.md).

```text
make bench-gpu
python -m benchmarks.gpu --json gpu.json
```

It needs neither Ray nor vLLM. For a GPU machine without a package index see
[measuring on a GPU](internals/measuring.md#on-a-gpu).
"""


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


def table(results: Mapping[str, Result]) -> list[str]:
    """All targets of the parts that have results."""
    lines = ["| what | against | target | measured | verdict | benchmark |", "|---|---|---|---|---|---|"]
    for part in PARTS:
        for row in part.rows(results[part.name]) if part.name in results else ():
            cells = (row.what, row.against, target(row), measured(row), verdict(row), f"`{part.name}`")
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def page(results: Mapping[str, Result]) -> str:
    """The page in Markdown: the machine, and all targets."""
    here = shape.machine()
    packages = {**shape.versions("torch", "transformers", "ray", "trl"), **versions_in(results)}
    lines = [
        HEAD,
        f"Machine: {here['cpu']}, {here['cores']} cores, {here['memory_gib']} GiB. Python {here['python']}, "
        f"{', '.join(f'{name} {version}' for name, version in packages.items())}.",
        "",
        f"Work, unless stated otherwise: {Work().describe()}, fp32.",
        "",
        *table(results),
        "",
        GPU,
    ]
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
    names = tuple(part.name for part in PARTS)
    written = "write the page, to another place if a path follows"
    parser.add_argument("--write", nargs="?", type=Path, const=PAGE, metavar="PATH", help=written)
    parser.add_argument("--only", nargs="+", choices=names, help="these parts alone")
    parser.add_argument("--rollout", default="native", help="rollout.name of our engine")
    parser.add_argument("--vllm_python", default=".venv-vllm/bin/python", help="Python of the environment with vLLM")
    parser.add_argument("--tiny", action="store_true", help="the smallest work, to test the benchmarks themselves")
    parser.add_argument("--json", type=Path, help="write the results of all parts there")
    arguments = parser.parse_args()
    if arguments.write == PAGE and (arguments.tiny or arguments.only):
        parser.error(f"docs/{PAGE.name} takes all parts in full size, or it would be of several runs")
    parts = [part for part in PARTS if not arguments.only or part.name in arguments.only]
    with tempfile.TemporaryDirectory() as folder:
        results = {part.name: run_part(part, arguments, Path(folder)) for part in parts}
    print(*table(results), sep="\n")
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1) + "\n")
    if arguments.write:
        arguments.write.write_text(page(results))
        print(f"written: {arguments.write}")


if __name__ == "__main__":
    main()
