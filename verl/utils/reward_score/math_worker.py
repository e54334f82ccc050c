r"""The process that decides whether two mathematical answers are equal: a line of JSON in, a line out.

Started by :mod:`verl.utils.reward_score.math_reward`, which kills it when an answer takes too long;
it bounds itself too, in time and memory, should its parent be gone. Symbolic algebra on what a
model writes can run for ever (``9^{9^{9^9}}``), and Python threads cannot be stopped.

    in   {"answer": "\\frac{1}{2}", "truth": "0.5", "timeout_s": 5}
    out  {"equal": true}   or   {"error": "..."}
"""

from __future__ import annotations

import json
import logging
import resource
import signal
import sys
from typing import Any

from math_verify import parse, verify

MEMORY_BYTES = 4 * 2**30


def equal(answer: str, truth: str) -> dict[str, Any]:
    """Compare two answers in LaTeX or plain notation.

    An answer that cannot be read is not equal; a truth that cannot be read is an error.
    """
    gold = _parse(truth)
    if not gold:
        return {"error": f"the ground truth {truth!r} cannot be read as mathematics"}
    return {"equal": bool(verify(gold, _parse(answer), timeout_seconds=None))}


def _parse(text: str) -> list[Any]:
    return parse(f"\\boxed{{{text}}}", parsing_timeout=None)  # type: ignore[arg-type]


def main() -> None:
    """Answer requests until the input ends."""
    logging.disable(logging.WARNING)  # math_verify warns that it has no timeout: the parent has one
    limit = resource.getrlimit(resource.RLIMIT_AS)[1]
    bound = MEMORY_BYTES if limit == resource.RLIM_INFINITY else min(MEMORY_BYTES, limit)
    resource.setrlimit(resource.RLIMIT_AS, (bound, limit))
    _send({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.alarm(int(request["timeout_s"]) + 2)  # its default action ends this process
        reply = equal(request["answer"], request["truth"])
        signal.alarm(0)
        _send(reply)


def _send(reply: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(reply) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
