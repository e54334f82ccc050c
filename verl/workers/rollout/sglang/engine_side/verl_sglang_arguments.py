"""Prints the names of the fields of SGLang's ``ServerArgs`` as its last line, a JSON list."""

from __future__ import annotations

import inspect
import json
import sys

from sglang.srt.server_args import ServerArgs

if __name__ == "__main__":
    sys.stdout.write(f"\n{json.dumps(list(inspect.signature(ServerArgs).parameters))}\n")
