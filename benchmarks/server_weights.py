"""What it costs to give new weights to an engine's server on this machine, against a copy of the weights.

    python -m benchmarks.server_weights [--megabytes 19 403 2000] [--rounds 8]

A second process stands for the server: it copies what arrives into weights of its own, as the loaders of vLLM and
SGLang do, with the code that runs inside of them; checksums are computed on both sides. Seconds are those of the
processors of both processes, which other work on the machine changes little. HTTP is not in them.

With ``--ranks n`` the server is one of n tensor-parallel processes, which copies one n-th of the rows of each weight.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import shape
from benchmarks.shape import Row

TARGET = 3.0
"""In copies."""
_PART_BYTES = 2**31


def shapes(megabytes: int) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of weights of a Qwen3 shape that take about so many 10⁶ bytes in fp32."""
    hidden, inner = (256, 768) if megabytes < 100 else (1024, 3072) if megabytes < 1000 else (2048, 6144)
    of_layer: dict[str, tuple[int, ...]] = {"query": (hidden, hidden), "output": (hidden, hidden)}
    of_layer |= {"key": (hidden // 2, hidden), "value": (hidden // 2, hidden), "down": (hidden, inner)}
    of_layer |= {"gate": (inner, hidden), "up": (inner, hidden), "norm": (hidden,), "inner norm": (hidden,)}
    layer = 4 * (3 * hidden * hidden + 3 * hidden * inner + 2 * hidden)
    for number in range(max(1, round(megabytes * 1e6 / layer))):
        yield from ((f"{number}.{name}", size) for name, size in of_layer.items())


def serve(megabytes: int, ranks: int) -> None:
    """The server: a line of standard input is the description of a part, a line of output the checksums."""
    import torch

    from verl.workers.rollout.engine_side.verl_engine import Share, weights_in_part, with_checksums

    own = {name: torch.ones(size[0] // ranks, *size[1:]) for name, size in shapes(megabytes)}

    def load(part: dict[str, Any]) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, tensor in with_checksums(weights_in_part(part), found, share=Share(0, ranks)):
            own[name].copy_(tensor.narrow(0, 0, len(own[name])))
        return found

    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(load(json.loads(line))), flush=True)


def measure(megabytes: int, ranks: int, rounds: int) -> dict[str, Any]:
    """Processor seconds of copies of the weights and of updates, in turns."""
    import psutil
    import torch

    from verl.workers.rollout.weights import FileBuffer, check_arrival

    sources = {name: torch.randn(size) for name, size in shapes(megabytes)}
    targets = {name: torch.ones_like(tensor) for name, tensor in sources.items()}
    command = [sys.executable, "-m", "benchmarks.server_weights", "--serve", str(megabytes), str(ranks)]
    command += ["--threads", os.environ["OMP_NUM_THREADS"]]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=shape.ROOT)
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdout.readline()
    buffer, process = FileBuffer(), psutil.Process(server.pid)

    def copy() -> None:
        for name, tensor in sources.items():
            targets[name].copy_(tensor)

    def update() -> None:
        for part in buffer.parts(iter(sources.items()), _PART_BYTES):
            server.stdin.write(json.dumps(part.description()) + "\n")
            server.stdin.flush()
            check_arrival(part.share(0, ranks), json.loads(server.stdout.readline()), "the server")

    def seconds(work: Callable[[], None]) -> float:
        def spent() -> float:
            times = process.cpu_times()
            return time.process_time() + times.user + times.system

        before = spent()
        work()
        return spent() - before

    found: dict[str, list[float]] = {"copy": [], "update": []}
    for turn in range(rounds + 1):
        for name, work in {"copy": copy, "update": update}.items():
            taken = seconds(work)
            if turn:  # the first maps all memory
                found[name].append(taken)
    server.stdin.close()
    server.wait()
    nbytes = sum(tensor.nbytes for tensor in sources.values())
    # Means, because a process's time is counted in steps of 10 ms.
    means = {name: statistics.fmean(values) for name, values in found.items()}
    return {"ranks": ranks, "megabytes": nbytes / 1e6, "tensors": len(sources), "seconds": means}


def row_of(found: dict[str, Any]) -> Row:
    """The target, by means over the rounds."""
    copy, update = found["seconds"]["copy"], found["seconds"]["update"]
    detail = f"{1e3 * update:.1f} ms : {1e3 * copy:.1f} ms of processors, {found['tensors']} tensors"
    of = f" of {found['ranks']}" if found["ranks"] > 1 else ""
    what = f"weights to a server{of}, {found['megabytes']:.0f} MB"
    return Row(what, "a copy of the weights", update / copy, TARGET, False, detail)


def main() -> None:
    """The command line."""
    parser = shape.parser(__doc__)
    parser.set_defaults(rounds=8)
    parser.add_argument("--megabytes", type=int, nargs="+", default=[19, 403, 2000])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument(
        "--serve", nargs=2, type=int, metavar=("MEGABYTES", "RANKS"), help="for the benchmark's own process"
    )
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)
    if arguments.serve:
        serve(*arguments.serve)
        return
    sizes = [1] if arguments.tiny else arguments.megabytes
    results = [measure(size, arguments.ranks, arguments.rounds) for size in sizes]
    rows = [row_of(found) for found in results]
    for row in rows:
        print(f"{row.what}: {row.ratio:.2f} copies ({row.detail})")
    shape.write_result(
        arguments.json,
        part="server_weights",
        machine=shape.machine(),
        versions=shape.versions("torch"),
        results=results,
        rows=rows,
    )


if __name__ == "__main__":
    main()
