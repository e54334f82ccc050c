"""Tiny vision-language models with random weights, their processors, and pictures, made on the spot.

    path = tiny_vision_model_dir(tmp_path / "model", family="qwen2_5_vl")      # config, weights, tokenizer, processor
    model = AutoModelForImageTextToText.from_pretrained(path)
    processor = hf_processor(path)

Patches have 4 x 4 pixels, unless told otherwise, and 2 x 2 of them are a token, so a picture of 16 x 24 pixels has six.
"""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from PIL import Image, ImageDraw
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import PreTrainedModel, PreTrainedTokenizerFast

from verl.testing.models import EOS, PAD, tiny_tokenizer
from verl.utils.image_reward_models import sequence_classifier
from verl.vision.families import FAMILIES

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{% elif m['role'] == 'user' %}<user>{% else %}{{ m['role'] }}: "
    "{% endif %}"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for p in m['content'] %}"
    "{% if p['type'] in ('image', 'video') %}<|vision_start|><|{{ p['type'] }}_pad|><|vision_end|>"
    "{% else %}{{ p['text'] }}{% endif %}"
    "{% endfor %}{% endif %}"
    "{% if m['role'] == 'assistant' %}<eos>{% elif m['role'] != 'user' %}\n{% endif %}"
    "{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
COLORS = {
    "red": (220, 20, 20),
    "green": (20, 180, 20),
    "blue": (30, 30, 220),
    "white": (245, 245, 245),
}
SHAPES = ("circle", "square")
_CLASSES = {"qwen2_vl": "Qwen2VL", "qwen2_5_vl": "Qwen2_5_VL", "qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}
DENSE_FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
"""Those of ``verl.vision.families.FAMILIES`` without experts; ``qwen3_vl_moe`` treats images as ``qwen3_vl`` does."""


def tiny_vision_tokenizer() -> PreTrainedTokenizerFast:
    """The ``char`` tokenizer of :func:`tiny_tokenizer` with the tokens of images and videos: 108 tokens."""
    core = tiny_tokenizer("char").backend_tokenizer
    core.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in VISION_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token=PAD, eos_token=EOS, chat_template=CHAT_TEMPLATE, padding_side="left"
    )


def tiny_vision_model(
    family: str = "qwen2_5_vl", seed: int = 0, hidden: int = 64, patch: int = 4, **overrides: Any
) -> PreTrainedModel:
    """A vision-language model in fp32: two layers of width ``hidden``, a tower of two blocks of width 32.

    Args:
        family: one of ``verl.vision.families.FAMILIES``.
        seed: of the random weights.
        hidden: width of the language model.
        patch: pixels of a side of a patch.
        overrides: fields of the config of the language model.
    """
    tokenizer = tiny_vision_tokenizer()
    ids = {f"{name}_token_id": tokenizer.convert_tokens_to_ids(token) for name, token in zip(
        ("vision_start", "vision_end", "image", "video"), VISION_TOKENS, strict=True
    )}  # fmt: skip
    vision: dict[str, Any] = {"depth": 2, "num_heads": 2, "patch_size": patch, "temporal_patch_size": 2}
    vision |= {"spatial_merge_size": 2, "hidden_size": 32, "intermediate_size": 48, "out_hidden_size": hidden}
    if family == "qwen2_vl":
        vision |= {"embed_dim": 32, "hidden_size": hidden, "mlp_ratio": 2, "in_chans": 3}
    elif family == "qwen2_5_vl":
        vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    else:
        vision |= {"num_position_embeddings": 64, "deepstack_visual_indexes": [0]}
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer),
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 4096,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]},
    }
    if family == "qwen3_vl_moe":
        # Of other sizes than transposed ones.
        text |= {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "norm_topk_prob": True}
    if family.startswith("qwen3"):
        text |= {"head_dim": 16}
        text["rope_parameters"]["mrope_interleaved"] = True
    config = getattr(transformers, f"{_CLASSES[family]}Config")(
        text_config=text | overrides, vision_config=vision, tie_word_embeddings=False, dtype="float32", **ids
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{_CLASSES[family]}ForConditionalGeneration")(config)
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                torch.nn.init.normal_(parameter, std=0.1)
            elif ".visual." in name and parameter.dim() > 1:  # larger than at birth, so that pictures matter
                torch.nn.init.normal_(parameter, std=0.2)
    return model.float().eval()


def tiny_vision_model_dir(path: str | Path, family: str = "qwen2_5_vl", side: int = 2, **arguments: Any) -> str:
    """Save a :func:`tiny_vision_model`, its tokenizer and its image processor to ``path``; returns the path.

    The processor enlarges pictures to at least the area of ``side`` x ``side`` patches.
    """
    return _saved(tiny_vision_model(family, **arguments), Path(path), family, side)


def tiny_image_reward_model_dir(path: str | Path, family: str = "qwen2_5_vl", seed: int = 1) -> str:
    """Save a reward model with random weights for a :func:`tiny_vision_model`, with its processor; returns the path."""
    source = tiny_vision_model(family, seed)
    source.config.num_labels = 1
    model = sequence_classifier(family)(source.config)
    model.model = source.base_model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        torch.nn.init.normal_(model.get_parameter("score.weight"), std=0.3)
    return _saved(model.float().eval(), Path(path), family)


def _saved(model: PreTrainedModel, folder: Path, family: str, side: int = 2) -> str:
    """Save a model with its tokenizer and image processor."""
    patch = model.config.vision_config.patch_size
    model.save_pretrained(folder)
    if family == "qwen3_vl_moe":  # the published folders have the matrices of experts transposed
        weights = load_file(file := folder / "model.safetensors")
        turned = {name: w.transpose(1, 2).contiguous() if ".experts." in name else w for name, w in weights.items()}
        save_file(turned, file, metadata={"format": "pt"})
    tiny_vision_tokenizer().save_pretrained(folder)
    settings: dict[str, Any] = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": FAMILIES[family],
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": (side * patch) ** 2,
        "max_pixels": (16 * patch) ** 2,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))
    # Pixels of a frame; for Qwen3-VL of all frames together.
    longest = (4 if family.startswith("qwen3") else 1) * settings["max_pixels"]
    size = {"shortest_edge": settings["min_pixels"], "longest_edge": longest}
    of_videos = {key: value for key, value in settings.items() if not key.startswith(("image_processor", "m"))}
    of_videos |= {
        "video_processor_type": f"{'Qwen3VL' if family.startswith('qwen3') else 'Qwen2VL'}VideoProcessor",
        "size": size,
    }
    (folder / "video_preprocessor_config.json").write_text(json.dumps(of_videos))
    return str(folder)


def picture(color: str, shape: str = "square", size: tuple[int, int] = (16, 16)) -> Image.Image:
    """A coloured shape on black, ``size`` is width and height."""
    image = Image.new("RGB", size, (0, 0, 0))
    draw = ImageDraw.Draw(image)
    box = (2, 2, size[0] - 3, size[1] - 3)
    (draw.ellipse if shape == "circle" else draw.rectangle)(box, fill=COLORS[color])
    return image


def png(image: Image.Image) -> bytes:
    """The bytes of a PNG file of an image."""
    buffer = io.BytesIO()
    image.save(buffer, format="PNG")
    return buffer.getvalue()


def picture_rows(count: int, text_every: int = 0) -> list[dict[str, Any]]:
    """Rows that ask for the colour of a shape, with pictures of several sizes.

    Args:
        count: number of rows.
        text_every: make every n-th row a row without pictures; 0 makes none.
    """
    rows = []
    sizes = ((16, 16), (24, 16), (16, 32))
    for i in range(count):
        color, shape = list(COLORS)[i % len(COLORS)], SHAPES[i // len(COLORS) % len(SHAPES)]
        is_text = bool(text_every) and i % text_every == text_every - 1
        image = {"bytes": png(picture(color, shape, sizes[i % len(sizes)])), "path": None}
        rows.append(
            {
                "data_source": "pictures",
                "prompt": [{"role": "user", "content": f"say {color}" if is_text else "<image>color?"}],
                "images": [] if is_text else [image],
                "ability": "vision",
                "reward_model": {"style": "rule", "ground_truth": color},
                "extra_info": {"split": "train", "index": i},
            }
        )
    return rows


def film(colors: Sequence[str], size: tuple[int, int] = (16, 16)) -> list[Image.Image]:
    """Frames that show a square in each of the colours in turn."""
    return [picture(color, size=size) for color in colors]


def film_rows(count: int) -> list[dict[str, Any]]:
    """Rows in turn with a film, with text, with a picture, and with both, which ask for the first colour."""
    rows, names = picture_rows(count), list(COLORS)
    for i, row in enumerate(rows):
        kind, color = i % 4, names[i % len(names)]
        frames = film([color, *names[: 2 + i // 4 % 2]], ((16, 16), (24, 16))[i % 2])
        video = {"video": [{"bytes": png(frame)} for frame in frames], "fps": 8.0}
        row["videos"] = [video] if kind in (0, 3) else []
        row["images"] = row["images"] if kind in (2, 3) else []
        text = ("<video>first color?", f"say {color}", "<image>color?", "see <image> and <video>color?")[kind]
        row["prompt"] = [{"role": "user", "content": text}]
    return rows


def write_parquet(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write rows to a parquet file; returns the path."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.Table.from_pylist(rows), path)
    return str(path)


def heads_of_32(family: str) -> dict[str, Any]:
    """Arguments of :func:`tiny_vision_model` for heads of 32 numbers, the fewest that vLLM computes on a CPU."""
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 6, 6]}
    if family.startswith("qwen3"):
        rope["mrope_interleaved"] = True
        experts = {"moe_intermediate_size": 32} if family == "qwen3_vl_moe" else {}
        return experts | {"hidden": 128, "head_dim": 32, "rope_parameters": rope}
    return {"hidden": 128, "rope_parameters": rope}
