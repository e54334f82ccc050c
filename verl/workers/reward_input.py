"""Input of a reward model: the policy's tokens and images, or the conversation in its own tokens and template."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import numpy as np
import torch
from torch import Tensor
from transformers import PretrainedConfig

from verl.datasets.chat import require_chat_template
from verl.datasets.template_probes import TemplateForms
from verl.errors import ConfigError, SchemaError
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors
from verl.schema import require
from verl.utils.model import load_hf_config, require_on_hub, resolve_model_path
from verl.utils.model_facts import model_files
from verl.utils.tokenizer import hf_processor, hf_tokenizer
from verl.utils.torch_functional import pad_2d_list_to_length
from verl.vision.families import FAMILIES, IMAGE_INPUTS, TEXT_PLACES, VisionConfig
from verl.vision.positions import AXES, image_tokens
from verl.workers.engine.model.images import COLUMN, has_images
from verl.workers.policy_turns import policy_turns

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from verl.base.types import JsonObject
    from verl.config import RewardModelModelConfig

_PIXEL_SETTINGS = (
    "patch_size", "temporal_patch_size", "merge_size", "do_rescale", "rescale_factor", "do_normalize", "image_mean",
    "image_std",
)  # fmt: skip
"""Settings of an image processor on which the meaning of its pixels depends; limits of sizes are not among them."""


@dataclass(frozen=True)
class RewardInput:
    """Converts responses to the reward model's input.

    Args:
        policy_tokenizer: tokenizer of the batch; None if the reward model has the same tokens and template.
        own_tokenizer: tokenizer of the reward model; None in the same case.
        max_length: number of last tokens that the reward model reads; None is all.
        vision: of a reward model that sees the images of the batch; None for a model of text.
    """

    policy_tokenizer: PreTrainedTokenizerBase | None = None
    own_tokenizer: PreTrainedTokenizerBase | None = None
    max_length: int | None = None
    vision: VisionConfig | None = None

    @classmethod
    def from_config(cls, model: RewardModelModelConfig, max_length: int | None = None) -> RewardInput:
        """Build from ``reward_model.model``; only a different ``input_tokenizer`` makes translation necessary.

        Raises:
            ConfigError: a tokenizer cannot be read, or the reward model's has no chat template; or the model takes
                images, and its tokens, template or pixels are not the policy's.
        """
        vision = _vision_of(model)
        if model.input_tokenizer is None or model.input_tokenizer == model.path:
            return cls(max_length=max_length, vision=vision)
        policy = hf_tokenizer(model.input_tokenizer, trust_remote_code=model.trust_remote_code)
        try:
            tokenizer = hf_tokenizer(model.path, trust_remote_code=model.trust_remote_code)
        except ConfigError as error:
            raise ConfigError(
                f"it is unknown whether the reward model uses the policy's tokens: {error} If it does, set "
                "reward_model.model.input_tokenizer=null."
            ) from error
        if tokenizer.get_vocab() == policy.get_vocab() and tokenizer.chat_template == policy.chat_template:
            if vision is not None:
                _require_same_pixels(model, model.input_tokenizer)
            return cls(max_length=max_length, vision=vision)
        if vision is not None and hf_processor(model.input_tokenizer, trust_remote_code=model.trust_remote_code):
            what = "chat template" if tokenizer.get_vocab() == policy.get_vocab() else "vocabulary"
            raise ConfigError(
                f"reward_model.model.path={model.path}: its {what} is not that of the policy, {model.input_tokenizer}. "
                "A conversation with images is not rendered anew for a reward model, which would need other image "
                "tokens. Train one on the policy's tokens (python -m verl.trainer.rm_trainer model.path=<the policy>); "
                "or, if both have the same token ids and it was trained on the policy's template, set "
                "reward_model.model.input_tokenizer=null."
            )
        require_chat_template(tokenizer)
        return cls(policy, tokenizer, max_length)

    def read(self, batch: DataProto) -> DataProto:
        """Return the columns that the engine reads; ``response_mask`` is 1 only on the last token of each row.

        Raises:
            SchemaError: the batch lacks ``raw_prompt``, which translation needs; or a row with images is too long.
        """
        if self.own_tokenizer is None:
            ids, mask = batch.batch["input_ids"], batch.batch["attention_mask"]
        else:
            rows = self._translate(batch)
            ids = pad_2d_list_to_length(rows, cast(int, self.own_tokenizer.pad_token_id or 0))
            lengths = torch.tensor([len(row) for row in rows])
            mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        from_end = mask.flip(-1).cumsum(-1).flip(-1)  # (bsz, length): tokens from here to the end
        full_mask = mask
        if self.max_length is not None:
            mask = mask * (from_end <= self.max_length)
        columns = {
            "input_ids": ids,
            "attention_mask": mask,
            "position_ids": (mask.cumsum(-1) - 1).clamp(min=0),
            "responses": ids,
            "response_mask": mask * (from_end == 1),
        }
        if self.vision is None or not has_images(batch):
            return DataProto.from_dict(tensors=columns)
        self._require_uncut(batch, full_mask)
        with_images = torch.tensor([IMAGE_INPUTS[0] in row for row in batch.non_tensor_batch[COLUMN]])
        numbers = columns["position_ids"].unsqueeze(1).expand(-1, AXES, -1)  # positions of texts, also of cut ones
        columns["position_ids"] = torch.where(with_images[:, None, None], batch.batch["position_ids"], numbers)
        return DataProto.from_dict(tensors=columns, non_tensors={COLUMN: self._images(batch, self.vision)})

    def _require_uncut(self, batch: DataProto, mask: Tensor) -> None:
        lengths = mask.sum(-1).tolist()
        for i, row in enumerate(batch.non_tensor_batch[COLUMN]):
            if self.max_length is not None and lengths[i] > self.max_length and IMAGE_INPUTS[0] in row:
                raise SchemaError(
                    f"row {i} of the batch has images and {lengths[i]} tokens, more than reward_model.max_length="
                    f"{self.max_length}. A sequence with images is not cut: raise it, or set it to null."
                )

    def _images(self, batch: DataProto, vision: VisionConfig) -> np.ndarray:
        """Return the images of each row; tokens that the policy drew with the id of image tokens are marked as text."""
        # This needs the policy's response_mask: in the columns for the engine only the last token of a row has a 1.
        columns, rows = batch.batch, list(batch.non_tensor_batch[COLUMN])
        ids, mask = columns["input_ids"], columns["attention_mask"]
        is_image = image_tokens(ids, mask, columns["response_mask"], rows, vision)
        texts = vision.marked(ids) & mask.bool() & ~is_image
        images = np.empty(len(rows), dtype=object)
        for row_index, row in enumerate(rows):
            places = texts[row_index][mask[row_index].bool()].nonzero().flatten()
            images[row_index] = SharedTensors({**row, TEXT_PLACES: places}) if len(places) else row
        return images

    def _translate(self, batch: DataProto) -> list[list[int]]:
        """Tokenize each prompt and the policy's answer in the reward model's chat template."""
        assert self.own_tokenizer is not None
        require(batch, ("raw_prompt",), "a reward model with another tokenizer (set data.return_raw_chat=true);")
        rows = []
        for turns, messages in zip(policy_turns(batch), batch.non_tensor_batch["raw_prompt"], strict=True):
            text = "\n".join(map(self._turn_text, turns))
            chat: list[JsonObject] = [*messages, {"role": "assistant", "content": text}]
            rendered = cast(str, self.own_tokenizer.apply_chat_template(chat, tokenize=False))
            # The score is read at the end token of the turn; some templates put a line break behind it, or leave the
            # end to the next message.
            rendered = rendered.rstrip() + TemplateForms.from_tokenizer(self.own_tokenizer).next_token(chat[-1])
            rows.append(self.own_tokenizer(rendered, add_special_tokens=False)["input_ids"])
        return rows

    def _turn_text(self, turn: Tensor) -> str:
        """Decode a turn of the policy without the special tokens at its end, as the template adds its own."""
        assert self.policy_tokenizer is not None
        ids = turn.tolist()
        while ids and ids[-1] in self.policy_tokenizer.all_special_ids:
            ids.pop()
        return cast(str, self.policy_tokenizer.decode(ids))

    def place(self, scores: Tensor, batch: DataProto) -> Tensor:
        """Put (bsz,) scores on the last response token: (bsz, response_length). An empty response gets no score."""
        response_length = batch.batch["responses"].shape[1]
        lengths = batch.batch["attention_mask"][:, -response_length:].sum(-1)  # (bsz,), including tokens of tools
        return scores.unsqueeze(-1) * (torch.arange(response_length) == (lengths - 1).unsqueeze(-1))


def _vision_of(model: RewardModelModelConfig) -> VisionConfig | None:
    """Return the image settings of a reward model's config; None for a model of text."""
    path = resolve_model_path(model.path)
    if Path(path).is_dir():
        kind = model_files.model_type(Path(path))
    else:
        require_on_hub(path)
        kind = PretrainedConfig.get_config_dict(path)[0].get("model_type")
    # Of other kinds the config is not loaded: Transformers may learn them from model.external_lib only in the workers.
    if kind not in FAMILIES:
        return None
    return VisionConfig.from_config(load_hf_config(model.path, model.override_config, model.trust_remote_code))


def _require_same_pixels(model: RewardModelModelConfig, policy_path: str) -> None:
    """Raise ConfigError unless the image processor of the reward model makes the policy's pixels of an image."""
    reward_processor, policy_processor = (
        hf_processor(path, trust_remote_code=model.trust_remote_code) for path in (model.path, policy_path)
    )
    if policy_processor is None:  # a policy of text
        return
    if reward_processor is None:
        raise ConfigError(
            f"reward_model.model.path={model.path} has no preprocessor_config.json, so it is unknown whether the "
            "reward model sees images as the policy does. Put the files of its processor there; if it was trained "
            "on the policy's images, set reward_model.model.input_tokenizer=null."
        )
    for name in _PIXEL_SETTINGS:
        reward_value, policy_value = (
            getattr(processor.image_processor, name, None) for processor in (reward_processor, policy_processor)
        )
        if reward_value != policy_value:
            raise ConfigError(
                f"reward_model.model.path={model.path}: its image processor has {name}={reward_value}, but that "
                f"of the policy ({policy_path}), which computes the pixels, has {policy_value}. Use a reward model "
                "that was trained with the policy's image processor."
            )
