"""The memory of the pixels of a batch.

    python -m benchmarks.images

It reads 512 rows with a picture of 224 x 224 pixels, repeats each for 8 responses, and shows the bytes of
``multi_modal_inputs``, what they would be if each row had its own, and how much the process grew.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from verl.testing.vision_models import COLORS, picture, tiny_vision_model_dir


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


if __name__ == "__main__":
    memory()
