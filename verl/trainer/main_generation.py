"""``python -m verl.trainer.main_generation``: prompts in, a file with their responses out.

The rows of ``data.path`` are written to ``data.output_path`` with one more column, ``responses``, a list
of ``data.n_samples`` texts. Sampling goes through the same workers and the same engine contract as in
training.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np

from verl.errors import DataError
from verl.protocol import DataProto, pad_dataproto_to_divisor, unpad_dataproto
from verl.trainer.config import GenerationConfig
from verl.trainer.config.load import hydra_entry
from verl.trainer.config.sizes import resolve_device
from verl.trainer.controller import load_controller, run_under_controller
from verl.trainer.ppo.stages import repeat_prompts
from verl.utils.dataset import collate_fn
from verl.utils.dataset.chat import as_messages, encode, render, truncate
from verl.utils.dataset.files import Row, open_files, require_columns
from verl.utils.dataset.rl_dataset import left_pad
from verl.workers.config import ActorRolloutRefConfig

logger = logging.getLogger(__name__)

RESPONSES = "responses"


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A row of the file and its token ids."""

    row: Row
    ids: list[int]


class GenerationRunner:
    """Reads, generates, writes; in this process, or in one that the controller starts."""

    def run(self, config: GenerationConfig) -> None:
        """See the head of this file.

        Raises:
            DataError: the prompts cannot be read, one is too long, or the responses cannot be written.
        """
        from verl.utils import hf_tokenizer

        model = config.model
        tokenizer = hf_tokenizer(
            model.tokenizer_path or model.path,
            trust_remote_code=model.trust_remote_code,
            chat_template=model.custom_chat_template,
        )
        prompts = read_prompts(config, tokenizer)
        workers = start_workers(config)
        rows: list[Row] = []
        for start in range(0, len(prompts), config.data.batch_size):
            part = prompts[start : start + config.data.batch_size]
            batch = prompt_batch(part, start, config, cast(int, tokenizer.pad_token_id))
            texts = generate(workers, batch, tokenizer)
            n = config.data.n_samples
            rows += [{**p.row, RESPONSES: texts[i * n : (i + 1) * n]} for i, p in enumerate(part)]
            logger.info("%d of %d prompts answered", len(rows), len(prompts))
        write_rows(Path(config.data.output_path or ""), rows)


def read_prompts(config: GenerationConfig, tokenizer: Any) -> list[Prompt]:
    """All prompts of ``data.path``, through the chat template.

    Raises:
        ConfigError: the tokenizer has no chat template.
        DataError: a row is not a prompt, or has more than ``rollout.prompt_length`` tokens.
    """
    from verl.utils.tokenizer import require_chat_template

    require_chat_template(tokenizer)
    data = config.data
    files = open_files(data.path or "", "data.path")
    require_columns(files, {data.prompt_key: "data.prompt_key"})
    prompts = []
    for file in files:
        for number in range(len(file)):
            row, place = file.row(number), f"{file.path}, row {number}"
            messages = as_messages(row[data.prompt_key], place)
            text = render(messages, tokenizer, place, add_generation_prompt=True, **data.apply_chat_template_kwargs)
            ids = encode(text, tokenizer)
            limit = config.rollout.prompt_length
            prompts.append(Prompt(row, truncate(ids, limit, "error", f"{place}: the prompt", "rollout.prompt_length")))
    return prompts


def start_workers(config: GenerationConfig) -> Any:
    """A worker group that only generates, with the weights of ``model.path``."""
    from verl.workers.fsdp_workers import ActorRolloutRefWorker

    controller, device = load_controller(config.trainer.controller), resolve_device(config)
    ranks = [config.trainer.n_gpus_per_node] * config.trainer.nnodes
    pools = controller.pool_manager({"global_pool": ranks}, {"rollout": "global_pool"}, device)
    pools.create_resource_pool()
    # No trainer wants the memory between two batches, so the weights are read once and kept.
    rollout = dataclasses.replace(config.rollout, free_cache_engine=False)
    worker = controller.WorkerGroup.describe(
        ActorRolloutRefWorker,
        config=ActorRolloutRefConfig(model=config.model, rollout=rollout),
        role="rollout",
        device_name=device,
    )
    group = controller.WorkerGroup(
        resource_pool=pools.get_resource_pool("rollout"), ray_cls_with_init=worker, device_name=device
    )
    group.init_model()
    return group


def prompt_batch(prompts: Sequence[Prompt], first: int, config: GenerationConfig, pad_token_id: int) -> DataProto:
    """The columns that ``generate_sequences`` reads, each prompt ``data.n_samples`` times.

    Args:
        prompts: of this batch.
        first: number of the first of them in the file; a prompt's seed depends on its number, not on the batch.
        config: lengths and number of samples.
        pad_token_id: fills the left side.
    """
    columns = collate_fn([left_pad(prompt.ids, config.rollout.prompt_length, pad_token_id) for prompt in prompts])
    uids = np.array([f"prompt-{first + i}" for i in range(len(prompts))], dtype=object)
    batch = DataProto.from_single_dict({**columns, "uid": uids}, meta_info={"global_steps": 0, "validate": False})
    return repeat_prompts(batch, config.data.n_samples)


def generate(workers: Any, batch: DataProto, tokenizer: Any) -> list[str]:
    """The decoded response of every row, without special tokens."""
    padded, pad_size = pad_dataproto_to_divisor(batch, workers.world_size)
    columns = unpad_dataproto(workers.generate_sequences(padded), pad_size)
    assert columns.batch is not None
    lengths = columns.batch["response_mask"].sum(-1).tolist()
    ids = [row[:n] for row, n in zip(columns.batch["responses"].tolist(), lengths, strict=True)]
    return tokenizer.batch_decode(ids, skip_special_tokens=True)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as parquet, or as jsonl if the name ends so; the file appears whole or not at all.

    Raises:
        DataError: the name ends otherwise, or the rows do not fit into a table.
    """
    path = path.expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    if path.suffix == ".jsonl":
        unfinished.write_text("".join(json.dumps(row, ensure_ascii=False, default=str) + "\n" for row in rows))
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
    except pa.ArrowException as error:
        raise DataError(
            f"the rows do not fit into a table ({error}). Let data.output_path end in .jsonl, which takes any rows."
        ) from error
    pq.write_table(table, path)


def run_generation(config: GenerationConfig) -> None:
    """Generate, on Ray or in this process (``trainer.controller``)."""
    run_under_controller(GenerationRunner, config)


def main() -> None:
    """The command line."""
    hydra_entry(run_generation, config_name="generation", root=GenerationConfig)


if __name__ == "__main__":
    main()
