"""Memory of log-probs and entropy, forward and backward: from hidden states in chunks, against full logits; and of the
divergences from a teacher over the whole vocabulary, against those log-probs.

Each way runs in a process of its own; counted is how far its resident memory grows at most, hidden states, weights and
their gradients included. Both ways run on the same tokens, on fewer than asked for if full logits would not fit into
the free memory. Chunks need as much for any number of tokens, full logits grow with them, so fewer tokens speak for
full logits. ::

    python -m benchmarks.logprob_memory [--tokens 2048] [--vocabulary 151936] [--hidden 64]
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import torch

from verl.algorithms.distillation import DivergenceKind
from verl.workers.engine.model.divergence import FullDivergence, OutputMatrix, vocabulary_divergence
from verl.workers.engine.model.head import LogitRule, token_log_probs

Way = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
"""(hidden, weight, targets) → a value of each token, and another."""


def full_logits(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    log_p = (hidden @ weight.t()).float().log_softmax(-1)
    return log_p.gather(-1, targets[:, None]).squeeze(-1), -(log_p.exp() * log_p).sum(-1)


def chunked(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = token_log_probs(hidden, weight, None, targets, with_entropy=True)
    assert found.entropy is not None
    return found.log_probs, found.entropy


def divergence(kind: DivergenceKind) -> Way:
    """From a teacher of the same size, whose hidden states and matrix count too."""

    def way(hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        teacher_hidden, of_teacher = torch.randn_like(hidden), torch.randn_like(weight).mul_(0.05)
        teacher = OutputMatrix(weight=of_teacher, bias=None, rule=LogitRule())
        policy = OutputMatrix(weight=weight, bias=None, rule=LogitRule())
        spec = FullDivergence(kind=kind, teachers=[teacher])
        found = vocabulary_divergence(hidden, policy, teacher_hidden, None, spec)
        return found.divergence, found.teacher_entropy

    return way


COPIES = 8
"""Of full logits that exist at once, and one to spare."""
DIVERGENCES: dict[str, Way] = {kind: divergence(kind) for kind in get_args(DivergenceKind)}
WAYS: dict[str, Way] = {"full logits": full_logits, "chunked": chunked} | DIVERGENCES


def one(way: str, tokens: int, vocabulary: int, size: int) -> dict[str, Any]:
    g = torch.Generator().manual_seed(0)
    hidden = torch.randn(tokens, size, generator=g).requires_grad_()
    weight = torch.randn(vocabulary, size, generator=g).mul_(0.05).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), generator=g)
    (torch.randn(8, 8) @ torch.randn(8, 8)).softmax(-1)  # libraries load
    before = memory_bytes("/proc/self/status", "VmRSS")
    start = time.perf_counter()
    log_probs, entropy = WAYS[way](hidden, weight, targets)
    (log_probs.sum() + 0.1 * entropy.sum()).backward()
    seconds = time.perf_counter() - start
    return {"bytes": memory_bytes("/proc/self/status", "VmHWM") - before, "seconds": seconds}


def memory_bytes(file: str, name: str) -> int:
    """A figure of Linux."""
    found = re.search(rf"^{name}:\s+(\d+) kB", Path(file).read_text(), re.MULTILINE)
    assert found, f"{file} has no {name}"
    return int(found[1]) * 1024


def that_fit(tokens: int, vocabulary: int) -> int:
    """Halved until the copies of full logits fit."""
    free = memory_bytes("/proc/meminfo", "MemAvailable")
    while tokens > 64 and COPIES * 4 * tokens * vocabulary > free:
        tokens //= 2
    return tokens


def measure(tokens: int, vocabulary: int, hidden: int) -> dict[str, Any]:
    tokens = that_fit(tokens, vocabulary)
    found = {}
    for way in WAYS:
        command = [
            sys.executable,
            "-m",
            "benchmarks.logprob_memory",
            "--one",
            way,
            str(tokens),
            str(vocabulary),
            str(hidden),
        ]
        found[way] = json.loads(subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout)
    return {
        "work": f"{tokens} tokens x {vocabulary} words, hidden {hidden}, fp32, forward and backward",
        "ways": found,
        "ratio": found["chunked"]["bytes"] / found["full logits"]["bytes"],
        "target": "ratio <= 0.25, of divergences <= 1.3",
        "divergences": {way: found[way]["bytes"] / found["chunked"]["bytes"] for way in DIVERGENCES},
    }


def main() -> None:
    if sys.argv[1:2] == ["--one"]:
        print(json.dumps(one(sys.argv[2], *map(int, sys.argv[3:]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--vocabulary", type=int, default=151936)
    parser.add_argument("--hidden", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the numbers to this file")
    args = parser.parse_args()
    found = measure(args.tokens, args.vocabulary, args.hidden)
    print(found["work"])
    for way, row in found["ways"].items():
        print(f"  {way:<12} {row['bytes'] / 2**20:8.0f} MiB  {row['seconds']:6.2f} s")
    print(f"  ratio        {found['ratio']:8.3f}")
    for way, ratio in found["divergences"].items():
        print(f"  {way:<12} {ratio:8.3f} of chunked log-probs")
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
