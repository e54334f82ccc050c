"""Rows with videos: frames, sizes, tokens, positions, log-probs and gradients of plain Transformers, broken ones."""

from __future__ import annotations

import io
import logging
import sys
from fractions import Fraction

import av
import numpy as np
import pytest
import torch
from PIL import Image
from torch.testing import assert_close
from transformers import AutoModelForImageTextToText

from tests.support.vision_models import DENSE_FAMILIES, film, film_rows, picture, tiny_vision_model_dir, write_parquet
from tests.vision.batches import continued, film_prompts
from tests.workers.support import EPS, LR, make_engine, naive_policy_loss, run_ranks, share, weights_of, with_log_probs
from verl.datasets.rl_dataset import RLHFDataset
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.utils import hf_processor, hf_tokenizer
from verl.vision.families import VisionConfig
from verl.vision.positions import mrope_positions
from verl.vision.prompts import ImagePrompts
from verl.vision.videos import Clip, Video, VideoLimits, open_video
from verl.workers.config import ActorConfig
from verl.workers.engine import MicroBatchConfig
from verl.workers.losses import PolicyLoss

IMAGE, VIDEO = 106, 107
P, R = 120, 5
LIMITS = VideoLimits(patch_size=4, min_pixels=64, max_pixels=64 * 64)
COLORS = ("red", "green", "blue", "white")
CONFIG = ActorConfig(loss_agg_mode="token-mean", entropy_coeff=0.01, use_kl_loss=True, kl_loss_coef=0.1)
LAYOUTS = {
    "whole": MicroBatchConfig(),
    "one by one": MicroBatchConfig(micro_batch_size_per_gpu=1),
    "by tokens": MicroBatchConfig(use_dynamic_bsz=True, max_token_len_per_gpu=130),
}


def dataset(path, file, **config):
    return RLHFDataset(file, hf_tokenizer(path), {"max_prompt_length": P} | config, hf_processor(path))


def grey(n):
    return Image.new("RGB", (16, 16), (n, n, n))


def movie(frames, rate=8, kind="mp4", codec="mpeg4"):
    """The bytes of a video file."""
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=Fraction(rate))
        stream.width, stream.height, stream.pix_fmt = *frames[0].size, "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_image(frame)))
        container.mux(stream.encode())
    return file.getvalue()


# ---- positions and frames


def test_positions_by_hand():
    # a [2 steps of 1 x 1 tokens] b, 1.5 s between steps, 2 positions per second: steps at 1 + 0 and 1 + 3, then 5.
    qwen = VisionConfig(
        image_token_id=IMAGE, video_token_id=VIDEO, merge_size=2, patch_values=96, positions_per_second=2
    )
    ids = torch.tensor([5, VIDEO, VIDEO, 7])
    found = mrope_positions(ids, torch.tensor([[2, 2, 2]]), qwen, seconds=torch.tensor([1.5]))
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 4, 5], [0, 1, 1, 5], [0, 1, 1, 5]]
    # a model without seconds: a step of time is one position
    plain = VisionConfig(image_token_id=IMAGE, video_token_id=VIDEO, merge_size=2, patch_values=96)
    found = mrope_positions(ids, torch.tensor([[2, 2, 2]]), plain)
    assert found.tolist() == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1, 1, 3], [0, 1, 1, 3]]


def chosen(value):
    return open_video(value, LIMITS, "here")


def test_frames_of_a_list_are_all_taken_in_pairs():
    clip = chosen(film(COLORS[:3]))
    assert clip.frame_indices == (0, 1, 2, 2)
    assert (clip.steps(), clip.seconds_per_step(), clip.times()) == (2, 1.0, [0.25, 1.0])
    assert [np.asarray(f).tolist() for f in clip.frames()] == [
        np.asarray(f).tolist() for f in film([*COLORS[:3], "blue"])
    ]
    one = chosen([picture("red")])
    assert (one.frame_indices, one.steps(), len(list(one.frames()))) == ((0, 0), 1, 2)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({}, (0, 6, 13, 19)),  # 20 frames, 2.5 s at 8: 2 a second make 5, of which 4 are even
        ({"fps": 4}, (0, 2, 4, 6, 8, 11, 13, 15, 17, 19)),
        ({"nframes": 2}, (0, 19)),
        ({"nframes": 5}, (0, 6, 13, 19)),  # round(5 / 2) is 2, to even
        ({"fps": 0.1}, (0, 6, 13, 19)),  # at least min_frames
        ({"fps": 0.1, "min_frames": 2}, (0, 19)),
        ({"fps": 8, "max_frames": 6}, (0, 4, 8, 11, 15, 19)),
    ],
)
def test_frames_of_a_file(settings, expected, tmp_path):
    frames = [grey(10 * n) for n in range(20)]
    data = movie(frames)
    (tmp_path / "a.mp4").write_bytes(data)
    for value in (
        {"bytes": data},
        {"path": str(tmp_path / "a.mp4"), "bytes": None},
        {"video": f"file://{tmp_path}/a.mp4"},
    ):
        clip = chosen(value | settings)
        assert clip.frame_indices == expected
        assert clip.seconds_per_step() == pytest.approx(2 * 20 / 8 / len(expected))
        for number, frame in zip(expected, clip.frames(), strict=True):
            assert abs(float(np.asarray(frame).mean()) - 10 * number) < 8  # mpeg4 loses a little
    other = chosen({"bytes": movie(frames, kind="matroska")} | settings)  # which does not say how many frames it has
    assert other.frame_indices == expected
    assert len(list(other.frames())) == len(expected)


def test_a_file_is_turned_as_it_says():
    frames = [Image.new("RGB", (32, 16), (200, 0, 0))] * 4
    for frame in frames:
        frame.paste((0, 0, 200), (16, 0, 32, 16))  # right half blue
    data = bytearray(movie(frames))
    matrix = data.index(b"tkhd") + 4 + 40  # version, times, id and the like take 40 bytes
    # 90 degrees clockwise, as telephones write it: (0, 1, 0, -1, 0, 0, ...)
    data[matrix : matrix + 36] = np.array([0, 1 << 16, 0, -(1 << 16), 0, 0, 0, 0, 1 << 30], dtype=">i4").tobytes()
    clip = chosen(bytes(data))
    assert (clip.width, clip.height) == (16, 32)
    pixels = np.asarray(next(clip.frames())).astype(int)
    assert pixels[4, 8, 0] > 150  # the left half is on top
    assert pixels[28, 8, 2] > 150


def test_sizes_of_frames():
    def size(value, limits=LIMITS):
        clip = open_video(value, limits, "here")
        return clip.height, clip.width

    big = [Image.new("RGB", (200, 100))] * 4
    assert size(big) == (40, 88)  # sqrt(20000 / 4096) = 2.21: 45.3 x 90.5, down to multiples of 8
    assert size({"video": big, "max_pixels": 64}) == (8, 8)
    assert size({"video": big, "resized_height": 16, "resized_width": 30}) == (16, 32)
    assert size({"video": big, "total_pixels": 2048}) == (16, 40)  # 1024 of each pair: 22.6 x 45.3
    whole = VideoLimits(patch_size=4, min_pixels=64, max_pixels=4096, are_totals=True)
    assert size(big, whole) == (16, 40)  # 4 frames of 1024
    assert size([Image.new("RGB", (3, 3))]) == (8, 8)


def test_a_long_video_holds_few_frames():
    frames = [grey(n % 256) for n in range(10_000)]
    clip = chosen(frames)
    assert len(clip.frame_indices) == 768
    assert (clip.frame_indices[0], clip.frame_indices[-1]) == (0, 9999)
    assert len(chosen({"video": frames, "nframes": 1000}).frame_indices) == 1000  # who names a number gets it
    clip = chosen({"bytes": movie([grey(n % 200) for n in range(3000)], rate=2), "max_frames": 10})
    assert len(list(clip.frames())) == 10


def test_what_cannot_be_read(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("no video\n" * 100)
    (tmp_path / "list.m3u8").write_text(f"#EXTM3U\n#EXTINF:1,\n{tmp_path}/a.mp4\n#EXT-X-ENDLIST\n")
    data = movie([grey(10 * n) for n in range(20)])
    (tmp_path / "a.mp4").write_bytes(data)
    cases = [
        ([], "has no frames"),
        (b"", "0 bytes"),
        (data[: len(data) // 2], "of .* bytes cannot be read"),
        (b"text", "of 4 bytes cannot be read"),
        (str(tmp_path / "a.txt"), "a.txt' cannot be read"),
        (str(tmp_path / "list.m3u8"), "m3u8' cannot be read"),
        (str(tmp_path / "gone.mp4"), "is no file"),
        ("https://a.b/c.mp4", "is an address"),
        (7, "a video is int 7"),
        ({"fps": 2}, "mapping without bytes, video, path"),
        ({"video": film(COLORS), "speed": 2}, "has speed, which is not read here. Known are"),
        ({"video": film(COLORS), "fps": 0}, r"a video has \{'fps': 0\}"),
        ({"video": film(COLORS), "fps": 1, "nframes": 2}, "fps and nframes"),
        ([Image.new("RGB", (1000, 1))], "a video of 1000 x 1 pixels is too narrow"),
        ([b"no picture"], "^here, frame 0: the image of 10 bytes cannot be read"),
    ]
    for value, said in cases:
        with pytest.raises(DataError, match=said):
            chosen(value)
    with pytest.raises(DataError, match="here, frame 1: the image of 3 bytes cannot be read"):
        list(chosen([picture("red"), b"bad"]).frames())
    with pytest.raises(DataError, match="here: frame 1 of a video has 24 x 16 pixels, and the first has 16 x 16"):
        list(chosen([picture("red"), picture("red", size=(24, 16))]).frames())
    monkeypatch.setitem(sys.modules, "av", None)
    with pytest.raises(ConfigError, match=r"needs the package av, .*pip install 'av"):
        chosen(data)
    assert chosen(film(COLORS)).steps() == 2


def test_a_file_that_ends_early_is_a_named_row():
    noise = np.random.default_rng(0).integers(0, 255, (20, 64, 64, 3), dtype=np.uint8)
    data = movie([Image.fromarray(values) for values in noise], kind="avi")  # says at its beginning how many it has
    clip = chosen(data[: int(len(data) * 0.7)])
    with pytest.raises(DataError, match=r"here: the video .* cannot be read: it ends after \d+ of its \d+ frames"):
        list(clip.frames())
    assert isinstance(clip, Clip)


# ---- rows


@pytest.fixture(scope="module", params=DENSE_FAMILIES)
def family_path(request, tmp_path_factory):
    return tiny_vision_model_dir(tmp_path_factory.mktemp(request.param), request.param)


def test_broken_rows_are_left_out_and_named(family_path, tmp_path, caplog):
    rows = film_rows(4)
    rows[0]["videos"] = [{"video": [{"bytes": b"broken"}], "fps": 8.0}]
    with caplog.at_level(logging.WARNING):
        assert len(dataset(family_path, write_parquet(tmp_path / "rows.parquet", rows))) == 3
    assert "1 of 4 rows have images or videos that cannot be used" in caplog.text
    assert "rows.parquet, row 0, frame 0: the image of 6 bytes cannot be read" in caplog.text
    rows[0] = film_rows(1)[0]
    rows[0]["prompt"][0]["content"] = "no place"
    with pytest.raises(DataError, match=r"0 <video> placeholder\(s\), and the row has 1 video\(s\)"):
        dataset(family_path, write_parquet(tmp_path / "rows.parquet", rows))


def test_videos_in_parts_and_as_files(family_path, tmp_path):
    (tmp_path / "a.mp4").write_bytes(movie(film(["red"] * 8)))
    rows = film_rows(2)
    part = {"type": "video", "text": None, "video": str(tmp_path / "a.mp4"), "nframes": 4.0}
    text = {"type": "text", "text": "which?", "video": None, "nframes": None}
    rows[0]["prompt"], rows[0]["videos"] = [{"role": "user", "content": [part, text]}], []
    rows[1]["prompt"] = [{"role": "user", "content": [text]}]
    item = dataset(family_path, write_parquet(tmp_path / "rows.parquet", rows))[0]
    assert int(item["multi_modal_inputs"]["image_grid_thw"].prod(-1).sum()) == 2 * 16
    values = item["multi_modal_inputs"]["pixel_values"].view(-1, 3, 2, 16)
    assert float(values[:, 0].mean()) > float(values[:, 2].mean()) + 0.5  # red, not blue


def test_two_frames_of_a_step_are_its_two_halves(family_path):
    """Of equal frames the patches are those of an image; else each half is that of its frame."""
    processor = hf_processor(family_path)
    maker = ImagePrompts.from_processor(processor)
    one, two = (processor.image_processor(images=[picture(c)], return_tensors="pt")["pixel_values"] for c in COLORS[:2])
    found = maker.inputs([maker.open(Video(film(["red", "green"])), "x")], "x")["pixel_values"].view(16, 3, 2, 16)
    assert torch.equal(found[:, :, 0], one.view(16, 3, 2, 16)[:, :, 0])
    assert torch.equal(found[:, :, 1], two.view(16, 3, 2, 16)[:, :, 1])
    same = maker.inputs([maker.open(Video(film(["red"])), "x")], "x")["pixel_values"]
    assert torch.equal(same, one)


def test_processors_that_say_nothing_or_prepare_frames_otherwise(family_path):
    processor = hf_processor(family_path)
    assert processor.video_settings["unlike_images"] == []
    processor.video_settings = {**processor.video_settings, "unlike_images": ["patch_size"]}
    with pytest.raises(ConfigError, match="have other patch_size for videos than for images"):
        ImagePrompts.from_processor(processor).open(Video(film(COLORS)), "x")
    del processor.video_settings
    with pytest.raises(ConfigError, match=r"Load it by verl\.utils\.hf_processor"):
        ImagePrompts.from_processor(processor).open(Video(film(COLORS)), "x")


def test_tokens_of_a_row(family_path, tmp_path):
    item = dataset(family_path, write_parquet(tmp_path / "rows.parquet", film_rows(4)))[3]
    ids = item["input_ids"][item["attention_mask"].bool()]
    text = hf_tokenizer(family_path).decode(ids)
    image, steps = "<|image_pad|>" * 4, "<|video_pad|>" * 6
    if "qwen3_vl" in family_path:
        # three frames at 8 a second, the last twice: (0 + 1/8) / 2 and 2/8
        step = "<|vision_start|>" + steps + "<|vision_end|>"
        video = f"<0.1 seconds>{step}<0.2 seconds>{step}"
        grid = [[1, 4, 4], [1, 4, 6], [1, 4, 6]]
    else:
        video, grid = "<|vision_start|>" + 2 * steps + "<|vision_end|>", [[1, 4, 4], [2, 4, 6]]
    assert text == f"<user>see <|vision_start|>{image}<|vision_end|> and {video}color?<assistant>"
    inputs = item["multi_modal_inputs"]
    assert inputs["image_grid_thw"].tolist() == grid
    if "qwen2_5_vl" in family_path:
        assert inputs["second_per_grid_ts"].tolist() == [0.0, 0.25]
    else:
        assert "second_per_grid_ts" not in inputs


def arguments_of(ids, inputs):
    """A row as arguments of the model's own forward pass: its images and its videos apart."""
    kinds, before = [], 0
    found = ids[(ids == IMAGE) | (ids == VIDEO)].tolist()
    for grid in inputs["image_grid_thw"] if len(inputs) else ():
        kinds.append(found[before])
        before += int(grid.prod()) // 4
    given = {"input_ids": ids[None], "mm_token_type_ids": ((ids == IMAGE) + 2 * (ids == VIDEO)).int()[None]}
    if not kinds:
        return given
    grids = inputs["image_grid_thw"]
    parts = inputs["pixel_values"].split(grids.prod(-1).tolist())
    names = {IMAGE: ("pixel_values", "image_grid_thw"), VIDEO: ("pixel_values_videos", "video_grid_thw")}
    for kind, (pixels, grid) in names.items():
        own = [number for number, name in enumerate(kinds) if name == kind]
        if own:
            given[pixels] = torch.cat([parts[number] for number in own])
            given[grid] = grids[own]
    if "second_per_grid_ts" in inputs:
        own = [number for number, name in enumerate(kinds) if name == VIDEO]
        given["second_per_grid_ts"] = inputs["second_per_grid_ts"][own]
    return given


def film_batch(path, folder, count=8):
    """Prompts with random responses of all lengths."""
    batch = film_prompts(path, folder, count, P)
    g = torch.Generator().manual_seed(0)
    response_mask = (torch.arange(R) < torch.tensor([0, R, 3, 1, 4, 2, 5, 3])[:count, None]).long()
    responses = torch.randint(4, 104, (count, R), generator=g) * response_mask
    columns = batch.batch
    tensors = {
        "prompts": columns["input_ids"],
        "responses": responses,
        "response_mask": response_mask,
        "input_ids": torch.cat([columns["input_ids"], responses], dim=1),
        "attention_mask": torch.cat([columns["attention_mask"], response_mask], dim=1),
        "position_ids": continued(columns["position_ids"], response_mask),
        "advantages": torch.randn(count, R, generator=g) * response_mask,
        "noise": torch.randn(count, R, generator=g) * 0.4 * response_mask,
    }
    return DataProto.from_dict(tensors=tensors, non_tensors=batch.non_tensor_batch)


def naive_log_probs(model, batch):
    """Log-probs and entropy of the responses by Transformers' own forward pass, which computes the positions itself."""
    columns, found = batch.batch, []
    for row in range(len(batch)):
        ids = columns["input_ids"][row][columns["attention_mask"][row].bool()]
        given = arguments_of(ids, batch.non_tensor_batch["multi_modal_inputs"][row])
        log_p = model(**given).logits[0].float().log_softmax(-1)
        start, length = int(columns["attention_mask"][row, :P].sum()), int(columns["response_mask"][row].sum())
        before = log_p[start - 1 : start - 1 + length]
        zeros = log_p.new_zeros(R - length)
        entropy = -(before.exp() * before).sum(-1)
        found.append((torch.cat([before.gather(1, ids[start:, None]).squeeze(1), zeros]), torch.cat([entropy, zeros])))
    log_probs, entropies = zip(*found, strict=True)
    return torch.stack(log_probs), torch.stack(entropies)


def ppo_batch(path, folder):
    plain = film_batch(path, folder)
    with torch.no_grad():
        log_probs, _ = naive_log_probs(AutoModelForImageTextToText.from_pretrained(path), plain)
    return with_log_probs(plain, log_probs), log_probs


def naive_step(path, batch):
    """Weights after a step of AdamW, and the norm of the gradient."""
    model = AutoModelForImageTextToText.from_pretrained(path)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.1, eps=EPS)
    naive_policy_loss(*naive_log_probs(model, batch), batch, CONFIG).backward()
    norm = float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0))
    optimizer.step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}, norm


@pytest.mark.parametrize("packed", [True, False], ids=["packed", "padded"])
def test_log_probs_are_those_of_transformers(family_path, packed, tmp_path):
    batch = film_batch(family_path, tmp_path)
    with torch.no_grad():
        model = AutoModelForImageTextToText.from_pretrained(family_path)
        expected, entropy = naive_log_probs(model, batch)
    engine = make_engine(family_path, trained=False, use_remove_padding=packed)
    for micro in LAYOUTS.values():
        found = engine.infer_batch(batch, {"log_probs", "entropy"}, micro)
        assert_close(found["log_probs"], expected, atol=1e-5, rtol=0)
        assert_close(found["entropy"], entropy, atol=1e-5, rtol=0)


def test_a_step_is_that_of_plain_pytorch(family_path, tmp_path):
    batch, _ = ppo_batch(family_path, tmp_path)
    expected, norm = naive_step(family_path, batch)
    for micro in LAYOUTS.values():
        engine = make_engine(family_path)
        with engine.train_mode():
            assert engine.train_batch(batch, PolicyLoss(CONFIG), micro)["grad_norm"] == pytest.approx(norm, rel=1e-4)
        for name, weight in weights_of(engine).items():
            assert_close(weight, expected[name], atol=1e-5, rtol=0, msg=lambda text, name=name: f"{name}: {text}")


def on_each_rank(rank, world_size, folder, path):
    batch = torch.load(folder / "batch.pt", weights_only=False)
    result = {}
    # One rank has all videos and images, the other only texts: rows 1 and 5.
    apart = batch.select_idxs([1, 5] if rank else [0, 2, 3, 4, 6, 7])
    parts = {"dealt": share(batch, rank, world_size), "apart": apart}
    for case, mine in parts.items():
        engine = make_engine(path)
        with engine.train_mode():
            norm = engine.train_batch(mine, PolicyLoss(CONFIG), LAYOUTS["one by one"])["grad_norm"]
        result[case] = norm, weights_of(engine)
    torch.save(result, folder / f"rank_{rank}.pt")


def test_two_ranks_make_the_step_of_one(tmp_path):
    path = tiny_vision_model_dir(tmp_path / "model")
    batch, _ = ppo_batch(path, tmp_path)
    torch.save(batch, tmp_path / "batch.pt")
    expected, norm = naive_step(path, batch)
    run_ranks(on_each_rank, 2, tmp_path, path)
    for rank in range(2):
        for case, (own_norm, weights) in torch.load(tmp_path / f"rank_{rank}.pt").items():
            assert own_norm == pytest.approx(norm, rel=1e-4), case
            for name, weight in expected.items():
                assert_close(weights[name], weight, atol=1e-5, rtol=0, msg=lambda t, n=name, c=case: f"{c} {n}: {t}")
