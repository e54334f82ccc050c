"""Statistics and samples of a data set, collected before a run starts."""

from __future__ import annotations

import collections
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from verl.datasets.chat import token_lengths
from verl.datasets.files import DataFile
from verl.datasets.prompt_images import PromptImages, RowImages
from verl.errors import DataError
from verl.utils.transformers_private import decoded
from verl.vision.families import IMAGE_TOKEN, VIDEO_TOKEN

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


EXAMPLES = 3  # rows shown for each problem
BINS = 10


class Inspectable(Protocol):
    """Interface of the data sets that can be inspected; all of this package implement it."""

    files: list[DataFile]
    rows: list[tuple[int, int]]
    tokenizer: PreTrainedTokenizerBase
    images: PromptImages

    def __len__(self) -> int: ...

    def __getitem__(self, item: int) -> Any: ...

    def place(self, item: int) -> str:
        """File and row of an item."""
        ...

    def texts(self, item: int) -> list[str]:
        """The sequences of an item as text."""
        ...

    def sequences(self, item: int) -> Sequence[tuple[list[int], list[int]]]:
        """Token ids and loss mask of each sequence of an item, before truncation."""
        ...

    def row_images(self, item: int) -> RowImages:
        """The images of an item, as they were measured when the files were opened."""
        ...


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One rendered sequence."""

    title: str
    runs: list[tuple[bool, str]]
    """Consecutive pieces of text, each with whether it is trained on."""
    tokens: int
    trained: int


@dataclass(kw_only=True)
class DataReport:
    """The findings about one list of files."""

    name: str
    rows: int
    limit: int
    """Length of the longest sequence that is not truncated, in tokens."""
    sources: dict[str, int]
    """Rows by data source, or by file where rows name no source."""
    gaps: dict[str, int]
    """Number of rows without a value, by column; only columns with gaps."""
    lengths: list[int]
    """Tokens of each row; for a pair, of the longer side."""
    too_long: list[int]
    """Rows longer than the limit, the longest first."""
    trained: float
    """Share of the tokens that are trained on, after truncation."""
    untrained: list[int]
    """Rows left without any token to train on by truncation."""
    duplicates: list[tuple[int, int]]
    """Rows that repeat an earlier one, with that row."""
    unusable: list[tuple[int, str]]
    """Rows at which a run would stop, with its error message."""
    images: list[list[int]]
    """Tokens of each image, by row."""
    broken: list[str]
    """Fault of each row that a run leaves out for an image that cannot be used; not among the rows."""
    samples: list[Sample]
    places: dict[int, str] = field(default_factory=dict)
    """File and row of the items that the report mentions."""
    texts: set[str] = field(default_factory=set, repr=False)


def inspect_dataset(dataset: Inspectable, name: str, limit: int, filters: bool) -> DataReport:
    """Read every row as a run would, and report.

    Args:
        dataset: opened so that it refuses no row for its length.
        name: the setting that names the files, for the report.
        limit: length of the longest sequence that is not truncated, in tokens.
        filters: the run leaves out longer rows, so they are not read.
    """
    rows = range(len(dataset))
    texts = [dataset.texts(item) for item in rows]
    flat = token_lengths([text for sides in texts for text in sides], dataset.tokenizer)
    numbers = iter(flat)
    images = [dataset.row_images(item) for item in rows]
    # Each image has one token in the text of every side.
    added = [sum(row_images.tokens) - len(row_images.tokens) for row_images in images]
    lengths = [max(next(numbers) for _ in sides) + more for sides, more in zip(texts, added, strict=True)]
    too_long = sorted((item for item in rows if lengths[item] > limit), key=lambda item: -lengths[item])
    unusable, untrained, trained, tokens = [], [], 0, 0
    for item in rows:
        if filters and lengths[item] > limit:
            continue
        try:
            read = dataset[item]
        except DataError as error:
            unusable.append((item, str(error)))
            continue
        if "loss_mask" in read:
            count = int(read["loss_mask"].sum())
            trained += count
            tokens += int(read["attention_mask"].sum())
            if not count:
                untrained.append(item)
    first: dict[str, int] = {}
    written = ["\0".join([*sides, row_images.digest]) for sides, row_images in zip(texts, images, strict=True)]
    duplicates = [(item, first[text]) for item, text in enumerate(written) if first.setdefault(text, item) != item]
    bad = {item for item, _ in unusable}
    usable = [item for item in rows if lengths[item] <= limit and item not in bad]
    named = {
        *too_long[:EXAMPLES],
        *untrained[:EXAMPLES],
        *(item for pair in duplicates[:EXAMPLES] for item in pair),
        *bad,
    }
    return DataReport(
        name=name,
        rows=len(dataset),
        limit=limit,
        sources=_sources(dataset),
        gaps=_gaps(dataset),
        lengths=lengths,
        too_long=too_long,
        trained=trained / tokens if tokens else 0.0,
        duplicates=duplicates,
        unusable=unusable,
        untrained=untrained,
        images=[row_images.tokens for row_images in images],
        broken=list(dataset.images.broken),
        samples=[sample for item in _examples(usable, lengths) for sample in _samples(dataset, item)],
        places={item: dataset.place(item) for item in named},
        texts=set(written),
    )


def histogram(values: Sequence[int], bins: int = BINS) -> list[tuple[int, int, int]]:
    """Count integers in at most ``bins`` bins of equal width, as (first, last, count).

    >>> histogram([1, 2, 2, 9], bins=3)
    [(1, 3, 3), (4, 6, 0), (7, 9, 1)]
    """
    low, high = min(values), max(values)
    width = -(-(high - low + 1) // bins)
    counts = collections.Counter((value - low) // width for value in values)
    last = (high - low) // width
    return [(low + k * width, low + (k + 1) * width - 1, counts[k]) for k in range(last + 1)]


def quantiles(values: Sequence[int]) -> Mapping[str, float]:
    """min, median, mean, p95 (the smallest value that 95% do not exceed) and max."""
    ordered = sorted(values)
    return {
        "min": ordered[0],
        "median": statistics.median(ordered),
        "mean": statistics.fmean(ordered),
        "p95": ordered[-(-95 * len(ordered) // 100) - 1],
        "max": ordered[-1],
    }


def mask_runs(ids: Sequence[int], mask: Sequence[int], tokenizer: PreTrainedTokenizerBase) -> list[tuple[bool, str]]:
    """Decode a sequence in pieces, each with whether it is trained on."""
    runs: list[tuple[bool, list[int]]] = []
    for token, learn in zip(ids, mask, strict=True):
        if not runs or runs[-1][0] != bool(learn):
            runs.append((bool(learn), []))
        runs[-1][1].append(token)
    # A piece is decoded as a whole, since a character may consist of several tokens.
    return [(learn, decoded(tokenizer, tokens)) for learn, tokens in runs]


def _shown_images(text: str) -> str:
    """Write the tokens of an image or a video as one of them and their number."""
    for token in (IMAGE_TOKEN, VIDEO_TOKEN):
        many = re.compile(f"(?:{re.escape(token)}){{2,}}")
        text = many.sub(lambda match, token=token: f"{token} x {len(match[0]) // len(token)}", text)
    return text


def _sources(dataset: Any) -> dict[str, int]:
    if hasattr(dataset, "sources"):
        names = dataset.sources()
    else:
        names = [str(dataset.files[file].path) for file, _ in dataset.rows]
    return dict(collections.Counter(names).most_common())


def _gaps(dataset: Inspectable) -> dict[str, int]:
    columns = dict.fromkeys(column for file in dataset.files for column in file.columns)
    gaps: collections.Counter[str] = collections.Counter()
    for file_index, file in enumerate(dataset.files):
        used = {row for which, row in dataset.rows if which == file_index}
        for column in columns:
            if column not in file.columns:
                gaps[column] += len(used)
            else:
                gaps[column] += sum(value is None for row, value in enumerate(file.column(column)) if row in used)
    return {column: count for column, count in gaps.items() if count}


def _examples(usable: Sequence[int], lengths: Sequence[int]) -> list[int]:
    """The first, the shortest and the longest row."""
    if not usable:
        return []
    by_length = sorted(usable, key=lambda item: lengths[item])
    return list(dict.fromkeys([usable[0], by_length[0], by_length[-1], *usable]))[:EXAMPLES]


def _samples(dataset: Inspectable, item: int) -> list[Sample]:
    sequences = dataset.sequences(item)
    sides = ("",) if len(sequences) == 1 else (", chosen", ", rejected")
    has_images = bool(dataset.row_images(item).tokens)
    return [
        Sample(
            title=f"{dataset.place(item)}{side}",
            runs=[
                (learn, _shown_images(piece) if has_images else piece)
                for learn, piece in mask_runs(ids, mask, dataset.tokenizer)
            ],
            tokens=len(ids),
            trained=sum(mask),
        )
        for side, (ids, mask) in zip(sides, sequences, strict=True)
    ]
