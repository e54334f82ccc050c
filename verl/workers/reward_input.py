"""Input of a reward model: the policy's tokens, or the conversation in the reward model's own tokens and template."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from verl.errors import ConfigError
from verl.protocol import DataProto
from verl.schema import require
from verl.utils.dataset.chat import require_chat_template
from verl.utils.tokenizer import hf_tokenizer
from verl.utils.torch_functional import pad_2d_list_to_length

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.config import RewardModelModelConfig


@dataclass(frozen=True)
class RewardInput:
    """Converts responses to the reward model's input.

    Args:
        policy_tokenizer: tokenizer of the batch; None if the reward model has the same tokens and template.
        own_tokenizer: tokenizer of the reward model; None in the same case.
        max_length: number of last tokens that the reward model reads; None is all.
    """

    policy_tokenizer: PreTrainedTokenizerBase | None = None
    own_tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None

    @classmethod
    def of(cls, model: RewardModelModelConfig, max_length: int | None = None) -> RewardInput:
        """Build from ``reward_model.model``; only a different ``input_tokenizer`` makes translation necessary.

        Raises:
            ConfigError: a tokenizer cannot be read, or the reward model's has no chat template.
        """
        if model.input_tokenizer is None or model.input_tokenizer == model.path:
            return cls(max_length=max_length)
        policy = hf_tokenizer(model.input_tokenizer, trust_remote_code=model.trust_remote_code)
        try:
            own = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        except ConfigError as error:
            raise ConfigError(
                f"whether the reward model reads the policy's tokens cannot be told: {error} If it does, set "
                "reward_model.model.input_tokenizer=null."
            ) from error
        if own.get_vocab() == policy.get_vocab() and own.chat_template == policy.chat_template:
            return cls(max_length=max_length)
        require_chat_template(own)
        return cls(policy, own, max_length)

    def read(self, batch: DataProto) -> DataProto:
        """Return the columns that the engine reads; ``response_mask`` is 1 only on the last token of each row.

        Raises:
            SchemaError: the batch lacks ``raw_prompt``, which translation needs.
        """
        if self.own_tokenizer is None:
            ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
        else:
            rows = self._translate(batch)
            ids = pad_2d_list_to_length(rows, cast(int, self.own_tokenizer.pad_token_id or 0))
            lengths = torch.tensor([len(row) for row in rows])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        from_end = mask.flip(-1).cumsum(-1).flip(-1)  # (bsz, length): tokens from here to the end
        if self.max_length is not None:
            mask = mask * (from_end <= self.max_length)
        is_last = mask * (from_end == 1)
        columns = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids,
            "response_mask": is_last,
        }
        return DataProto.from_dict(tensors=columns)

    def _translate(self, batch: DataProto) -> list[list[int]]:
        """Token ids of each conversation, with its response, in the reward model's chat template."""
        assert self.policy_tokenizer is not None
        assert self.own_tokenizer is not None
        require(batch, ("raw_prompt",), "a reward model with another tokenizer (set data.return_raw_chat=true);")
        rows = []
        for ids, length, messages in zip(
            batch.batch["responses"].tolist(),
            _lengths(batch).tolist(),
            batch.non_tensor_batch["raw_prompt"],
            strict=True,
        ):
            response = ids[:length]
            while response and response[-1] in self.policy_tokenizer.all_special_ids:
                response = response[:-1]  # the template adds its own end tokens
            text = self.policy_tokenizer.decode(response)
            chat: list[dict[str, Any]] = [*messages, {"role": "assistant", "content": text}]
            rendered = cast(str, self.own_tokenizer.apply_chat_template(chat, tokenize=False))
            # The score is read at the end token of the turn; some templates put a line break behind it.
            rows.append(self.own_tokenizer(rendered.rstrip(), add_special_tokens=False)["input_ids"])
        return rows

    def place(self, scores: Tensor, batch: DataProto) -> Tensor:
        """Put (bsz,) scores on the last response token: (bsz, response_length). An empty response gets no score."""
        lengths = _lengths(batch)
        columns = torch.arange(batch.batch["responses"].shape[1])
        return scores.unsqueeze(-1) * (columns == (lengths - 1).unsqueeze(-1))


def _lengths(batch: DataProto) -> Tensor:
    """(bsz,) number of tokens of each response, including those of tools."""
    response_length = batch.batch["responses"].shape[1]
    return batch.batch["attention_mask"][:, -response_length:].sum(-1)
