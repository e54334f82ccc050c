"""Training with images: what a tiny model learns of pictures, and the memory of the pixels of a batch.

    python -m benchmarks.images learning [--seed 1] [--output_dir outputs/images] [--steps 144]
    python -m benchmarks.images memory

``learning`` makes a random Qwen2.5-VL of two layers and pictures of shapes in four colours, and trains it by GRPO,
through ``main_ppo``, to answer with the first letter of the colour. Nothing but the picture tells which: a model that
does not look is right in one of four at best. Validation is greedy, on pictures of other sizes and places.
``memory`` reads 512 rows with a picture of 224 x 224 pixels, repeats each for 8 responses, and shows the bytes of
``multi_modal_inputs`` and what they would be if each row had its own.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.support.tiny_run import overrides
from tests.support.vision_models import COLORS, SHAPES, picture, png, tiny_vision_model_dir, write_parquet

REWARD = '''
def compute_score(solution_str, ground_truth, **_):
    """1 for the letter of the colour, 0.1 for another of the four letters."""
    letter = solution_str[:1]
    return 1.0 if letter == ground_truth else 0.1 * (letter in set("rgbw"))
'''
SIZES = (8, 16, 24, 32)


def color_rows(count: int, seed: int) -> list[dict[str, Any]]:
    """Rows with one picture each, of a random colour, shape and size."""
    draw = random.Random(seed)
    rows = []
    for index in range(count):
        color, size = draw.choice(list(COLORS)), (draw.choice(SIZES), draw.choice(SIZES))
        image = picture(color, draw.choice(SHAPES), size)
        rows.append(
            {
                "data_source": "colors",
                "prompt": [{"role": "user", "content": "<image>color"}],
                "images": [{"bytes": png(image), "path": None}],
                "reward_model": {"style": "rule", "ground_truth": color[0]},
                "extra_info": {"index": index},
            }
        )
    return rows


def learning(seed: int, folder: Path, steps: int) -> None:
    """Train, and print the validation score by step."""
    folder.mkdir(parents=True)
    (folder / "reward.py").write_text(REWARD)
    paths = {
        "model": tiny_vision_model_dir(folder / "model", seed=seed),
        "train": write_parquet(folder / "train.parquet", color_rows(1024, seed)),
        "val": write_parquet(folder / "val.parquet", color_rows(200, seed + 1000)),
    }
    changes = {
        "data__train_batch_size": 16,
        "data__max_prompt_length": 80,
        "data__max_response_length": 1,
        "actor_rollout_ref__actor__ppo_mini_batch_size": 16,
        "actor_rollout_ref__actor__ppo_micro_batch_size_per_gpu": 128,
        "actor_rollout_ref__actor__optim__lr": 5e-4,
        "actor_rollout_ref__actor__entropy_coeff": 0.1,
        "actor_rollout_ref__actor__entropy_target": 1.0,
        "actor_rollout_ref__actor__entropy_target_step": 0.05,
        "actor_rollout_ref__actor__entropy_coeff_min": 0.05,
        "actor_rollout_ref__rollout__n": 8,
        "actor_rollout_ref__rollout__log_prob_micro_batch_size_per_gpu": 128,
        "custom_reward_function__path": folder / "reward.py",
        "trainer__total_training_steps": steps,
        "trainer__total_epochs": 1000,
        "trainer__seed": seed,
        "trainer__test_freq": max(1, steps // 12),
        "trainer__val_before_train": "true",
    }
    given = overrides({**paths, "reward_model": paths["model"]}, folder, **changes)
    log = folder / "metrics.jsonl"
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *given]
    done = subprocess.run(
        command, env={**os.environ, "VERL_FILE_LOGGER_PATH": str(log)}, capture_output=True, text=True
    )
    if done.returncode:
        raise SystemExit(done.stdout[-2000:] + done.stderr[-2000:])
    for record in map(json.loads, log.read_text().splitlines()):
        found = {name: value for name, value in record["data"].items() if name.startswith("val-core/")}
        if found:
            print(f"step {record['step']:3d}: {', '.join(f'{name} {value:.3f}' for name, value in found.items())}")


def memory() -> None:
    """Print the bytes of the inputs of 512 rows for 8 responses each."""
    import psutil
    import torch

    from verl.protocol import DataProto
    from verl.protocol.shared import SharedTensors, bytes_held
    from verl.utils import hf_processor

    with tempfile.TemporaryDirectory() as folder:
        path = Path(tiny_vision_model_dir(folder))
        settings = path / "preprocessor_config.json"
        sizes = {"patch_size": 14, "min_pixels": 56 * 56, "max_pixels": 28 * 28 * 1280}
        settings.write_text(json.dumps(json.loads(settings.read_text()) | sizes))
        processor: Any = hf_processor(str(path))
        process = psutil.Process()
        before = process.memory_info().rss
        rows = []
        for number in range(512):
            image = picture(list(COLORS)[number % 4], size=(224, 224))
            found = processor.image_processor(images=[image], return_tensors="pt")
            rows.append(SharedTensors({name: found[name] for name in ("pixel_values", "image_grid_thw")}))
        batch = DataProto.from_dict(tensors={"x": torch.zeros(512, 1)}, non_tensors={"multi_modal_inputs": rows})
        repeated = batch.repeat(8, interleave=True)
        once, each = bytes_held(repeated.non_tensor_batch["multi_modal_inputs"])
        grown = process.memory_info().rss - before
    print(f"512 prompts, 8 responses each: {once / 1e6:.0f} MB held; a copy for each row would be {each / 1e6:.0f} MB")
    print(f"resident memory of the process grew by {grown / 1e6:.0f} MB")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("part", choices=["learning", "memory"])
    parser.add_argument("--seed", type=int, default=1, help="learning: of data, weights and sampling")
    parser.add_argument("--steps", type=int, default=144, help="learning: steps of GRPO")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/images"), help="learning: where it writes")
    args = parser.parse_args()
    if args.part == "memory":
        memory()
    else:
        learning(args.seed, args.output_dir, args.steps)


if __name__ == "__main__":
    main()
