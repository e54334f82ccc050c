"""Command line of :mod:`verl.model_merger`."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import cast

from verl.base.plugins import load
from verl.base.requirements import install_command
from verl.errors import CheckpointError, VerlError
from verl.supervision.interruption import interruptible

logger = logging.getLogger("verl.model_merger")


def parser() -> argparse.ArgumentParser:
    """Build the argument parser."""
    options = argparse.ArgumentParser(
        prog="verl merge",
        usage="verl merge FOLDER --target_dir MODEL [options]\n"
        "       verl merge FOLDER --to verl-fsdp --target_dir CHECKPOINT [--ranks N]\n"
        "       verl merge MODEL --to torch-dist --target_dir CHECKPOINT\n"
        "       verl merge test FOLDER --test_hf_dir MODEL [options]",
        description="Make a Hugging Face model folder of a sharded checkpoint, read it back and compare. With the word "
        "test in front, compare a checkpoint with a model folder.",
    )
    options.add_argument("folder", nargs="?", help="of a run (its newest step), of a step, or of an actor or critic")
    options.add_argument("--local_dir", help="another way to name FOLDER")
    options.add_argument("--target_dir", default="tmp", help="model folder to make (default: tmp)")
    options.add_argument(
        "--to",
        choices=["hf", "verl-fsdp", "torch-dist"],
        default="hf",
        help="what to make: a model folder (default), a checkpoint as verl itself saves it under FSDP2, or, of a model "
        "folder, one of megatron-core",
    )
    options.add_argument("--ranks", type=int, help="ranks of that checkpoint (default: as many as wrote this one)")
    options.add_argument("--test_hf_dir", help="model folder to compare with, after the word test")
    options.add_argument("--backend", choices=["fsdp", "megatron"], help="what wrote it; found by itself")
    options.add_argument(
        "--base_model",
        help="model of LoRA adapters, if it is not where it was in training, and of untrained heads; of a checkpoint "
        "of megatron-core, the folder with its config and tokenizer",
    )
    options.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16"],
        help="precision of the weights (default: that of the model's folder before training)",
    )
    options.add_argument("--is-value-model", action="store_true", help="refuse anything but a value model")
    options.add_argument("--tie-word-embedding", action="store_true", help="write both embeddings as one weight")
    options.add_argument("--trust-remote-code", action="store_true", help="run code that comes with the model")
    options.add_argument("--hf_upload_path", help="Hugging Face repository to upload the model to")
    options.add_argument("--private", action="store_true", help="make that repository private")
    options.add_argument("--use_cpu_initialization", action="store_true", help="no effect: it is always so")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return the exit status, 1 for errors."""
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    words = list(sys.argv[1:] if arguments is None else arguments)
    command = words.pop(0) if words[:1] in (["merge"], ["test"]) else "merge"
    options = parser()
    args = options.parse_args(words)
    named = args.folder or args.local_dir
    if named is None or (args.folder and args.local_dir):
        options.error("name one folder of a checkpoint: verl merge FOLDER, or --local_dir FOLDER")
    if command == "test" and args.test_hf_dir is None:
        options.error("name the model folder to compare with: --test_hf_dir MODEL")
    if args.ranks is not None and (args.ranks < 1 or args.to != "verl-fsdp"):
        options.error("--ranks is a number from 1, of a checkpoint that --to verl-fsdp makes")
    if args.to != "hf" and (command == "test" or args.hf_upload_path):
        options.error(f"a checkpoint that --to {args.to} makes is neither compared nor uploaded")
    if args.use_cpu_initialization:
        logger.warning("no effect: --use_cpu_initialization (weights are always read into memory of the CPU)")
    try:
        if args.to == "torch-dist":
            _write_torch_dist(Path(named).expanduser(), Path(args.target_dir).expanduser(), args.trust_remote_code)
            return 0
        folder = shards_of(Path(named).expanduser(), args.backend)
        if args.to == "verl-fsdp":
            from verl.model_merger.verl_fsdp import export

            export(folder, Path(args.target_dir).expanduser(), args.ranks, args.trust_remote_code)
            return 0
        if not sys.stderr.isatty():
            import transformers

            transformers.utils.logging.disable_progress_bar()  # they would fill a log with lines
        from verl.model_merger.fsdp import compare, merge

        if command == "test":
            compare(folder, args.test_hf_dir, args.trust_remote_code, args.base_model)
            return 0
        merge(
            folder,
            args.target_dir,
            tie_word_embedding=args.tie_word_embedding,
            trust_remote_code=args.trust_remote_code,
            is_value_model=args.is_value_model,
            base_model=args.base_model,
            dtype=args.dtype,
        )
        if args.hf_upload_path:
            upload(args.target_dir, args.hf_upload_path, args.private)
    except VerlError as error:
        logger.error("%s", error)
        return 1
    return 0


def _write_torch_dist(model: Path, target: Path, trust_remote_code: bool) -> None:
    if find_spec("megatron") is None:
        raise CheckpointError(f"--to torch-dist: megatron-core is not installed; {install_command('megatron')}")
    export = load("megatron.torch_dist:export")
    export(model, target, trust_remote_code)


def shards_of(named: Path, backend: str | None) -> Path:
    """Return the folder of shards that the folder ``named`` on the command line leads to.

    Raises:
        CheckpointError: it leads to none, or another back end than ``backend`` wrote them.
    """
    from verl.checkpoint.locate import backend_of, shards_below
    from verl.checkpoint.steps import LATEST

    folder = shards_below(named)
    if folder is None:
        if not named.is_dir():
            raise CheckpointError(f"{named}: there is no such folder. Name a run's, such as checkpoints/PROJECT/NAME.")
        runs = sorted(
            {file.parent for file in named.glob(f"*/{LATEST}")} | {f.parent for f in named.glob(f"*/*/{LATEST}")}
        )
        if len(runs) == 1:  # such as the checkpoints in the folder of a call of verl.train
            return shards_of(runs[0], backend)
        below = f"; below it are the runs {', '.join(map(str, runs[:5]))}" if runs else ""
        raise CheckpointError(
            f"{named} holds no shards of a model{below}. Name the folder of a run, of a step (global_step_N), or of an "
            "actor or critic in it."
        )
    wrote = backend_of(folder)
    if backend not in (None, wrote):
        raise CheckpointError(f"{folder} was written by {wrote}: use --backend {wrote}, or leave it out.")
    if folder != named:
        logger.info("taking %s", folder)
    return folder


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
