"""Files of tokens: what is known of each token of the responses of a step, for ``verl view`` and for notebooks.

``{step}.arrow`` is an Arrow IPC file (zstd) with a row per training sequence::

    uid, sample_index, weight_version       as in the batch, text or integer
    prompt_ids, response_ids                lists of int32, without padding
    teacher_prompt_ids                      likewise, the prompt that the policy reads as its own teacher
    response_mask                           list of int8: 1 on tokens that the policy chose
    weight_versions                         list of int32: weights that drew each token, -1 where the policy drew none
    rollout_log_probs, old_log_probs, ...   lists of float32 as long as response_ids, of the columns in NUMBERS

    import pyarrow.feather
    table = pyarrow.feather.read_table("rollouts/12.arrow")

The metadata of its schema has ``step``, ``run``, the id of the run as its metrics have it, and ``tokens``, a JSON
object from id to text for the ids that occur.
"""

from __future__ import annotations

import json
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import torch

from verl.protocol import DataProto, compute_response_mask
from verl.tracking import Tracking
from verl.utils.token_page import TokenPage, described

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

NUMBERS = (
    "rollout_log_probs",
    "old_log_probs",
    "update_log_probs",
    "update_clipped",
    "ref_log_prob",
    "teacher_logprobs",
    "teacher_entropys",
    "span_ends",
    "advantages",
    "returns",
    "values",
    "entropys",
    "token_level_scores",
    "token_level_rewards",
    "rollout_is_weights",
)
"""Columns of the batch that are written as float32, where there are any."""
ROWS_PER_BLOCK = 64
"""Rows that are compressed together: a reader of one sample decompresses so many."""
DRAWN_TOKENS = 2_000
"""Tokens of a response on a page for trackers, which keep one for each validation."""


class TokenDump:
    """Writes ``{step}.arrow`` files.

    Args:
        folder: created at the first write; None writes nothing.
        tokenizer: the policy's.
        frequency: steps between two files; 0 writes none.
    """

    def __init__(self, folder: str | None, tokenizer: PreTrainedTokenizerBase, frequency: int) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self.tokenizer = tokenizer
        self.frequency = frequency
        self.failed = 0
        """Number of failed writes."""
        self._texts: dict[int, str] = {}

    def is_due(self, step: int) -> bool:
        """Return whether the tokens of a step are written."""
        return self.folder is not None and self.frequency > 0 and step % self.frequency == 0

    def write(self, step: int, *batches: DataProto) -> None:
        """Write the tokens of a step if they are due; a failed write is counted, and the first one logged."""
        if self.folder is None or not self.is_due(step):
            return
        tables = [token_table(batch) for batch in batches]
        table = pa.concat_tables(tables, promote_options="default")
        texts = json.dumps(self._texts_of(table), ensure_ascii=False)
        metadata = {"step": str(step), "run": Tracking.run_in_files(), "tokens": texts}
        path = self.folder / f"{step}.arrow"
        unfinished = path.with_name(f".{path.name}.unfinished")
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            _write(table.replace_schema_metadata(metadata), unfinished)
            os.replace(unfinished, path)  # a reader never meets half a file
        except OSError as error:
            self.failed += 1
            if self.failed == 1:
                logger.warning("tokens cannot be written to %s (%s); training goes on without them.", path, error)

    def page(self, title: str, table: pa.Table) -> TokenPage:
        """Return the sequences of a :func:`token_table` as a page for trackers."""
        texts = {str(token_id): text for token_id, text in self._texts_of(table).items()}
        return TokenPage(title, [described(row, texts) for row in table.to_pylist()], DRAWN_TOKENS)

    def _texts_of(self, table: pa.Table) -> dict[int, str]:
        """Text of each id in a table; bytes that are no whole character become U+FFFD."""
        ids: set[int] = set()
        for name in {"prompt_ids", "teacher_prompt_ids", "response_ids"}.intersection(table.column_names):
            ids.update(table[name].combine_chunks().flatten().unique().to_pylist())
        if new := sorted(ids - self._texts.keys()):
            # In a list of its own, so that the tokenizer joins nothing.
            self._texts |= zip(new, self.tokenizer.batch_decode([[token_id] for token_id in new]), strict=True)
        return {token_id: self._texts[token_id] for token_id in sorted(ids)}


def token_table(batch: DataProto) -> pa.Table:
    """Return the tokens of a batch with their numbers, one row per sequence."""
    width = batch.batch["responses"].shape[1]
    response = compute_response_mask(batch).bool().cpu()  # all tokens, those of tools and users too
    prompt = batch.batch["attention_mask"][:, :-width].bool().cpu()
    prompts = batch.batch["input_ids"][:, :-width].cpu()
    columns: dict[str, pa.Array] = {
        name: pa.array([_plain(value) for value in batch.non_tensor_batch[name]])
        for name in ("uid", "sample_index", "weight_version")
        if name in batch.non_tensor_batch
    }
    columns["prompt_ids"] = _lists(prompts.to(torch.int32), prompt)
    if "teacher_prompts" in batch.batch.keys():
        teacher_prompts = batch.batch["teacher_prompts"].cpu().to(torch.int32)
        columns["teacher_prompt_ids"] = _lists(teacher_prompts, batch.batch["teacher_prompts_mask"].bool().cpu())
    columns["response_ids"] = _lists(batch.batch["responses"].cpu().to(torch.int32), response)
    columns["response_mask"] = _lists(batch.batch["response_mask"].cpu().to(torch.int8), response)
    if "weight_versions" in batch.batch.keys():
        columns["weight_versions"] = _lists(batch.batch["weight_versions"].cpu(), response)
    for name in NUMBERS:
        if name in batch.batch.keys():
            columns[name] = _lists(batch.batch[name].cpu().to(torch.float32), response)
    return pa.table(columns)


def _lists(values: torch.Tensor, keep: torch.Tensor) -> pa.Array:
    """Rows of (bsz, T) as lists of the kept entries."""
    ends = torch.cat([torch.zeros(1, dtype=torch.int32), keep.sum(-1).cumsum(0).to(torch.int32)])
    return pa.ListArray.from_arrays(ends.numpy(), values[keep].numpy())


def _plain(value: Any) -> Any:
    return value.item() if hasattr(value, "item") else value


def _write(table: pa.Table, path: Path) -> None:
    options = pa.ipc.IpcWriteOptions(compression="zstd")
    with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema, options=options) as writer:
        writer.write_table(table.combine_chunks(), max_chunksize=ROWS_PER_BLOCK)
