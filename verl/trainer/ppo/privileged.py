"""Privileged prompts of self-distillation: what the policy reads as its own teacher, and not when it answers.

    policy    [system, ..., user: question]                                   ► response
    teacher   [system, ..., user: template(question, answer, feedback, ...)]    the same response, scored

A template is Jinja text. It renders the last user message of the teacher's prompt from

    prompt, messages               text of the last user message of the row, and all its messages
    response, score                text and score of the response, of a trajectory that of its scored sequence
    best_response, best_score      of the other responses to the prompt the first with the highest score, none if that
                                   is below ``success_score``
    feedback                       the value of that name in what the reward function returned, none if it has none

and every column of the row: ``data_source``, ``extra_info``, ``reward_model``, further values of the reward function.
A row for which it renders nothing but white space is not learnt from; one for which it renders ``prompt`` unchanged is
read by the teacher under the very tokens of the policy's prompt.

Images stay in their places: the text of a message that has some stands unchanged somewhere in what is rendered. Of a
trajectory of several sequences those that begin with the row's prompt have the context in that place, and what follows
stays, such as earlier turns; the others, of sub-agents or of a rewritten context, are not learnt from.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import StrictUndefined
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl.datasets.chat import Message, encode, render_prompt, truncate
from verl.datasets.row_conversation import row_template_kwargs
from verl.errors import ConfigError, DataError
from verl.experience.sequences import IMAGES, Trajectories, trajectory_scores
from verl.protocol import DataProto, compute_response_mask
from verl.schema import require
from verl.utils.metric import Metrics
from verl.vision.families import IMAGE_INPUTS, TEXT_PLACES
from verl.vision.messages import PLACEHOLDERS, has_image_parts, kind_of
from verl.vision.prompts import ImagePrompts

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.config import DataConfig, SelfDistillationConfig

KEY = "distillation.self_distillation"
TEMPLATES = {
    "reference": """\
{% set reference = extra_info.get('solution') or extra_info.get('answer') or reward_model.ground_truth -%}
{{ prompt }}

Here is a correct solution:
{{ reference }}

Understand it, then solve the task in your own words.""",
    "demonstration": """\
{% if extra_info.get('demonstration') %}{{ prompt }}

This is an example of a response to the task:
{{ extra_info.demonstration }}

Now answer with a response of your own.{% endif %}""",
    "attempts": """\
{% if best_response or feedback %}{{ prompt }}
{% if best_response %}
A correct solution of an earlier attempt:
{{ best_response }}
{% endif %}{% if feedback %}
Feedback on an attempt that failed:
{{ feedback }}
{% endif %}
Solve the task.{% endif %}""",
}
"""Built-in templates: the reference solution; a demonstration; the best attempt of the group and the feedback."""
NOT_SHOWN = ("raw_prompt", "raw_prompt_ids", "full_prompts", "multi_modal_inputs")
"""Columns that a template does not get: they are the prompt in other forms."""


class PrivilegedPrompts:
    """Writes the prompts under which the policy teaches itself.

    Args:
        config: ``distillation.self_distillation``.
        data: how the policy's prompts are rendered and cut.
        tokenizer: the policy's.
        processor: of a model with images.

    Raises:
        ConfigError: the template cannot be read.
    """

    def __init__(
        self,
        config: SelfDistillationConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None = None,
    ) -> None:
        self._config, self._data, self._tokenizer = config, data, tokenizer
        self._images = ImagePrompts.from_processor(processor)
        text = TEMPLATES.get(config.template or "", config.template)
        if config.template_path is not None:
            text = Path(config.template_path).expanduser().read_text()
        environment = ImmutableSandboxedEnvironment(undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
        try:
            self._template = environment.from_string(text or "")
        except TemplateSyntaxError as error:
            raise ConfigError(f"{KEY}.template, line {error.lineno}: {error.message}.") from error

    def columns(self, batch: DataProto) -> tuple[DataProto, Metrics]:
        """Write the prompt of each row.

        Args:
            batch: scored responses with ``raw_prompt`` and ``uid``.

        Returns:
            ``teacher_prompts`` and ``teacher_prompts_mask``, (bsz, longest prompt), padded on the left, and
            ``distillation_mask``, (bsz, response_length): ``response_mask`` without the rows that are not learnt from.
            Metrics: the share of those rows, and the lengths of the prompts with the share at the limit.

        Raises:
            DataError: the template fails for a row, or the prompt is too long.
            ConfigError: no row has the prompt of the data.
        """
        require(batch, ("raw_prompt", "uid", "token_level_scores", "response_mask"), "self-distillation")
        trajectories = Trajectories.from_batch(batch)
        variables, images = self._variables(batch, trajectories), batch.non_tensor_batch.get(IMAGES)
        own_prompts = _unpadded(batch.batch["prompts"], batch.batch["attention_mask"])
        rows: list[list[int] | None] = []
        differing: list[str] = []
        for row, row_prompt in enumerate(own_prompts):
            row_variables = variables[trajectories.indices[row]]
            where = f"the row with index {row_variables.get('index')} of data source {row_variables.get('data_source')}"
            context = self._context(row_variables, where)
            ids = (
                None
                if context is None
                else self._prompt(context, row_prompt, {} if images is None else images[row], where)
            )
            rows.append(ids)
            if context is not None and ids is None:
                differing.append(where)
        if differing and not any(rows):
            raise ConfigError(
                f"{differing[0]}: the policy's prompt does not begin with its messages in the chat template, so that "
                f"the teacher's would differ by more than {KEY}.template; this is so for all rows of the step. Use "
                "RLHFDataset and an agent that leaves the prompt as it is."
            )
        is_learnt = torch.tensor([prompt is not None for prompt in rows])
        prompts = [
            row_prompt if prompt is None else prompt for prompt, row_prompt in zip(rows, own_prompts, strict=True)
        ]
        lengths = [len(prompt) for prompt in prompts]
        longest, pad = max(lengths), self._tokenizer.pad_token_id
        mask = batch.batch["response_mask"]
        tensors = {
            "teacher_prompts": torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts]),
            "teacher_prompts_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
            "distillation_mask": mask * is_learnt.to(mask).unsqueeze(-1),
        }
        limit = self._config.teacher_prompt_length
        return DataProto.from_dict(tensors=tensors), {
            "distillation/rows_without_context": 1 - is_learnt.float().mean().item(),
            "distillation/teacher_prompt_length/mean": sum(lengths) / len(lengths),
            "distillation/teacher_prompt_length/max": longest,
            "distillation/teacher_prompt_length/clip_ratio": lengths.count(limit) / len(lengths),
        }

    def _variables(self, batch: DataProto, trajectories: Trajectories) -> list[dict[str, Any]]:
        """Return the variables that a template can use, for each trajectory."""
        scores = trajectory_scores(batch, batch.batch["token_level_scores"]).tolist()
        batch = batch.select_idxs(trajectories.scored_rows)
        present = compute_response_mask(batch).bool()
        ids = [row[keep].tolist() for row, keep in zip(batch.batch["responses"], present, strict=True)]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        groups: dict[object, list[int]] = defaultdict(list)
        for trajectory, uid in enumerate(batch.non_tensor_batch["uid"].tolist()):
            groups[uid].append(trajectory)
        variables: list[dict[str, Any]] = [{}] * len(batch)
        shown = {name: values for name, values in batch.non_tensor_batch.items() if name not in NOT_SHOWN}
        for members in groups.values():
            for member in members:
                best = max((other for other in members if other != member), key=scores.__getitem__, default=None)
                if best is not None and scores[best] < self._config.success_score:
                    best = None
                variables[member] = {
                    "feedback": None,
                    **{name: values[member] for name, values in shown.items()},
                    "messages": list(batch.non_tensor_batch["raw_prompt"][member]),
                    "response": texts[member],
                    "score": scores[member],
                    "best_response": None if best is None else texts[best],
                    "best_score": None if best is None else scores[best],
                }
        return variables

    def _context(self, variables: dict[str, Any], where: str) -> _Context | None:
        """Render the template; None to leave the row out."""
        messages: list[Message] = variables["messages"]
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
        content = None if last is None else messages[last]["content"]
        if last is None or not isinstance(content, str | list):
            raise DataError(f"{where} has no text of a user, which {KEY}.template would replace.")
        question = content if isinstance(content, str) else "".join(map(_text_of, content))
        if not has_image_parts(content):
            content = question
        try:
            text = self._template.render(variables, prompt=question)
        except (TemplateError, TypeError, AttributeError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(
                f"{where}: {KEY}.template fails: {type(error).__name__}: {error}. It may read prompt, "
                f"{', '.join(sorted(variables))}."
            ) from error
        if not text.strip():
            return None
        if isinstance(content, list):
            before, there, after = text.partition(question)
            if not there:
                raise DataError(
                    f"{where}: the last message of the user has images, and {KEY}.template does not show its text "
                    "unchanged. Write {{ prompt }} where they belong."
                )
            content = [{"type": "text", "text": before}, *content, {"type": "text", "text": after}]
            content = [part for part in content if part.get("text") != ""]
        else:
            content = text
        data = self._data
        kwargs = dict(data.apply_chat_template_kwargs or {})
        kwargs |= row_template_kwargs(variables, data.tools_key, data.enable_thinking_key, self._tokenizer, where)
        changed = [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]
        return _Context(messages, None if text == question else changed, kwargs)

    def _prompt(
        self, context: _Context, row_prompt: list[int], images: Mapping[str, torch.Tensor], where: str
    ) -> list[int] | None:
        """Tokens of the teacher's prompt for a row whose prompt is ``row_prompt``; None if that is another prompt."""
        data, maker, tokenizer = self._data, self._images, self._tokenizer
        grids = images.get(IMAGE_INPUTS[1], ())

        def tokens(messages: list[Message], opens_turn: bool = True) -> list[int]:
            text = render_prompt(messages, tokenizer, where, add_generation_prompt=opens_turn, **context.template)
            ids = encode(text, tokenizer)
            if maker is None:
                return ids
            at_places = sum(token in maker.config.token_ids for token in ids)  # further images are in the response
            counts = [maker.config.tokens_of(grid) for grid in grids[:at_places]]
            times = maker.repeats(ids, counts, where)
            return [token for token, count in zip(ids, times, strict=True) for _ in range(count)]

        if context.changed is None:
            return row_prompt
        plain = tokens(context.messages)
        if truncate(plain, data.max_prompt_length, data.truncation, where, "data.max_prompt_length") == row_prompt:
            ids = tokens(context.changed)
        else:  # a later sequence of a trajectory: earlier turns follow
            plain = tokens(context.messages, opens_turn=False)
            if row_prompt[: len(plain)] != plain:
                return None
            ids = [*tokens(context.changed, opens_turn=False), *row_prompt[len(plain) :]]
        limit, how = self._config.teacher_prompt_length, self._config.teacher_prompt_truncation
        if len(ids) > limit and how == "error":
            raise DataError(
                f"{where}: the teacher's prompt has {len(ids)} tokens, more than {KEY}.teacher_prompt_length={limit}. "
                f"Raise it, shorten what {KEY}.template shows, or set {KEY}.teacher_prompt_truncation=left, right or "
                "middle."
            )
        cut = truncate(ids, limit, how, where, f"{KEY}.teacher_prompt_length")
        if maker is not None and sum(map(cut.count, maker.config.token_ids)) < sum(
            map(ids.count, maker.config.token_ids)
        ):
            raise DataError(
                f"{where}: the teacher's prompt has {len(ids)} tokens, and {KEY}.teacher_prompt_truncation={how} to "
                f"{KEY}.teacher_prompt_length={limit} would cut an image. Raise it, shorten what {KEY}.template shows, "
                "or cut on another side."
            )
        sampled_places = [place for place in images.get(TEXT_PLACES, ()) if place < len(row_prompt)]
        if (
            sampled_places and how != "left" and len(cut) < len(ids)
        ):  # what is behind a cut moves by another number of tokens
            raise DataError(
                f"{where}: the policy drew a token of an image in an earlier turn, whose place "
                f"{KEY}.teacher_prompt_truncation={how} would change. Set it to left, or raise "
                f"{KEY}.teacher_prompt_length={limit}."
            )
        return cut


@dataclass(frozen=True)
class _Context:
    """Messages of a row, with the context that the template rendered."""

    messages: list[Message]
    """Messages of the row, unchanged."""
    changed: list[Message] | None
    """Messages with the context in the last user message; None if the template rendered nothing new."""
    template: dict[str, Any]
    """Variables of the chat template."""


def _text_of(part: Message) -> str:
    kind = kind_of(part)
    return part.get("text", "") if kind is None else PLACEHOLDERS[kind]


def _unpadded(prompts: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    keep = attention_mask[:, : prompts.shape[1]].bool()
    return [ids[mask].tolist() for ids, mask in zip(prompts, keep, strict=True)]
