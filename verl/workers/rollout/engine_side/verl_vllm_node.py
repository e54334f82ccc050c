"""Command line program in vLLM's environment: run an engine's workers on a machine without its server.

verl_vllm_node.py FLAGS      with flags of vLLM's server, which name the machines and where they meet
"""

from __future__ import annotations

from vllm.entrypoints.cli.serve import run_headless
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.utils.argparse_utils import FlexibleArgumentParser

if __name__ == "__main__":
    arguments = make_arg_parser(FlexibleArgumentParser()).parse_args()
    arguments.api_server_count = 0
    run_headless(arguments)
