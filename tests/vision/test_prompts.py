"""Rows with images become prompts: placeholders, tokens, positions, pixels, limits, and rows that cannot be used."""

from __future__ import annotations

import base64
import io
import logging

import numpy as np
import pytest
import torch
from PIL import ExifTags, Image
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import DENSE_FAMILIES, picture, picture_rows, png, tiny_vision_model_dir, write_parquet
from verl.datasets.rl_dataset import RLHFDataset, collate_fn
from verl.errors import DataError
from verl.plugins.endpoint.calls import CallRefusedError
from verl.plugins.endpoint.requests import checked_messages
from verl.protocol import DataProto
from verl.protocol.shared import SharedTensors, bytes_held
from verl.testing.models import tiny_model_dir
from verl.utils import hf_processor, hf_tokenizer
from verl.vision.data_urls import url_of
from verl.vision.families import VisionConfig
from verl.vision.images import process_image, read_image, smart_resize
from verl.vision.messages import with_image_parts, with_placeholders
from verl.vision.positions import mrope_positions, sequence_positions
from verl.vision.prompts import ImagePrompts

START, END, IMAGE = 104, 105, 106
QWEN = VisionConfig(image_token_id=IMAGE, video_token_id=107, merge_size=2, patch_values=96)


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp("model"))


def dataset(path, file, **config):
    return RLHFDataset(file, hf_tokenizer(path), {"max_prompt_length": 40} | config, hf_processor(path))


def test_positions_by_hand():
    # a b [2 x 3 tokens] c: the image starts at 2, and c follows its largest position, 2 + 2.
    ids = torch.tensor([5, 6, *[IMAGE] * 6, 7])
    found = mrope_positions(ids, torch.tensor([[1, 4, 6]]), QWEN)
    assert found.tolist() == [
        [0, 1, 2, 3, 4, 5, 6, 7, 8],
        [0, 1, 2, 2, 2, 2, 2, 2, 5],
        [0, 1, 2, 2, 2, 3, 3, 3, 5],
        [0, 1, 2, 3, 4, 2, 3, 4, 5],
    ]
    text = mrope_positions(torch.tensor([5, 6, 7]), None, QWEN)
    assert text.tolist() == [[0, 1, 2]] * 4
    with pytest.raises(DataError, match=r"6 image tokens, and its 1 images make 4"):
        mrope_positions(ids, torch.tensor([[1, 4, 4]]), QWEN)


def test_responses_go_on_from_the_largest_position():
    ids = torch.tensor([[0, 5, *[IMAGE] * 4, 7, 8, 0]])
    mask, drawn = torch.tensor([[0, 1, 1, 1, 1, 1, 1, 1, 0]]), torch.tensor([[1, 1, 0]])
    positions = sequence_positions(ids, mask, drawn, [{"image_grid_thw": torch.tensor([[1, 4, 4]])}], QWEN)
    assert positions[0].tolist() == [
        [0, 0, 1, 2, 3, 4, 5, 6, 6],
        [0, 0, 1, 1, 1, 1, 3, 4, 4],
        [0, 0, 1, 1, 2, 2, 3, 4, 4],
        [0, 0, 1, 2, 1, 2, 3, 4, 4],
    ]


@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_positions_and_pixels_are_those_of_transformers(family, tmp_path):
    path = tiny_vision_model_dir(tmp_path / family, family)
    processor, model = hf_processor(path), AutoModelForImageTextToText.from_pretrained(path)
    rows = picture_rows(2)
    rows[0]["prompt"][0]["content"] = "one <image> and <image>two"
    rows[0]["images"] = [{"bytes": png(picture("red", size=s)), "path": None} for s in ((24, 16), (16, 40))]
    item = dataset(path, write_parquet(tmp_path / "rows.parquet", rows))[0]
    images = [picture("red", size=s) for s in ((24, 16), (16, 40))]
    mark = "<|vision_start|><|image_pad|><|vision_end|>"
    text = f"<user>one {mark} and {mark}two<assistant>"
    expected = processor(text=[text], images=images, return_tensors="pt")
    ids = item["input_ids"][item["attention_mask"].bool()]
    assert torch.equal(ids, expected["input_ids"][0])
    assert (ids == IMAGE).sum() == 6 + 10
    inputs = item["multi_modal_inputs"]
    assert torch.equal(inputs["pixel_values"], expected["pixel_values"])
    assert torch.equal(inputs["image_grid_thw"], expected["image_grid_thw"])
    positions, _ = model.model.get_rope_index(
        expected["input_ids"], expected["mm_token_type_ids"], image_grid_thw=expected["image_grid_thw"]
    )
    own = item["position_ids"][:, item["attention_mask"].bool()]
    assert torch.equal(own[1:], positions[:, 0])
    assert own[0].tolist() == list(range(len(ids)))


def test_text_rows_of_a_model_with_images_and_a_model_of_text(path, tmp_path):
    file = write_parquet(tmp_path / "rows.parquet", picture_rows(4, text_every=2))
    item = dataset(path, file)[1]
    assert len(item["multi_modal_inputs"]) == 0
    assert item["raw_prompt"] == [{"role": "user", "content": "say green"}]
    assert item["position_ids"].shape == (4, 40)
    text_model = tiny_model_dir(tmp_path / "text")
    with pytest.raises(DataError, match=r"row 0: column 'images' holds 1 item\(s\)\. No image processor was given"):
        RLHFDataset(file, hf_tokenizer(text_model), {"max_prompt_length": 40}, hf_processor(text_model))


def test_forms_of_an_image_give_the_same_pixels(tmp_path):
    image = picture("blue", "circle", (20, 12))
    file = tmp_path / "a.png"
    file.write_bytes(png(image))
    text = "data:image/png;base64," + base64.b64encode(png(image)).decode()
    forms = [image, png(image), str(file), f"file://{file}", file, text, {"bytes": png(image), "path": "gone.png"}]
    forms += [{"path": str(file), "bytes": None}, {"image": str(file)}, {"type": "image", "image": image}]
    for form in forms:
        assert np.array_equal(np.asarray(read_image(form, "here")), np.asarray(image)), form


def saved(image, kind="PNG", **more):
    file = io.BytesIO()
    image.save(file, format=kind, **more)
    return file.getvalue()


def test_modes_of_images_by_hand():
    def pixels(value):
        return np.asarray(read_image(value, "here")).tolist()

    white = [255] * 3
    half = Image.new("RGBA", (2, 1), (0, 0, 0, 0))
    half.putpixel((0, 0), (10, 20, 30, 255))
    assert pixels(half) == [[[10, 20, 30], white]]
    plain = Image.new("RGB", (1, 1), (10, 20, 30))
    assert pixels(saved(plain, transparency=(10, 20, 30))) == [[white]]
    assert pixels(saved(plain.quantize(2), transparency=0)) == [[white]]
    assert pixels(saved(plain.quantize(2))) == [[[10, 20, 30]]]
    assert pixels(saved(Image.new("L", (1, 1), 7), transparency=7)) == [[white]]
    assert pixels(saved(Image.new("CMYK", (1, 1), (0, 255, 255, 0)), "TIFF")) == [[[255, 0, 0]]]
    # 16 bits: 256 · 7 + 200 of 65,535 is 7 of 255.
    deep = Image.fromarray(np.array([[0, 256 * 7 + 200, 65535]], dtype=np.uint16))
    for value in (deep, saved(deep), saved(deep, "TIFF")):
        assert pixels(value) == [[[0] * 3, [7] * 3, white]]
    assert pixels(saved(deep, transparency=0)) == [[white, [7] * 3, white]]
    frames = [Image.new("RGB", (1, 1), (shade, shade, shade)) for shade in (5, 9)]
    assert pixels(saved(frames[0], "GIF", save_all=True, append_images=frames[1:])) == [[[5] * 3]]
    # A camera that was held upright (6) stores rows from right to left, and from top to bottom.
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    stored = Image.fromarray(np.array([[[1] * 3, [2] * 3, [3] * 3], [[4] * 3, [5] * 3, [6] * 3]], dtype=np.uint8))
    upright = [[[4] * 3, [1] * 3], [[5] * 3, [2] * 3], [[6] * 3, [3] * 3]]
    assert pixels(saved(stored, exif=exif.tobytes())) == upright
    assert pixels(stored) == np.asarray(stored).tolist()


def test_limits_of_pixels():
    # 100 x 50 pixels, patches of 14: multiples of 28 are 112 x 56, an area of 6272.
    assert smart_resize(100, 50, 28) == (112, 56)
    # at most 3136 = 56 · 56 pixels: scale √(5000 / 3136) = 1.263, 100 / 1.263 / 28 = 2.8, 50 / 1.263 / 28 = 1.4
    assert smart_resize(100, 50, 28, max_pixels=3136) == (56, 28)
    # at least 12544 = 112 · 112: scale √(12544 / 5000) = 1.584, 158.4 / 28 = 5.7 and 79.2 / 28 = 2.8, both up
    assert smart_resize(100, 50, 28, min_pixels=12544) == (168, 84)
    image = picture("red", size=(50, 100))
    assert process_image(image).size == (50, 100)
    assert process_image({"image": image, "min_pixels": 12544}).size == (84, 168)
    # 60 x 30 is below the least area of 3136: scale √(3136 / 1800) = 1.32, 79.2 / 28 = 2.8 and 39.6 / 28 = 1.4, both up
    assert process_image({"image": image, "resized_height": 60, "resized_width": 30}).size == (56, 84)
    assert process_image({"bytes": png(image), "max_pixels": 3136}, image_patch_size=14).size == (28, 56)
    with pytest.raises(DataError, match="one edge may be at most 200 times"):
        process_image({"image": Image.new("RGB", (2, 500)), "min_pixels": 3136})
    for wrong in (-1, float("inf")):
        with pytest.raises(DataError, match=rf"{{'max_pixels': {wrong}}}; limits of pixels"):
            process_image({"image": image, "max_pixels": wrong})


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (b"no image", "of 8 bytes cannot be read: it is no image file"),
        (png(picture("red", size=(64, 64)))[:90], "cannot be read"),
        ("/nowhere/a.png", "'/nowhere/a.png' cannot be read: .*No such file"),
        ("https://example.org/a.png", "is a remote address"),
        ({"width": 3}, "a mapping with width. It needs one of bytes, path and image"),
        (7, "an image is int 7"),
        (Image.new("RGB", (0, 5)), "of 0 x 5 pixels cannot be read: it has 0 x 5 pixels"),
        (Image.new("F", (4, 4)), r"its values \(mode F\) have no largest one"),
        (Image.new("La", (4, 4)), "conversion from La"),
        ("data:image/png;base64,###", "base64 text of an image is damaged"),
    ],
)
def test_what_is_no_image_is_named(value, said):
    with pytest.raises(DataError, match=f"^file, row 3: .*{said}"):
        read_image(value, "file, row 3")


def test_rows_with_broken_images_are_named_and_left_out(path, tmp_path, caplog):
    rows = picture_rows(5)
    rows[1]["images"][0]["bytes"] = b"broken"
    rows[3]["images"][0]["bytes"] = rows[3]["images"][0]["bytes"][:60]
    file = write_parquet(tmp_path / "rows.parquet", rows)
    with caplog.at_level(logging.WARNING):
        found = dataset(path, file)
    assert [found[i]["index"] for i in range(len(found))] == [0, 2, 4]
    assert "2 of 5 rows have images or videos that cannot be used" in caplog.text
    assert f"{file}, row 1: the image of 6 bytes cannot be read" in caplog.text
    assert f"{file}, row 3: the image of 60 bytes cannot be read" in caplog.text
    file = write_parquet(tmp_path / "broken.parquet", [rows[1], rows[3]])
    with pytest.raises(DataError, match="2 of 2 rows have images or videos that cannot be used"):
        dataset(path, file)


def test_placeholders_without_images_are_told_once(path, tmp_path, caplog):
    rows = picture_rows(4)
    for row in rows[:2]:
        row["images"] = []
    rows[2] |= {"images": [], "prompt": [{"role": "user", "content": "a text"}]}
    file = write_parquet(tmp_path / "rows.parquet", rows)
    with caplog.at_level(logging.WARNING):
        assert len(dataset(path, file)) == 4
    (told,) = caplog.messages
    assert told.startswith("2 of 4 rows have <image> or <video> in a text and no image or video for it")
    assert f"{file}, row 0 ... Name the columns of images and videos in image_key (now images)" in told


def test_the_filter_counts_image_tokens_and_no_prompt_with_images_is_cut(path, tmp_path):
    rows = picture_rows(3)  # 4, 6 and 8 image tokens, and <user> START END color? <assistant>: 10 more
    file = write_parquet(tmp_path / "rows.parquet", rows)
    kept = dataset(path, file, max_prompt_length=16, filter_overlong_prompts=True)
    assert [int(kept[i]["attention_mask"].sum()) for i in range(len(kept))] == [14, 16]
    assert [len(ids) for ids, _ in kept.sequences(1)] == [16]
    with pytest.raises(DataError, match=r"1 of 3 prompts are longer than max_prompt_length=16 .*row 2 with 18 tokens"):
        dataset(path, file, max_prompt_length=16)
    with pytest.raises(DataError, match="prompts with images are never cut"):
        dataset(path, file, max_prompt_length=16, truncation="left")


def test_messages_place_images():
    image, a, b = {"type": "image"}, {"type": "text", "text": "a"}, {"type": "text", "text": "b"}
    found = with_image_parts([{"role": "user", "content": "a<image>b<image>"}], {"image": 2}, "x")
    assert found == [{"role": "user", "content": [a, image, b, image]}]
    parts = [{"type": "image", "image": "1.png"}, {"type": "text", "text": "what?"}]
    messages, media = with_placeholders([{"role": "user", "content": parts}], {"image": None}, "x")
    assert media == {"image": [{"image": "1.png"}]}
    assert [part["text"] for part in messages[0]["content"]] == ["<image>", "what?"]
    with pytest.raises(DataError, match=r"f, row 1: the messages have 2 <image> placeholder\(s\), and the row has 1"):
        with_image_parts([{"role": "user", "content": "<image><image>"}], {"image": 1}, "f, row 1")
    with pytest.raises(DataError, match="Keep all images in the column"):
        with_placeholders([{"role": "user", "content": parts}], {"image": ["2.png"]}, "x")
    with pytest.raises(DataError, match="the images of a row are a list, and this is str"):
        with_placeholders("hello", {"image": "2.png"}, "x")
    plain = [{"role": "user", "content": "the text <image> itself"}]
    assert with_image_parts(plain, {"image": 0}, "x") == plain


def test_a_user_who_writes_the_token_of_images_writes_text(path, tmp_path):
    rows = picture_rows(1)
    rows[0]["prompt"][0]["content"] = "<image>is <|image_pad|> a token?"
    item = dataset(path, write_parquet(tmp_path / "rows.parquet", rows))[0]
    assert int((item["input_ids"] == IMAGE).sum()) == 4


def test_siblings_share_their_images(path, tmp_path):
    found = dataset(path, write_parquet(tmp_path / "rows.parquet", picture_rows(4)))
    batch = DataProto.from_single_dict(collate_fn([found[i] for i in range(4)])).repeat(8, interleave=True)
    once, copied = bytes_held(batch.non_tensor_batch["multi_modal_inputs"])
    assert copied == 8 * once
    assert once == sum(found[i]["multi_modal_inputs"].nbytes for i in range(4))
    import pickle

    arrived = pickle.loads(pickle.dumps(batch))  # rows that shared an object share one again
    assert bytes_held(arrived.non_tensor_batch["multi_modal_inputs"]) == (once, copied)
    a, b = (x.non_tensor_batch["multi_modal_inputs"][9] for x in (batch, arrived))
    assert isinstance(a, SharedTensors)
    assert torch.equal(a["pixel_values"], b["pixel_values"])
    a["pixel_values"].zero_()  # a copy
    assert float(a["pixel_values"].abs().max()) > 0


def test_the_image_processor_is_that_of_pillow(path):
    processor = hf_processor(path)
    assert type(processor).__name__ == "Qwen2_5_VLProcessor"
    assert type(processor.image_processor).__name__ == "Qwen2VLImageProcessorPil"
    assert read_image(saved(picture("red"), "JPEG"), "x").mode == "RGB"


@pytest.mark.parametrize("normalize", [True, False])
def test_pictures_of_inputs_make_the_same_inputs(normalize, tmp_path):
    processor = hf_processor(tiny_vision_model_dir(tmp_path))
    processor.image_processor.image_mean, processor.image_processor.image_std = [0.48, 0.46, 0.41], [0.27, 0.26, 0.28]
    processor.image_processor.do_normalize = normalize
    maker, noise = ImagePrompts.from_processor(processor), np.random.default_rng(0)
    assert maker is not None
    # Whole tokens, odd edges, one that is too large for the model and one that is too small.
    sizes = ((16, 24), (17, 29), (90, 120), (5, 7))
    images = [Image.fromarray(noise.integers(0, 256, (*size, 3), dtype=np.uint8)) for size in sizes]
    inputs = maker.inputs(images, "-")
    pictures = maker.pictures(inputs)
    assert np.array_equal(np.asarray(pictures[0]), np.asarray(images[0]))
    again = maker.inputs([read_image(url_of(picture), "-") for picture in pictures], "-")
    assert torch.equal(again["image_grid_thw"], inputs["image_grid_thw"])
    assert torch.equal(again["pixel_values"], inputs["pixel_values"])


def test_data_urls_hold_what_the_web_has():
    def url(image, kind, named):
        return f"data:image/{named};base64," + base64.b64encode(saved(image, kind)).decode()

    assert read_image(url(picture("red"), "GIF", "jpg"), "-").size == (16, 16)  # the bytes say what it is
    with pytest.raises(DataError, match=r"-: the image .* cannot be read: it is no image file"):
        read_image(url(picture("red"), "EPS", "png"), "-")  # Pillow would start Ghostscript
    with pytest.raises(DataError, match="it has 8000 x 8001 pixels, and 64000000 are the most"):
        read_image(url(Image.new("1", (8000, 8001)), "PNG", "png"), "-")
    with pytest.raises(DataError, match=r"has the URL 'data:image/svg\+xml;base64,.*Expected image/png"):
        read_image("data:image/svg+xml;base64,AAAA", "-")


def test_the_endpoint_of_programs_takes_no_videos():
    for part in ({"type": "video"}, {"type": "video", "video": "a.mp4"}):
        said = [{"role": "user", "content": [{"type": "text", "text": "see"}, part]}]
        with pytest.raises(CallRefusedError, match=r"messages\[0\] has a video, and the endpoint takes"):
            checked_messages(said, "messages")
