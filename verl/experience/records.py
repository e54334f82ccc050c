"""Files of samples for people to read; a failed write does not stop the run.

A sample that an agent loop drew has what is known of it under ``trajectory``; a trajectory of several training
sequences has a record for each, with one ``id``::

    {"input": ..., "output": ..., "gts": ..., "score": 1.0, "step": 3, ...,
     "trajectory": {
        "id": "3-0/1", "agent_name": "tool_agent", "agent": "main", "status": "done", "message": "", "num_turns": 4,
        "conversation": [{"role": "user", ...}, {"role": "assistant", "tool_calls": [...], "seconds": 0.4}, ...],
        "seconds": {"generate_sequences": 0.7, "tool_calls": 0.1, "compute_score": 0.0},
        "turn_scores": [0.0, 1.0],
        "prompt_ids": [...], "response_ids": [...], "response_mask": [[1, 12], [0, 30], [1, 5]]}}

Each line ends with ``run``, the id of the run as its metrics have it, so that samples are never taken for another's.

What is known of them only when their step has ended is a file ``{step}.numbers.json`` of columns beside it; see
:func:`sample_numbers`.
"""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from verl.base.redact import redacted_texts
from verl.protocol import DataProto, compute_response_mask
from verl.scorers import row_truth
from verl.tracking import Tracking
from verl.utils.run_log import json_text
from verl.vision.families import IMAGE_TOKEN, TEXT_PLACES, VIDEO_TOKEN
from verl.vision.texts import decoded_with_images
from verl.workers.reward_manager.naive import NaiveRewardManager

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

LONGEST_TEXT = 20_000
"""Characters of a text of a conversation that are kept."""
NAMES = ("uid", "sample_index", "data_source", "finish_reason")
"""Columns of any batch that a record has under the same name, unless the reward function gives that name."""
FURTHER = ("tool_rewards", "tool_call_counts", "tool_failures", "rendering_differences")
"""Columns of agent loops that a record has under the same name, where there are any."""


class RecordFolder:
    """A folder of files ``{step}.jsonl`` with one line per sample.

    Args:
        folder: created at the first write; None writes nothing.
        secrets: texts that are written as ``***``, beside those of :func:`verl.base.redact.redacted`.
    """

    def __init__(self, folder: str | None, secrets: Sequence[str] = ()) -> None:
        self.folder = None if folder is None else Path(folder).expanduser()
        self._secrets = list(secrets)
        self.failed = 0
        """Number of failed writes."""

    def write(self, step: int, records: Iterable[Mapping[str, object]], append: bool = False) -> None:
        """Write the records of a step, or append them to the step's file.

        If the write fails, all of these records are left out, so that no line is cut; the first failure logs a warning.
        """
        if self.folder is not None:
            lines = "".join(self._line(record) for record in records)
            self._try(self.folder / f"{step}.jsonl", lambda path: _write(path, lines.encode(), append))

    def write_numbers(self, step: int, batch: DataProto) -> None:
        """Write :func:`sample_numbers` of the samples that a step was trained on."""

        def write(path: Path) -> None:
            unfinished = path.with_name(f".{path.name}.unfinished")
            unfinished.write_text(json_text(sample_numbers(batch) | {"run": Tracking.run_in_files()}))
            os.replace(unfinished, path)  # a reader never meets half a file

        if self.folder is not None:
            self._try(self.folder / f"{step}.numbers.json", write)

    def _try(self, path: Path, write: Callable[[Path], None]) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(path)
        except OSError as error:
            self.failed += 1
            if self.failed == 1:
                logger.warning(
                    "samples cannot be written to %s (%s); training goes on without them, and recovery/failed_dumps "
                    "counts. Free space, or set trainer.rollout_data_dir and trainer.validation_data_dir.",
                    path,
                    error,
                )

    def _line(self, record: Mapping[str, object]) -> str:
        entry = redacted_texts(record, self._secrets) | {"run": Tracking.run_in_files()}
        return json_text(entry) + "\n"


def generation_records(
    step: int,
    tokenizer: PreTrainedTokenizerBase,
    batch: DataProto,
    scores: torch.Tensor,
    extra: Mapping[str, list],
    reward_fn: object = None,
) -> list[dict[str, object]]:
    """Convert the samples of a batch to records for JSON; texts are decoded without special tokens, and name images.

    Args:
        step: the training step.
        tokenizer: the policy's.
        batch: prompts and responses.
        scores: (bsz, response_length) ``token_level_scores``.
        extra: further values of the reward function by name, one for each sample.
        reward_fn: a reward manager, of whose function a record has the columns that it named, as ``columns``.
    """
    inputs = tokenizer.batch_decode(batch.batch["prompts"], skip_special_tokens=True)
    with_images = [row for row, images in enumerate(batch.non_tensor_batch.get("multi_modal_inputs", ())) if images]
    present = compute_response_mask(batch).bool()  # all tokens, those of tools and users too
    responses = [row[keep].tolist() for row, keep in zip(batch.batch["responses"], present, strict=True)]
    outputs = tokenizer.batch_decode(responses, skip_special_tokens=True)
    for row in with_images:
        inputs[row], outputs[row] = _texts_with_images(tokenizer, batch, row)
    nothing = [None] * len(batch)
    truths = [batch.non_tensor_batch.get(name, nothing) for name in ("reward_model", "ground_truth")]
    named_columns = reward_fn.columns_read(batch) if isinstance(reward_fn, NaiveRewardManager) else {}
    lengths = present.sum(-1).tolist()
    totals = scores.sum(-1, dtype=torch.float64).to(scores.dtype).tolist()
    named = {name: batch.non_tensor_batch[name].tolist() for name in NAMES if name in batch.non_tensor_batch}
    records = []
    for row, (text, output, truth, score) in enumerate(
        zip(inputs, outputs, map(row_truth, *truths), totals, strict=True)
    ):
        fields = {"input": text, "output": output, "gts": truth, "score": score, "step": step}
        more = {"response_length": lengths[row]} | {name: values[row] for name, values in named.items()}
        further = {name: values[row] for name, values in extra.items() if name not in fields}
        columns = {name: _bounded(values[row]) for name, values in named_columns.items() if _has_value(values[row])}
        records.append(fields | more | further | ({"columns": columns} if columns else {}))
    if "trajectory_status" in batch.non_tensor_batch:
        for row, record in enumerate(records):
            record["trajectory"] = _trajectory(tokenizer, batch, scores, row)
    return records


def sample_numbers(batch: DataProto) -> dict[str, list]:
    """Return what the update of a step saw of each of its samples, in columns, to find those behind an alert.

    ``uid`` and ``sample_index`` name the sample; each number is the largest over the tokens t that are trained on::

        gap         |exp(old_log_probs_t) - exp(rollout_log_probs_t)|
        kl          exp(d_t) - d_t - 1,   d_t = ref_log_prob_t - old_log_probs_t   (k3 of the KL to the reference)
        advantage   |advantages_t|

    Infinity (null in the file) where one of them is not finite, 0 of a sample without such tokens. A number is left out
    if the batch lacks its columns.
    """
    columns, mask = batch.batch, batch.batch["response_mask"].bool()  # (bsz, T)
    names = ("old_log_probs", "rollout_log_probs", "ref_log_prob", "advantages")
    log_probs = {name: columns[name].double() for name in names if name in columns.keys()}

    def largest(values: torch.Tensor) -> list[float]:
        values = torch.where(values.isfinite(), values, torch.inf).masked_fill(~mask, 0.0)
        return values.amax(-1).tolist()  # (bsz,)

    numbers: dict[str, list] = {
        name: batch.non_tensor_batch[name].tolist()
        for name in ("uid", "sample_index")
        if name in batch.non_tensor_batch
    }
    old = log_probs.get("old_log_probs")
    if old is not None and "rollout_log_probs" in log_probs:
        numbers["gap"] = largest((old.exp() - log_probs["rollout_log_probs"].exp()).abs())
    if old is not None and "ref_log_prob" in log_probs:
        d = log_probs["ref_log_prob"] - old
        numbers["kl"] = largest(d.exp() - d - 1)
    if "advantages" in log_probs:
        numbers["advantage"] = largest(log_probs["advantages"].abs())
    return numbers


def _texts_with_images(tokenizer: Any, batch: DataProto, row: int) -> tuple[str, str]:
    """Prompt and response of a row, in which each image and video is named by its number of tokens."""
    columns = batch.batch
    width = columns["responses"].shape[1]
    ids = torch.cat([columns["prompts"][row], columns["responses"][row]])
    there = columns["attention_mask"][row].bool()
    image, video = tokenizer.convert_tokens_to_ids([IMAGE_TOKEN, VIDEO_TOKEN])
    is_image = ((ids == image) | (ids == video)) & there
    is_image[-width:] &= columns["response_mask"][row] == 0  # one that the policy drew is text
    texts = batch.non_tensor_batch["multi_modal_inputs"][row].get(TEXT_PLACES)
    if texts is not None:
        is_image[there.nonzero().flatten()[texts]] = False
    names = {image: "image", video: "video"}

    def text(part: slice) -> str:
        token_ids = ids[part][there[part]].tolist()
        kinds = [
            names[token] if is_image_token else ""
            for token, is_image_token in zip(token_ids, is_image[part][there[part]], strict=True)
        ]
        return decoded_with_images(tokenizer, token_ids, kinds)

    return text(slice(None, -width)), text(slice(-width, None))


def _trajectory(
    tokenizer: PreTrainedTokenizerBase, batch: DataProto, scores: torch.Tensor, row: int
) -> dict[str, object]:
    """All that is known of the trajectory of a row."""
    columns = {name: values[row] for name, values in batch.non_tensor_batch.items()}
    width = batch.batch["responses"].shape[1]
    present = batch.batch["attention_mask"][row].bool()
    prompt = batch.batch["prompts"][row][present[: len(present) - width]].tolist()
    response = batch.batch["responses"][row][present[len(present) - width :]].tolist()
    mask = batch.batch["response_mask"][row][: len(response)].tolist()
    runs = [(is_sampled, len(list(run))) for is_sampled, run in itertools.groupby(mask)]
    ends = list(itertools.accumulate(length for _, length in runs))
    parts = [(is_sampled, end - length, end) for (is_sampled, length), end in zip(runs, ends, strict=True)]
    conversation = columns["trajectory_conversation"]
    if conversation is None:
        conversation = [
            {"role": "assistant" if is_sampled else "others", "content": tokenizer.decode(response[start:end])}
            for is_sampled, start, end in parts
        ]
    return {
        "id": columns["trajectory_id"],
        "agent_name": columns.get("agent_name"),
        "agent": columns["agent"],
        "status": columns["trajectory_status"],
        "message": columns["trajectory_message"],
        "num_turns": int(columns["__num_turns__"]),
        "conversation": _bounded(conversation),
        "seconds": columns["agent_loop_metrics"],
        "turn_scores": [float(scores[row, start:end].sum()) for is_sampled, start, end in parts if is_sampled],
        **{name: columns[name] for name in FURTHER if columns.get(name) is not None},
        "prompt_ids": prompt,
        "response_ids": response,
        "response_mask": [[is_sampled, length] for is_sampled, length in runs],
    }


def _has_value(value: object) -> bool:
    return value is not None and not (isinstance(value, Mapping) and not value)


def _bounded(value: Any) -> Any:
    """A copy of nested values with long texts cut, as a tool of a loop of one's own may return any amount."""
    if hasattr(value, "tolist"):  # of numpy
        value = value.tolist()
    if isinstance(value, Mapping):
        return {key: _bounded(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_bounded(item) for item in value]
    if isinstance(value, str) and len(value) > LONGEST_TEXT:
        return f"{value[:LONGEST_TEXT]} [... {len(value) - LONGEST_TEXT:,} more characters]"
    return value


def _write(path: Path, data: bytes, append: bool) -> None:
    before = path.stat().st_size if append and path.exists() else 0
    with path.open("ab" if append else "wb", buffering=0) as file:
        try:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
        except OSError:
            os.truncate(path, before)
            raise
