"""Privileged prompts of self-distillation: what the policy reads as its own teacher, and not when it answers.

    policy    [system, ..., user: question]                                   ► response
    teacher   [system, ..., user: template(question, answer, feedback, ...)]    the same response, scored

A template is Jinja text. It renders the last user message of the teacher's prompt from

    prompt, messages               text of the last user message of the row, and all its messages
    response, score                text and score of the row's response
    best_response, best_score      of the other responses to the prompt the first with the highest score, none if that
                                   is below ``success_score``
    feedback                       the value of that name in what the reward function returned, none if it has none

and every column of the row: ``data_source``, ``extra_info``, ``reward_model``, further values of the reward function.
A row for which it renders nothing but white space is not learnt from; one for which it renders ``prompt`` unchanged is
read by the teacher under the very tokens of the policy's prompt.
"""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from jinja2 import StrictUndefined
from jinja2.exceptions import TemplateError, TemplateSyntaxError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from verl.datasets.chat import Message, encode, render_prompt, truncate
from verl.datasets.row_conversation import row_template_kwargs
from verl.errors import ConfigError, DataError
from verl.experience.sequences import Trajectories
from verl.protocol import DataProto, compute_response_mask
from verl.schema import require
from verl.utils.metric import Metrics

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
        ConfigError: the template cannot be read, or the model takes images.
    """

    def __init__(
        self,
        config: SelfDistillationConfig,
        data: DataConfig,
        tokenizer: PreTrainedTokenizerBase,
        processor: ProcessorMixin | None = None,
    ) -> None:
        if processor is not None:
            raise ConfigError(
                f"{KEY}.enabled=true: prompts with privileged context are text, and this model takes images."
            )
        self._config, self._data, self._tokenizer = config, data, tokenizer
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
        """
        require(batch, ("raw_prompt", "uid", "token_level_scores", "response_mask"), "self-distillation")
        if Trajectories.of(batch).are_split:
            raise ConfigError(
                f"{KEY}.enabled=true: the sequences of a trajectory have prompts of their own, into which no context "
                "is written. Use an agent loop whose trajectories are one sequence."
            )
        own_prompts = _unpadded(batch.batch["prompts"], batch.batch["attention_mask"])
        rows = [self._prompt(row, own) for row, own in zip(self._variables(batch), own_prompts, strict=True)]
        is_learnt = torch.tensor([prompt is not None for prompt in rows])
        prompts = [own if prompt is None else prompt for prompt, own in zip(rows, own_prompts, strict=True)]
        lengths = [len(prompt) for prompt in prompts]
        longest, pad = max(lengths), self._tokenizer.pad_token_id
        mask = batch.batch["response_mask"]
        made = {
            "teacher_prompts": torch.tensor([[pad] * (longest - len(ids)) + ids for ids in prompts]),
            "teacher_prompts_mask": torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]),
            "distillation_mask": mask * is_learnt.to(mask).unsqueeze(-1),
        }
        limit = self._config.teacher_prompt_length
        return DataProto.from_dict(tensors=made), {
            "distillation/rows_without_context": 1 - is_learnt.float().mean().item(),
            "distillation/teacher_prompt_length/mean": sum(lengths) / len(lengths),
            "distillation/teacher_prompt_length/max": longest,
            "distillation/teacher_prompt_length/clip_ratio": lengths.count(limit) / len(lengths),
        }

    def _variables(self, batch: DataProto) -> list[dict[str, Any]]:
        """What a template may read of each row."""
        present = compute_response_mask(batch).bool()
        ids = [row[keep].tolist() for row, keep in zip(batch.batch["responses"], present, strict=True)]
        texts = self._tokenizer.batch_decode(ids, skip_special_tokens=True)
        scores = batch.batch["token_level_scores"].sum(-1, dtype=torch.float64).tolist()
        groups: dict[object, list[int]] = defaultdict(list)
        for row, uid in enumerate(batch.non_tensor_batch["uid"].tolist()):
            groups[uid].append(row)
        variables: list[dict[str, Any]] = [{}] * len(batch)
        shown = {name: values for name, values in batch.non_tensor_batch.items() if name not in NOT_SHOWN}
        for members in groups.values():
            for row in members:
                best = max((other for other in members if other != row), key=scores.__getitem__, default=None)
                if best is not None and scores[best] < self._config.success_score:
                    best = None
                variables[row] = {
                    "feedback": None,
                    **{name: values[row] for name, values in shown.items()},
                    "messages": list(batch.non_tensor_batch["raw_prompt"][row]),
                    "response": texts[row],
                    "score": scores[row],
                    "best_response": None if best is None else texts[best],
                    "best_score": None if best is None else scores[best],
                }
        return variables

    def _prompt(self, variables: dict[str, Any], own: list[int]) -> list[int] | None:
        """Tokens of the teacher's prompt for a row whose prompt has the tokens ``own``; None to leave the row out."""
        messages: list[Message] = variables["messages"]
        where = f"the row with index {variables.get('index')} of data source {variables.get('data_source')}"
        last = max((n for n, message in enumerate(messages) if message["role"] == "user"), default=None)
        if last is None or not isinstance(messages[last]["content"], str):
            raise DataError(f"{where} has no text of a user, which {KEY}.template would replace.")
        question = messages[last]["content"]
        try:
            text = self._template.render(variables, prompt=question)
        except (TemplateError, TypeError, AttributeError, ValueError, ArithmeticError, LookupError) as error:
            raise DataError(
                f"{where}: {KEY}.template fails: {type(error).__name__}: {error}. It may read prompt, "
                f"{', '.join(sorted(variables))}."
            ) from error
        if not text.strip():
            return None
        if text == question:
            return own
        data = self._data
        kwargs = dict(data.apply_chat_template_kwargs or {})
        kwargs |= row_template_kwargs(variables, data.tools_key, data.enable_thinking_key, self._tokenizer, where)

        def tokens(content: str) -> list[int]:
            written = [*messages[:last], {**messages[last], "content": content}, *messages[last + 1 :]]
            return encode(render_prompt(written, self._tokenizer, where, **kwargs), self._tokenizer)

        plain = tokens(question)
        if truncate(plain, data.max_prompt_length, data.truncation, where, "data.max_prompt_length") != own:
            raise ConfigError(
                f"{where}: the policy's prompt is not its messages in the chat template, so that the teacher's would "
                f"differ by more than {KEY}.template. Use RLHFDataset and an agent that leaves the prompt as it is."
            )
        ids, limit, how = tokens(text), self._config.teacher_prompt_length, self._config.teacher_prompt_truncation
        if len(ids) > limit and how == "error":
            raise DataError(
                f"{where}: the teacher's prompt has {len(ids)} tokens, more than {KEY}.teacher_prompt_length={limit}. "
                f"Raise it, shorten what {KEY}.template shows, or set {KEY}.teacher_prompt_truncation=left, right or "
                "middle."
            )
        return truncate(ids, limit, how, where, f"{KEY}.teacher_prompt_length")


def _unpadded(prompts: torch.Tensor, attention_mask: torch.Tensor) -> list[list[int]]:
    keep = attention_mask[:, : prompts.shape[1]].bool()
    return [ids[mask].tolist() for ids, mask in zip(prompts, keep, strict=True)]
