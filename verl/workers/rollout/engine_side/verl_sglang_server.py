"""Command line program in SGLang's environment: run its server with verl's sampler, or list its arguments.

verl_sglang_server.py names               print the fields of SGLang's ServerArgs as a JSON list, in the last line
verl_sglang_server.py PORT ARGUMENTS      run SGLang's HTTP server on loopback; the arguments are a JSON object
"""

from __future__ import annotations

import inspect
import json
import os
import sys

from sglang.srt.server_args import ServerArgs
from verl_engine import TOKEN_VARIABLE


def serve(port: int, arguments: dict[str, object]) -> None:
    """Run the server until the process is ended; the token comes from the environment."""
    import verl_sglang
    from sglang.srt.entrypoints.http_server import launch_server

    try:
        server_args = ServerArgs(host="127.0.0.1", port=port, api_key=os.environ[TOKEN_VARIABLE], **arguments)
    except TypeError as error:
        sys.exit(
            f"this SGLang does not take verl's arguments: {error}. Install the version of requirements/sglang.txt."
        )
    if server_args.enable_multimodal:
        verl_sglang.read_images_from_files()
    launch_server(server_args, run_scheduler_process_func=verl_sglang.run_scheduler_process)


if __name__ == "__main__":
    if sys.argv[1:] == ["names"]:
        sys.stdout.write(f"\n{json.dumps(list(inspect.signature(ServerArgs).parameters))}\n")
    else:
        serve(int(sys.argv[1]), json.loads(sys.argv[2]))
