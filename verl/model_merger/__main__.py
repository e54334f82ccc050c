"""Command line of :mod:`verl.model_merger`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from verl.errors import CheckpointError, VerlError
from verl.supervision.interruption import interruptible

logger = logging.getLogger("verl.model_merger")


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    top = argparse.ArgumentParser(prog="verl merge", description="Sharded checkpoints to model folders.")
    commands = top.add_subparsers(dest="command", required=True)
    for name, text in (("merge", "write a model folder"), ("test", "compare with a model folder")):
        command = commands.add_parser(name, help=text)
        command.add_argument("--backend", choices=["fsdp", "megatron"], required=True, help="what wrote the checkpoint")
        command.add_argument("--local_dir", required=True, help="actor or critic folder of a global_step_N")
        command.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
        command.add_argument("--is-value-model", action="store_true", help="refuse anything but a value model")
        command.add_argument("--tie-word-embedding", action="store_true", help="write both embeddings as one weight")
        command.add_argument("--base_model", help="model of LoRA adapters, if it is not where it was in training")
        command.add_argument("--use_cpu_initialization", action="store_true", help="no effect: it is always so")
    merging, testing = commands.choices["merge"], commands.choices["test"]
    merging.add_argument("--target_dir", default="tmp", help="model folder to make (default: tmp)")
    merging.add_argument("--hf_upload_path", help="Hugging Face repository to upload it to")
    merging.add_argument("--private", action="store_true", help="make that repository private")
    testing.add_argument("--test_hf_dir", required=True, help="model folder to compare with")
    return top


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status, 1 for errors."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    args = parser().parse_args(arguments)
    if args.use_cpu_initialization:
        logger.warning("no effect: --use_cpu_initialization (weights are always read into memory of the CPU)")
    if not sys.stderr.isatty():
        import transformers

        transformers.utils.logging.disable_progress_bar()  # they would fill a log with lines
    from verl.model_merger.fsdp import compare, merge

    try:
        check_backend(args.backend, Path(args.local_dir).expanduser())
        if args.command == "test":
            compare(args.local_dir, args.test_hf_dir, args.trust_remote_code, args.base_model)
            return 0
        merge(
            args.local_dir,
            args.target_dir,
            tie_word_embedding=args.tie_word_embedding,
            trust_remote_code=args.trust_remote_code,
            is_value_model=args.is_value_model,
            base_model=args.base_model,
        )
        if args.hf_upload_path:
            upload(args.target_dir, args.hf_upload_path, args.private)
    except VerlError as error:
        logger.error("%s", error)
        return 1
    return 0


def check_backend(backend: str, folder: Path) -> None:
    """Raise ``CheckpointError`` if another back end wrote the checkpoint in ``folder``."""
    from verl.checkpoint.boxes import LAYOUT_FILE
    from verl.checkpoint.shards import WORLD_SIZE_FILE

    found = {"fsdp": WORLD_SIZE_FILE, "megatron": LAYOUT_FILE}
    others = [name for name, file in found.items() if name != backend and (folder / file).is_file()]
    if others:
        raise CheckpointError(f"{folder} was written by {others[0]}: use --backend {others[0]}.")


def upload(folder: str, repository: str, private: bool) -> None:
    """Upload a model folder to the Hugging Face hub (``HF_ENDPOINT``), with the credentials stored on this machine.

    Raises:
        CheckpointError: the hub refuses it or does not answer; the folder stays.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    # The client's errors, also those of connections, have the base class of its HTTP library's.
    bases = cast(tuple[type[Exception], ...], HfHubHTTPError.__bases__)
    api = HfApi()
    try:
        repository = api.create_repo(repository, private=private, exist_ok=True).repo_id
        api.upload_folder(folder_path=folder, repo_id=repository, repo_type="model")
    except (*bases, HFValidationError) as error:
        raise CheckpointError(
            f"{folder} is written, but was not uploaded to {repository}: {error} Log in by 'hf auth login' or "
            f"HF_TOKEN, then upload the folder itself by 'hf upload {repository} {folder}'."
        ) from error
    logger.info("uploaded to %s", repository)


if __name__ == "__main__":
    with interruptible():
        sys.exit(main())
