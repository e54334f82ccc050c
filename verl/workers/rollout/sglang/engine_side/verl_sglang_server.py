"""SGLang's HTTP server on loopback: ``verl_sglang_server.py PORT ARGUMENTS``, the arguments as a JSON object.

The token comes in the environment, because a command line can be read by everyone on the machine.
"""

from __future__ import annotations

import json
import os
import sys

TOKEN_VARIABLE = "VERL_ENGINE_TOKEN"


def main(port: int, arguments: dict[str, object]) -> None:
    """Serve until the process is ended."""
    import verl_sglang
    from sglang.srt.entrypoints.http_server import launch_server
    from sglang.srt.server_args import ServerArgs

    try:
        server_args = ServerArgs(host="127.0.0.1", port=port, api_key=os.environ[TOKEN_VARIABLE], **arguments)
    except TypeError as error:
        sys.exit(
            f"this SGLang does not take verl's arguments: {error}. Install the version of requirements/sglang.txt."
        )
    launch_server(server_args, run_scheduler_process_func=verl_sglang.run_scheduler_process)


if __name__ == "__main__":
    main(int(sys.argv[1]), json.loads(sys.argv[2]))
