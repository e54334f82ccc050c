"""Single-turn supervised data: a prompt column and a response column, with the loss on the response."""

from __future__ import annotations

from collections.abc import Sequence

from verl.datasets.chat import Message
from verl.datasets.files import Row
from verl.datasets.loss_mask import SWITCHES
from verl.datasets.multiturn_sft_dataset import MultiTurnSFTDataset
from verl.datasets.prompt_images import ImagePrompt
from verl.errors import DataError


class SFTDataset(MultiTurnSFTDataset):
    """A user's prompt (``data.prompt_key``: text or messages) and the assistant's response (``data.response_key``).

    The loss is on the response alone; answers inside a prompt of several turns are context.

    For values nested in a column, ``data.prompt_dict_keys`` and ``data.response_dict_keys`` give the path:
    ``prompt_key=extra_info prompt_dict_keys=[question]``. Items are those of :class:`MultiTurnSFTDataset`.
    """

    def needed_columns(self) -> dict[str, str]:
        """The two columns; see :meth:`MultiTurnSFTDataset.needed_columns`."""
        return {self.settings.prompt_key or "": "prompt_key", self.settings.response_key or "": "response_key"}

    def conversation(self, row: Row, where: str) -> ImagePrompt:
        """Prompt and response as messages, with the images of the prompt."""
        config = self.settings
        prompt = _descend(row[config.prompt_key or ""], config.prompt_dict_keys, where, "prompt_dict_keys")
        response = _descend(row[config.response_key or ""], config.response_dict_keys, where, "response_dict_keys")
        if not isinstance(response, str):
            raise DataError(f"{where}: the response is {type(response).__name__} {response!r:.80}, not text.")
        question = self.images.prompt(prompt, row, where)
        answer: Message = {"role": "assistant", "content": response}
        return ImagePrompt([*_context(question.plain), answer], [*_context(question.messages), answer], question.images)


def _context(messages: Sequence[Message]) -> list[Message]:
    """Messages of a prompt; answers among them are not trained on."""
    return [
        {key: value for key, value in message.items() if key not in SWITCHES} | {"trainable": False}
        if message["role"] == "assistant"
        else message
        for message in messages
    ]


def _descend(value: object, keys: Sequence[str], where: str, setting: str) -> object:
    for key in keys:
        if not isinstance(value, dict) or key not in value:
            raise DataError(f"{where}: {setting} asks for '{key}' in {value!r:.120}, which has no such key.")
        value = value[key]
    return value
