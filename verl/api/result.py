"""Result of a training call."""

from __future__ import annotations

import math
import secrets
import sys
import threading
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from verl.api.data import read_jsonl
from verl.base.plugins import load
from verl.base.types import JsonObject
from verl.errors import CheckpointError, ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"


class TrainingResult:
    """A run that has ended, with what lies in its folder.

    Args:
        folder: everything that the run wrote; ``verl view FOLDER`` shows it.

    Raises:
        ConfigError: no call wrote into it.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder).expanduser().absolute()
        if not (self.folder / METRICS).is_file():
            raise ConfigError(f"{self.folder} is no folder of a call of verl.train or verl.sft: it has no {METRICS}.")

    @cached_property
    def metrics(self) -> list[JsonObject]:
        """The metrics of each step with its number as ``step``, in order: ``pandas.DataFrame(result.metrics)``.

        A value that was not finite is NaN.
        """
        rows: dict[int, JsonObject] = {}
        for record in read_jsonl(self.folder / METRICS):
            if "data" in record:
                step = rows.setdefault(record["step"], {"step": record["step"]})
                step.update({name: math.nan if value is None else value for name, value in record["data"].items()})
        return [rows[step] for step in sorted(rows)]

    @property
    def checkpoint(self) -> Path:
        """The folder of the last checkpoint.

        Raises:
            CheckpointError: the run saved none.
        """
        folders = (self.folder / CHECKPOINTS).glob("global_step_*")
        steps = {
            int(path.name.rpartition("_")[2]): path for path in folders if path.name.rpartition("_")[2].isdecimal()
        }
        if not steps:
            raise CheckpointError(
                f"{self.folder / CHECKPOINTS} holds no checkpoint: the run ended before its first one (save_steps, or "
                "at the end), or saves none (trainer.save_freq=-1)."
            )
        return steps[max(steps)]

    @property
    def model(self) -> Path:
        """The trained model as a Hugging Face folder, with its tokenizer.

        Raises:
            CheckpointError: the run saved none, or not in this form.
        """
        checkpoint = self.checkpoint
        weight_files = sorted(checkpoint.glob("**/huggingface/*.safetensors*"))
        actor = [path.parent for path in weight_files if path.relative_to(checkpoint).parts[0] != "critic"]
        if not actor:
            raise CheckpointError(
                f"{checkpoint} holds no Hugging Face folder with weights, as save_contents of the checkpoint has no "
                f"hf_model. `verl merge {checkpoint}` makes one."
            )
        return actor[0]

    def load(
        self, trust_remote_code: bool = False, **kwargs: object
    ) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
        """Load the trained model and its tokenizer; ``kwargs`` go to ``from_pretrained`` of the model."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            self.model, trust_remote_code=trust_remote_code
        )
        model = AutoModelForCausalLM.from_pretrained(self.model, trust_remote_code=trust_remote_code, **kwargs)
        return model, tokenizer

    @cached_property
    def samples(self) -> list[JsonObject]:
        """Every response that was trained on: ``input``, ``output``, ``gts``, ``score``, ``step`` and more."""
        return _samples(self.folder / SAMPLES / "train")

    @cached_property
    def eval_samples(self) -> list[JsonObject]:
        """Every response of the validations, with the same keys as :attr:`samples`."""
        return _samples(self.folder / SAMPLES / "validation")

    def view(self, wait: bool | None = None) -> str:
        """Serve the page of ``verl view`` for the run, say its address and return it.

        Args:
            wait: serve until Ctrl-C. By default a script waits, and a notebook or an interactive Python goes on, which
                serves as long as it lives.
        """
        from verl.single_controller.base.worker import free_port

        if wait is None:
            wait = not (hasattr(sys, "ps1") or "ipykernel" in sys.modules)
        port, token = free_port(), secrets.token_urlsafe(24)
        view = load("view.command:view")
        if wait:
            view([self.folder], port, token=token)
        else:
            threading.Thread(
                target=view, args=([self.folder], port, False, token), name="verl-view", daemon=True
            ).start()
        return f"http://127.0.0.1:{port}/?token={token}"

    def __repr__(self) -> str:
        steps = self.metrics
        return f"TrainingResult({str(self.folder)!r}, {len(steps)} steps)"


def _samples(folder: Path) -> list[JsonObject]:
    files = [path for path in folder.glob("*.jsonl") if path.stem.isdecimal()]
    return [record for path in sorted(files, key=lambda path: int(path.stem)) for record in read_jsonl(path)]


def path_of(model: str | Path | TrainingResult) -> str:
    """Return the path of a model that is a path, a name on the Hugging Face hub, or the result of a training call.

    Raises:
        ConfigError: it is something else, such as a loaded model.
    """
    if isinstance(model, TrainingResult):
        return str(model.model)
    if not isinstance(model, (str, Path)):
        raise ConfigError(
            f"model is {type(model).__name__}. Give the path of a folder or a name on the Hugging Face hub; a model in "
            "memory becomes a folder by model.save_pretrained(FOLDER) and tokenizer.save_pretrained(FOLDER)."
        )
    return str(model)
