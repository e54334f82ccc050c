"""Code that runs in the sandbox around a program, to call its function or evaluate an expression."""

from __future__ import annotations

PRELUDE = (
    "import bisect, collections, functools, heapq, itertools, math, operator, random, re, string, sys\n"
    "from bisect import *\nfrom collections import *\nfrom functools import *\nfrom heapq import *\n"
    "from itertools import *\nfrom math import *\nfrom typing import *\n"
)
"""Imports that tasks with a function to write assume, as the sites that they come from provide them."""

HARNESS = """
import json, os, sys

def plain(value):
    if isinstance(value, dict):
        return {{key if isinstance(key, str) else json.dumps(plain(key)): plain(item) for key, item in value.items()}}
    if isinstance(value, (set, frozenset)):
        return sorted(map(plain, value), key=json.dumps)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    return value

request = json.loads(sys.stdin.read())
answer = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # what the program prints is no answer
namespace = {{"__name__": "solution"}}
exec({prelude!r}, namespace)
exec(compile({program!r}, "solution.py", "exec"), namespace)
if "expression" in request:
    value = eval(request["expression"], namespace)
else:
    name = request["function"]
    function = namespace.get(name) or getattr(namespace["Solution"](), name)
    value = function(*request["arguments"])
answer.write(json.dumps(plain(value)))
answer.close()
"""


def with_harness(program: str) -> str:
    """Wrap a program so that it reads a request from stdin and writes the resulting value, as JSON, to stdout."""
    return HARNESS.format(prelude=PRELUDE, program=program)
