"""A prompt data set that a user's generator extends during the run (``data.datagen``)."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.base.import_utils import load_object
from verl.datasets.files import DataFile, Row
from verl.datasets.rl_dataset import RLHFDataset
from verl.errors import ConfigError, DataError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.config import DataConfig
    from verl.protocol import DataProto

logger = logging.getLogger(__name__)


class AbstractDataGenerator(ABC):
    """Base of generators of new rows; ``config`` is the ``data.datagen`` section.

    A generator with ``state_dict`` and ``load_state_dict`` is saved with the data set.
    """

    def __init__(self, config: object) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: DynamicGenDataset) -> Iterable[Mapping[str, object]]:
        """Generate rows with the columns of the training files; may be empty.

        Args:
            dataset: the data set so far; ``dataset.last_batch`` is the batch that was just trained on.

        Returns:
            an iterable of dicts of JSON-compatible values, for example a list or a ``datasets.Dataset``.
        """


class DynamicGenDataset(RLHFDataset):
    """:class:`RLHFDataset` to which ``data.datagen`` adds rows after every step.

    New rows are checked and filtered like those of a file and appended, so ``row_index`` keeps its meaning; they are
    drawn from the next epoch on. They are saved in checkpoints, so that a resumed run need not generate them again.
    Rows live in the trainer's process, which must read them, too (``data.dataloader_num_workers=0``). The number of
    steps of a run is fixed at its start.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: PreTrainedTokenizerBase,
        config: DataConfig | Mapping[str, object],
        processor: ProcessorMixin | None = None,
        max_samples: int = -1,
    ) -> None:
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        self.generator = _load_generator(self.settings)
        self.num_from_files = len(self.rows)
        self.last_batch: DataProto | None = None
        self.generated = GeneratedRows(self.columns)
        self.files.append(self.generated)

    def on_batch_end(self, batch: DataProto) -> None:
        """Generate and append rows; the trainer calls this after every step."""
        self.last_batch = batch
        self.append(self.generator.generate(self))
        self.last_batch = None

    def append(self, rows: Iterable[Mapping[str, object]]) -> None:
        """Append rows, all or none; errors give a row's number among all generated rows."""
        before = len(self.generated)
        self.generated.extend(rows, required=set(self.columns) - {"extra_info"})
        numbers = [(len(self.files) - 1, row_index) for row_index in range(before, len(self.generated))]
        if not numbers:
            return
        complete = False
        try:
            self.images.refuse_media(self.generated)
            usable = self._usable(numbers)
            complete = True
        finally:
            if not complete:
                self.generated.shorten(before)
        self.rows = self.rows + usable
        logger.info("generated %d rows, kept %d; %d rows now", len(numbers), len(usable), len(self))

    def state_dict(self) -> dict[str, object]:
        """The generated rows, which of them passed the filter, and the generator's state."""
        state = {
            "num_from_files": self.num_from_files,
            "generated": json.dumps(self.generated.all_rows()),
            "kept": [row_index for _, row_index in self.rows[self.num_from_files :]],
        }
        if hasattr(self.generator, "state_dict"):
            state["generator"] = self.generator.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore the generated rows of a checkpoint; the files must have as many usable rows as when it was saved."""
        if state["num_from_files"] != self.num_from_files:
            raise DataError(
                f"the training files have {self.num_from_files} usable rows, and had {state['num_from_files']} when "
                "the checkpoint was made. Resume with the data and the filters that the run began with."
            )
        self.generated.shorten(0)
        self.generated.extend(json.loads(state["generated"]), required=set())
        file = len(self.files) - 1
        self.rows = self.rows[: self.num_from_files] + [(file, row_index) for row_index in state["kept"]]
        if "generator" in state:
            self.generator.load_state_dict(state["generator"])  # type: ignore[attr-defined]


class GeneratedRows(DataFile):
    """Rows in memory with the interface of a file; ``columns`` are those of the training files."""

    def __init__(self, columns: Sequence[str]) -> None:
        self.path = Path("generated by datagen")
        self.columns = list(columns)
        self._rows: list[Row] = []
        self._table = None

    def extend(self, rows: Iterable[Mapping[str, object]], required: set[str]) -> None:
        """Add rows with the ``required`` columns, after a round trip through JSON.

        That gives a resumed run, whose rows come from a checkpoint's JSON, identical values. Either all rows are added
        or none.
        """
        added: list[Row] = []
        for row in rows:
            where = f"{self.path}, row {len(self) + len(added)}"
            if not isinstance(row, Mapping):
                raise DataError(f"{where}: expected a mapping of columns, got {type(row).__name__} {row!r:.80}.")
            missing, unknown = sorted(required - set(row)), sorted(set(row) - set(self.columns))
            if missing or unknown:
                problem = f"lacks {', '.join(missing)}" if missing else f"has the unknown column {', '.join(unknown)}"
                raise DataError(
                    f"{where}: it {problem}. A generated row needs the columns of the training files: "
                    f"{', '.join(self.columns)}."
                )
            try:
                added.append(json.loads(json.dumps(dict(row), allow_nan=False)))
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{where}: it cannot be kept in a checkpoint, because it holds more than plain values: {error}. "
                    "Use dicts, lists, strings, finite numbers, booleans and None."
                ) from error
        self._rows += added

    def shorten(self, count: int) -> None:
        """Keep the first ``count`` rows."""
        del self._rows[count:]

    def all_rows(self) -> list[Row]:
        """Every row, in order."""
        return self._rows


def _load_generator(config: DataConfig) -> AbstractDataGenerator:
    datagen = config.datagen
    cls = load_object(datagen.path or "", datagen.name or "", "datagen.path", "datagen.name")
    if not (isinstance(cls, type) and issubclass(cls, AbstractDataGenerator)):
        raise ConfigError(
            f"datagen: '{datagen.name}' in {datagen.path} is not a class that inherits from "
            "verl.utils.dataset.dynamicgen_dataset.AbstractDataGenerator."
        )
    return cls(datagen)
