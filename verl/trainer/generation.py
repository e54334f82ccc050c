"""Sample responses to the prompts of a file.

The rows of ``data.path`` are written to ``data.output_path`` with one more column, ``responses``, a list of
``data.n_samples`` texts. Sampling uses the same workers and rollout engines as training.
"""

from __future__ import annotations

import dataclasses
import logging
import math
import os
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np

from verl.config import GenerationConfig, local_copies
from verl.datasets import collate_fn
from verl.datasets.chat import encode, render_prompt, truncate
from verl.datasets.files import Row, open_files, require_columns
from verl.datasets.rl_dataset import left_pad
from verl.datasets.row_conversation import require_written_calls, row_messages, row_template_kwargs
from verl.errors import DataError
from verl.experience.prompts import repeat_prompts
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.config.sizes import resolve_device
from verl.trainer.driver import load_controller
from verl.trainer.worker_groups import WorkerGroups
from verl.utils.console import status
from verl.utils.run_log import json_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.single_controller.base.worker_group import WorkerGroup

logger = logging.getLogger(__name__)

RESPONSES = "responses"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A row of the file and the token ids of its prompt."""

    row: Row
    ids: list[int]


class GenerationRunner:
    """Reads prompts, generates responses and writes the file."""

    def run(self, config: GenerationConfig) -> None:
        """Generate responses for all prompts, ``data.batch_size`` prompts at a time, and write them."""
        from verl.utils.tokenizer import tokenizer_of

        here = local_copies(config)  # the ranks, perhaps on other machines, make copies of their own
        tokenizer = tokenizer_of(here.model)
        prompts = read_prompts(here, tokenizer)
        workers = start_workers(config)
        rows: list[Row] = []
        lengths: list[int] = []
        for start in range(0, len(prompts), config.data.batch_size):
            part = prompts[start : start + config.data.batch_size]
            batch = prompt_batch(part, start, config, cast(int, tokenizer.pad_token_id))
            texts, tokens = generate(workers, batch, tokenizer)
            n = config.data.n_samples
            rows += [{**p.row, RESPONSES: texts[i * n : (i + 1) * n]} for i, p in enumerate(part)]
            lengths += tokens
            status(f"{len(rows):,} of {len(prompts):,} prompts answered")
        write_rows(Path(config.data.output_path or ""), rows)
        status(f"{summary(lengths, len(rows), config.rollout.response_length)}, in {config.data.output_path}")


def read_prompts(config: GenerationConfig, tokenizer: PreTrainedTokenizerBase) -> list[Prompt]:
    """Read all prompts of ``data.path``, render and tokenize them; one beyond ``rollout.prompt_length`` is an error."""
    from verl.datasets.chat import require_chat_template

    require_chat_template(tokenizer)
    data = config.data
    files = open_files(data.path or "", "data.path")
    require_columns(files, {data.prompt_key: "data.prompt_key"})
    prompts = []
    for file in files:
        for index in range(len(file)):
            row, where = file.row(index), f"{file.path}, row {index}"
            messages = row_messages(row[data.prompt_key], where)
            require_written_calls(messages, tokenizer, where)
            template_kwargs = row_template_kwargs(row, data.tools_key, data.enable_thinking_key, tokenizer, where)
            text = render_prompt(messages, tokenizer, where, **data.apply_chat_template_kwargs | template_kwargs)
            ids = encode(text, tokenizer)
            limit = config.rollout.prompt_length
            prompts.append(Prompt(row, truncate(ids, limit, "error", f"{where}: the prompt", "rollout.prompt_length")))
    return prompts


def start_workers(config: GenerationConfig) -> WorkerGroup:
    """Start a worker group that only generates, with the weights of ``model.path``."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    controller, device = load_controller(config.trainer.controller), resolve_device(config)
    ranks = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    pools = controller.ResourcePoolManager({"global_pool": ranks}, {"rollout": "global_pool"}, device)
    worker_groups = WorkerGroups(
        worker_classes={"rollout": ActorRolloutRefWorker},
        pools=pools,
        group_class=controller.WorkerGroup,
        device_name=device,
        start_timeout_s=config.trainer.ray_wait_register_center_timeout,
    )
    return worker_groups.start({"rollout": {"config": config.roles, "role": "rollout"}})["rollout"]


def prompt_batch(prompts: Sequence[Prompt], first: int, config: GenerationConfig, pad_token_id: int) -> DataProto:
    """Build the input of ``generate_sequences``, each prompt ``data.n_samples`` times.

    ``first`` is the number of the first prompt in the file; a prompt's seed depends on its number, not on the batch.
    """
    columns = collate_fn([left_pad(prompt.ids, config.rollout.prompt_length, pad_token_id) for prompt in prompts])
    uids = np.array([f"prompt-{first + i}" for i in range(len(prompts))], dtype=object)
    batch = DataProto.from_single_dict({**columns, "uid": uids}, meta_info={"global_steps": 0, "validate": False})
    return repeat_prompts(batch, config.data.n_samples)


def summary(lengths: Sequence[int], prompts: int, limit: int) -> str:
    """Say how many responses there are and how long, with the standard error of the mean length.

    >>> summary([2, 4, 8, 8], prompts=2, limit=8)
    '4 responses to 2 prompts, of 5.5 ± 1.5 tokens (mean and its standard error), 2 as long as the limit of 8'
    """
    if not lengths:
        return "no prompt, so no response"
    error = statistics.stdev(lengths) / math.sqrt(len(lengths)) if len(lengths) > 1 else math.nan
    cut = sum(length >= limit for length in lengths)
    return (
        f"{len(lengths):,} responses to {prompts:,} prompts, of {statistics.fmean(lengths):.1f} ± {error:.1f} tokens "
        f"(mean and its standard error), {cut:,} as long as the limit of {limit:,}"
    )


def generate(workers: WorkerGroup, batch: DataProto, tokenizer: PreTrainedTokenizerBase) -> tuple[list[str], list[int]]:
    """Sample one response per row; return the texts, without special tokens, and their numbers of tokens."""
    padded, pad_size = pad_dataproto_to_divisor(batch, workers.world_size)
    columns = unpad_dataproto(workers.generate_sequences(padded), pad_size)
    lengths = columns.batch["response_mask"].sum(-1).tolist()
    ids = [row[:n] for row, n in zip(columns.batch["responses"].tolist(), lengths, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True), lengths


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows atomically as parquet or jsonl, chosen by the suffix of ``path``."""
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    # Written under a name of this process and renamed, so that the file appears complete or not at all.
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    if path.suffix == ".jsonl":
        unfinished.write_text("".join(json_text(row) + "\n" for row in rows))
    elif path.suffix == ".parquet":
        _write_parquet(unfinished, rows)
    else:
        raise DataError(f"data.output_path='{path}' must end in .parquet or .jsonl.")
    unfinished.replace(path)
    logger.info("%d prompts with their responses written to %s", len(rows), path)


def _write_parquet(path: Path, rows: list[Row]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    columns = dict.fromkeys(name for row in rows for name in row)
    try:
        table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in columns})
        pq.write_table(table, path)
    except pa.ArrowException as error:
        raise DataError(
            f"the rows do not fit into a table ({error}). Let data.output_path end in .jsonl, which takes any rows."
        ) from error
