"""Prompts that become more while the run goes on."""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.errors import ConfigError, DataError
from verl.utils.dataset.files import DataFile, Row
from verl.utils.dataset.rl_dataset import RLHFDataset
from verl.utils.import_utils import load_object

if TYPE_CHECKING:
    from verl.protocol import DataProto
    from verl.trainer.config import DataConfig

logger = logging.getLogger(__name__)


class AbstractDataGenerator(ABC):
    """Makes new rows from those that are there and from the last batch.

    A generator with ``state_dict`` and ``load_state_dict`` is saved with the data set.

    Args:
        config: the ``data.datagen`` section.
    """

    def __init__(self, config: Any) -> None:
        self.config = config

    @abstractmethod
    def generate(self, dataset: DynamicGenDataset) -> Iterable[Mapping[str, Any]]:
        """New rows, with the columns of the training files; none at all is fine.

        Args:
            dataset: the data set so far; ``dataset.last_batch`` is the batch that was just trained on.

        Returns:
            rows of plain values (what JSON can hold): a list of dicts, or anything that iterates over
            such, as a ``datasets.Dataset`` does.
        """


class DynamicGenDataset(RLHFDataset):
    """:class:`RLHFDataset` to which ``data.datagen`` adds rows after every step.

    The trainer calls :meth:`on_batch_end`. New rows are checked and filtered like those of a file
    and stand behind all others, so ``row_index`` never changes its meaning; they are drawn from
    the next epoch on. They are part of the data set's state, and so of a checkpoint: a resumed run
    has them without the generator being asked again. Rows live in the trainer's process, which
    is why ``data.dataloader_num_workers`` must be 0. The length of a run is fixed when it begins.

    Args:
        data_files, tokenizer, config, processor, max_samples: as for :class:`RLHFDataset`.

    Raises:
        ConfigError: ``data.datagen`` names no :class:`AbstractDataGenerator`, or rows are read ahead.
        DataError: as :class:`RLHFDataset`.
    """

    def __init__(
        self,
        data_files: str | Sequence[str],
        tokenizer: Any,
        config: DataConfig,
        processor: Any = None,
        max_samples: int = -1,
    ) -> None:
        if config.dataloader_num_workers != 0:
            raise ConfigError(
                f"data.datagen: rows that are generated live in the trainer's process, but data.dataloader_num_workers="
                f"{config.dataloader_num_workers} other processes read rows. Set data.dataloader_num_workers=0."
            )
        super().__init__(data_files, tokenizer, config, processor, max_samples)
        self.generator = _load_generator(config)
        self.num_from_files = len(self.rows)
        self.last_batch: DataProto | None = None
        self.generated = GeneratedRows(self.columns)
        self.files.append(self.generated)

    def on_batch_end(self, batch: DataProto) -> None:
        """Ask the generator for rows.

        Args:
            batch: the batch that was just trained on.

        Raises:
            DataError: a generated row cannot be used.
        """
        self.last_batch = batch
        self.append(self.generator.generate(self))
        self.last_batch = None

    def append(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Put rows behind all others; either all are taken or none.

        Raises:
            DataError: a row lacks a column, has an unknown one, or cannot be used; the place in the message
                is its number among all generated rows.
        """
        before = len(self.generated)
        self.generated.extend(rows, required=set(self.columns) - {"extra_info"})
        numbers = [(len(self.files) - 1, number) for number in range(before, len(self.generated))]
        if not numbers:
            return
        complete = False
        try:
            for key in self._media_keys():
                if key in self.generated.columns:
                    self._refuse_media(self.generated, key)
            kept = self._usable(numbers)
            complete = True
        finally:
            if not complete:
                self.generated.shorten(before)
        self.rows = self.rows + kept
        logger.info("generated %d rows, kept %d; %d rows now", len(numbers), len(kept), len(self))

    def state_dict(self) -> dict[str, Any]:
        """The rows that were generated, which of them are kept, and the generator's own state."""
        state = {
            "num_from_files": self.num_from_files,
            "generated": json.dumps(self.generated.all_rows()),
            "kept": [number for _, number in self.rows[self.num_from_files :]],
        }
        if hasattr(self.generator, "state_dict"):
            state["generator"] = self.generator.state_dict()  # type: ignore[attr-defined]
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take the rows of a checkpoint.

        Raises:
            DataError: the files have not the rows that they had.
        """
        if state["num_from_files"] != self.num_from_files:
            raise DataError(
                f"the training files have {self.num_from_files} usable rows, and had {state['num_from_files']} when "
                "the checkpoint was made. Resume with the data and the filters that the run began with."
            )
        self.generated.shorten(0)
        self.generated.extend(json.loads(state["generated"]), required=set())
        file = len(self.files) - 1
        self.rows = self.rows[: self.num_from_files] + [(file, number) for number in state["kept"]]
        if "generator" in state:
            self.generator.load_state_dict(state["generator"])  # type: ignore[attr-defined]


class GeneratedRows(DataFile):
    """Rows in memory that are read like those of a file.

    Args:
        columns: of the files that the rows stand behind.
    """

    def __init__(self, columns: Sequence[str]) -> None:
        self.path = Path("generated by data.datagen")
        self.columns = list(columns)
        self._rows: list[Row] = []
        self._table = None

    def extend(self, rows: Iterable[Mapping[str, Any]], required: set[str]) -> None:
        """Add rows, as they are after a round trip through JSON, so that a resumed run has the same.

        Args:
            rows: mappings.
            required: columns that each must have.

        Raises:
            DataError: one is no mapping, has not the columns, or cannot be written as JSON.
        """
        added: list[Row] = []
        for row in rows:
            place = f"{self.path}, row {len(self) + len(added)}"
            if not isinstance(row, Mapping):
                raise DataError(f"{place}: expected a mapping of columns, got {type(row).__name__} {row!r:.80}.")
            missing, unknown = sorted(required - set(row)), sorted(set(row) - set(self.columns))
            if missing or unknown:
                wrong = f"lacks {', '.join(missing)}" if missing else f"has the unknown column {', '.join(unknown)}"
                raise DataError(
                    f"{place}: it {wrong}. A generated row needs the columns of the training files: "
                    f"{', '.join(self.columns)}."
                )
            try:
                added.append(json.loads(json.dumps(dict(row), allow_nan=False)))
            except (TypeError, ValueError) as error:
                raise DataError(
                    f"{place}: it cannot be kept in a checkpoint, because it holds more than plain values: {error}. "
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
    cls = load_object(datagen.path or "", datagen.name or "", "data.datagen")
    if not (isinstance(cls, type) and issubclass(cls, AbstractDataGenerator)):
        raise ConfigError(
            f"data.datagen: '{datagen.name}' in {datagen.path} is not a class that inherits from "
            "verl.utils.dataset.dynamicgen_dataset.AbstractDataGenerator."
        )
    return cls(datagen)
