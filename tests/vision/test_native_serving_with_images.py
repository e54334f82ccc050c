"""The native engine answers requests with images as they come: its cache, conversations, and new weights."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import picture, tiny_vision_model, tiny_vision_model_dir
from tests.vision.one_family import ONE_FAMILY
from verl.errors import RolloutError
from verl.protocol.shared import SharedTensors
from verl.testing.rollout_conformance import Serving
from verl.utils import hf_processor, hf_tokenizer
from verl.workers.config import HFModelConfig, RolloutConfig
from verl.workers.rollout.base import RolloutOutput, get_rollout_class
from verl.workers.rollout.native.prefixes import PAGE
from verl.workers.rollout.request import RolloutRequest, SamplingParams

START, END, IMAGE = 104, 105, 106


class Case:
    """A tiny model, the pictures that it sees, and an engine with its weights."""

    def __init__(self, folder: Any, family: str, name: str = "native") -> None:
        path = tiny_vision_model_dir(folder / "model", family)
        self.model = AutoModelForImageTextToText.from_pretrained(path)
        self.processor: Any = hf_processor(path)
        config = RolloutConfig(
            name=name,
            prompt_length=160,
            response_length=8,
            dtype="float32",
            max_num_seqs=4,
            tensor_model_parallel_size=1,
        )
        self.engine: Any = get_rollout_class(name)(config, HFModelConfig(path=path), hf_tokenizer(path), "cpu")
        self.engine.load_weights(self.model.state_dict().items(), 0)

    def images(self, *pictures: Any) -> SharedTensors:
        found = self.processor.image_processor(images=list(pictures), return_tensors="pt")
        return SharedTensors({name: found[name] for name in ("pixel_values", "image_grid_thw")})

    def request(self, ids: list[int], *pictures: Any, seed: int = 0, text: tuple[int, ...] = ()) -> RolloutRequest:
        sampling = SamplingParams(max_tokens=6, seed=seed, ignore_eos=True)
        return RolloutRequest(ids, sampling, self.images(*pictures) if pictures else None, text)

    def check(self, asked: RolloutRequest, found: RolloutOutput) -> None:
        """The log-probs of a response are those of one pass over the whole text, by Transformers' own parts."""
        ids = torch.tensor([asked.prompt_ids + found.token_ids])
        is_image = ids == IMAGE
        is_image[:, list(asked.text_places)] = False
        is_image[:, len(asked.prompt_ids) :] = False
        logits = plain_logits(self.model, ids, is_image, asked.images)[len(asked.prompt_ids) - 1 : -1]
        expected = logits.log_softmax(-1).gather(1, torch.tensor(found.token_ids)[:, None]).squeeze(1)
        assert_close(torch.tensor(found.log_probs), expected, atol=2e-5, rtol=0)


@torch.no_grad()
def plain_logits(model: Any, ids: Tensor, is_image: Tensor, images: Any) -> Tensor:
    """Logits of a text, of whose tokens ``is_image`` stand for images; (tokens, vocab)."""
    grid = None if images is None else images["image_grid_thw"]
    positions, _ = model.model.get_rope_index(ids, is_image.int(), image_grid_thw=grid)
    if images is None or not bool(((ids == IMAGE) & ~is_image).any()):
        return model(input_ids=ids, position_ids=positions, **dict(images or {})).logits[0]
    # The model's own forward pass takes all tokens with the id of images for images.
    found = model.model.get_image_features(images["pixel_values"], grid, return_dict=True)
    embedded = model.get_input_embeddings()(ids)
    embedded[is_image] = _joined(found.pooler_output)
    deep = getattr(found, "deepstack_features", None)
    more = {} if deep is None else {"visual_pos_masks": is_image, "deepstack_visual_embeds": list(map(_joined, deep))}
    hidden = model.model.language_model(inputs_embeds=embedded, position_ids=positions, **more).last_hidden_state
    return model.lm_head(hidden)[0]


def _joined(parts: Any) -> Tensor:
    return parts if isinstance(parts, Tensor) else torch.cat(list(parts))


def prompt(before: int, tokens: int, after: int) -> list[int]:
    """A prompt with an image of so many tokens, which begins behind ``before`` tokens of text."""
    return [*range(10, 10 + before - 1), START, *[IMAGE] * tokens, END, *range(30, 29 + after)]


RED, BLUE = picture("red", size=(32, 48)), picture("blue", size=(32, 48))
TOKENS = 24  # 48 / 8 x 32 / 8


@pytest.mark.parametrize("family", ONE_FAMILY)
def test_the_same_tokens_with_other_pictures_share_no_keys_and_values(family, tmp_path):
    case = Case(tmp_path, family)
    # Pages of 16 tokens: the first ends before the image, in front of it, or in it.
    asked = [
        case.request(prompt(before, TOKENS, 8), shown, seed=seed)
        for before in (12, 16, 20, 33)
        for seed, shown in enumerate((RED, BLUE, RED))
    ]
    with Serving(case.engine) as serving:
        for number, one in enumerate(asked):  # one after the other, so that each finds what the last has left
            (found,) = serving.answered(serving.put([one], first=number))
            case.check(one, found)
        hits = case.engine._cache.hits
        together = [case.request(prompt(19, TOKENS, 8), shown, seed=9) for shown in (RED, BLUE, RED, BLUE)]
        found = serving.answered(serving.put(together, first=100))
    for one, output in zip(together, found, strict=True):
        case.check(one, output)
    assert found[0].token_ids == found[2].token_ids
    assert max(abs(a - b) for a, b in zip(found[0].log_probs, found[1].log_probs, strict=True)) > 1e-3
    # The third of each length finds all pages of the first but the last; the second only those before the image.
    lengths = [before + TOKENS + 8 for before in (12, 16, 20, 33)]
    whole, shared = sum((n - 1) // PAGE * PAGE for n in lengths), sum(n // PAGE * PAGE for n in (12, 16, 20, 33))
    # Different beginnings share whole pages of text, too: those of 20 and 33 with 16.
    assert hits >= whole + shared


@pytest.mark.parametrize("name", ["native", "hf"])
@pytest.mark.parametrize("family", ONE_FAMILY)
def test_a_conversation_with_pictures_in_later_turns_and_drawn_image_tokens(family, name, tmp_path):
    case = Case(tmp_path, family, name)
    ids, shown, text = prompt(5, TOKENS, 8), [RED], ()
    with Serving(case.engine) as serving:
        for turn in range(3):
            asked = case.request(ids, *shown, seed=turn, text=text)
            (found,) = serving.answered(serving.put([asked], first=turn))
            case.check(asked, found)
            # Interrupted after a token that has the id of images, and two more.
            left = asked.after([IMAGE, *found.token_ids[:2]])
            (rest,) = serving.answered(serving.put([left], first=30 + turn))
            case.check(replace(left, text_places=tuple(left.places_of_text)), rest)
            # The policy has drawn a token with the id of images at the end of its turn.
            ids = [*ids, *found.token_ids, IMAGE]
            text = (*text, *(at for at in range(len(asked.prompt_ids), len(ids)) if ids[at] == IMAGE))
            ids = [*ids, START, *[IMAGE] * 4, END, 40 + turn]
            shown.append(picture("green" if turn else "white", size=(16, 16)))
        (found,) = serving.answered(serving.put([wrong := case.request([20, 21, 22])], first=50))
        case.check(wrong, found)
        serving.put([case.request([*ids, IMAGE], *shown, text=text)], first=60)
        while 60 not in serving.answers:
            pass
    assert isinstance(serving.answers[60], RolloutError)
    assert "has 37 image tokens, and its images make 36" in str(serving.answers[60])
    if name == "native":
        assert case.engine._cache.hits > 60


def test_new_weights_of_the_vision_tower_are_seen(tmp_path):
    case = Case(tmp_path, "qwen3_vl")
    asked = case.request(prompt(20, TOKENS, 8), RED)
    with Serving(case.engine) as serving:
        (before,) = serving.answered(serving.put([asked]))
        other = tiny_vision_model("qwen3_vl", seed=1).state_dict()
        weights = {**case.model.state_dict(), **{name: w for name, w in other.items() if ".visual." in name}}
        case.model.load_state_dict(weights)
        case.engine.load_weights(weights.items(), 1)
        (after,) = serving.answered(serving.put([asked], first=1))
    case.check(asked, after)
    assert after.weight_version == 1
    assert max(abs(a - b) for a, b in zip(before.log_probs, after.log_probs, strict=True)) > 1e-3
