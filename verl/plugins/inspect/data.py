"""``python -m verl.trainer.inspect_data``: look at the data of a run before it starts.

::

    python -m verl.trainer.inspect_data data.train_files=… actor_rollout_ref.model.path=…
    python -m verl.trainer.inspect_data sft data.train_files=… model.path=…
    python -m verl.trainer.inspect_data dpo --no-color data.train_files=… model.path=…

The first word is the kind of run: ppo (the default), sft, rm or dpo; the settings of that run follow, at
least those of the data and the model. ``--no-color`` marks trained text by [[brackets]] instead of colours,
``--cfg job`` prints the settings. Loads the tokenizer, but no model.
The exit code is 1 if a run would stop at a row, 2 if files or settings cannot be used.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from omegaconf import OmegaConf
from rich.table import Table
from rich.text import Text

from verl.config import DPOConfig, PPOConfig, RMConfig, SFTConfig, local_copies
from verl.errors import ConfigError
from verl.trainer.config.command_line import command
from verl.utils.console import console, show

if TYPE_CHECKING:
    from torch.utils.data import Dataset
    from transformers import PreTrainedTokenizerBase, ProcessorMixin

    from verl.config import (
        BaseConfig,
        DataConfig,
        HFModelConfig,
        PreferenceDataConfig,
        SFTDataConfig,
    )
    from verl.plugins.inspect.report import DataReport, Sample

NO_COLOR = "--no-color"
BAR = 40
"""Characters of the longest bar."""
SHOWN_TEXT = 2000
"""Characters shown of a sample."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A kind of run: how to open its files and which settings bound its sequences."""

    root: type[BaseConfig]
    config_name: str
    model: Callable[[Any], HFModelConfig]
    open: Callable[..., Any]
    """(files, data section, tokenizer, processor, max_samples) to a data set that refuses no row for its length."""
    limit: str
    """Field of the data section with the maximal sequence length."""
    sequence: str
    """Name of a sequence in the length table."""


def _changed(data: Any, **changes: object) -> Any:
    """Return a section with other values, typed or, for a class of the user's own, as composed."""
    return OmegaConf.merge(data, changes) if OmegaConf.is_config(data) else replace(data, **changes)


def _open_prompts(
    files: str | Sequence[str],
    data: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    max_samples: int,
) -> Dataset:
    from verl.datasets import create_rl_dataset

    # Prompts with images are measured although the rest is cut: no length is refused here.
    open_config = _changed(data, truncation="right", filter_overlong_prompts=False, max_prompt_length=sys.maxsize)
    return create_rl_dataset(files, open_config, tokenizer, processor, is_train=False, max_samples=max_samples)


def _open_conversations(
    files: str | Sequence[str],
    data: SFTDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    max_samples: int,
) -> Dataset:
    from verl.datasets import create_sft_dataset

    open_config = _changed(data, truncation="right", max_length=sys.maxsize)
    return create_sft_dataset(files, open_config, tokenizer, processor, max_samples)


def _open_pairs(
    files: str | Sequence[str],
    data: PreferenceDataConfig,
    tokenizer: PreTrainedTokenizerBase,
    processor: ProcessorMixin | None,
    max_samples: int,
) -> Dataset:
    from verl.datasets.build import create_rm_dataset

    return create_rm_dataset(files, _changed(data, max_length=sys.maxsize), tokenizer, processor, max_samples)


KINDS = {
    "ppo": Kind(
        root=PPOConfig,
        config_name="ppo_trainer",
        model=lambda config: config.actor_rollout_ref.model,
        open=_open_prompts,
        limit="max_prompt_length",
        sequence="prompt",
    ),
    "sft": Kind(
        root=SFTConfig,
        config_name="sft_trainer",
        model=lambda config: config.model,
        open=_open_conversations,
        limit="max_length",
        sequence="conversation",
    ),
    "rm": Kind(
        root=RMConfig,
        config_name="rm_trainer",
        model=lambda config: config.model,
        open=_open_pairs,
        limit="max_length",
        sequence="pair (its longer side)",
    ),
}
KINDS["dpo"] = replace(KINDS["rm"], root=DPOConfig, config_name="dpo_trainer")


def inspect(config: Any, kind: Kind, is_plain: bool = False) -> int:
    """Print a report on training and validation files.

    Args:
        config: the whole configuration of the run.
        kind: of the run.
        is_plain: mark trained tokens by brackets instead of colours.

    Returns:
        number of rows at which a run would stop.
    """
    # Here, not above: they need torch and transformers, and --help does not.
    from verl.datasets.mixing import check_weights
    from verl.plugins.inspect.report import inspect_dataset
    from verl.trainer.config.load import data_section
    from verl.utils.tokenizer import hf_processor, tokenizer_of

    config = local_copies(config)
    model, data = kind.model(config), config.data
    tokenizer = tokenizer_of(model)
    processor = hf_processor(model.tokenizer_path or model.path, trust_remote_code=model.trust_remote_code)
    filters = bool(data.get("filter_overlong_prompts"))
    reports, truths, unreadable = [], [], 0
    for split in ("train", "val"):
        key = f"data.{split}_files"
        files = data[f"{split}_files"]
        if not files:
            continue
        dataset = kind.open(files, data_section(config), tokenizer, processor, data[f"{split}_max_samples"])
        needed = ("files", "images", "texts", "sequences", "place", "row_images", "use_settings")
        if missing := [name for name in needed if not hasattr(dataset, name)]:
            raise ConfigError(
                f"data.custom_cls: {type(dataset).__name__} cannot be inspected, since it has no "
                f"{', '.join(missing)}. Let it inherit from one of verl.utils.dataset."
            )
        dataset.use_settings(data)  # opened leniently; from here on rows are read as the run reads them
        report = inspect_dataset(dataset, key, data[kind.limit], filters)
        if split == "train" and data.get("source_weights"):
            check_weights(data.source_weights, list(report.sources))
        reports.append(report)
        lines, count = _truth_findings(config, dataset) if kind.root is PPOConfig else ([], 0)
        truths.append(lines)
        unreadable += count
    for report, lines in zip(reports, truths, strict=True):
        _show_report(report, kind, config, filters, lines, is_plain)
    if len(reports) == 2:
        train, val = (report.texts for report in reports)
        overlap = f"{len(train & val):,} of {len(val):,} different validation rows are training rows too"
        show(f"\noverlap: {overlap if train & val else 'no validation row is a training row'}")
    return unreadable + sum(len(report.unusable) for report in reports)


def _truth_findings(config: Any, dataset: object) -> tuple[list[str], int]:
    """Describe the ground truths, and count those that their scorer cannot read, at which a run would stop."""
    from verl.datasets.rl_dataset import RLHFDataset
    from verl.scorers import FORMATS, UnknownDataSourceError
    from verl.workers.reward_manager.naive import unreadable_truths

    model = config.reward_model
    if config.custom_reward_function.path or model.enable or not isinstance(dataset, RLHFDataset):
        return ["ground truths: not read; the run does not score by a scorer of verl"], 0
    if not any("reward_model" in file.columns for file in dataset.files):
        return ["ground truths: none; the files have no column reward_model"], 0
    name = FORMATS.get(model.reward_format, model.reward_format) if model.reward_format else None
    try:
        unreadable = unreadable_truths(dataset, name, config.data.reward_fn_key)
    except UnknownDataSourceError as error:
        return [f"ground truths: not read; {error}"], 0
    if not unreadable:
        return ["ground truths: all can be read by their scorers"], 0
    lines = [f"ground truths: {len(unreadable):,} rows cannot be read by their scorer and stop the run; the first:"]
    return [*lines, *(f"  {dataset.place(item)}, {source}: {error}" for item, source, error in unreadable[:3])], len(
        unreadable
    )


def _show_report(report: DataReport, kind: Kind, config: Any, filters: bool, truths: list[str], is_plain: bool) -> None:
    data = config.data
    show(Text(f"\n{report.name}: {report.rows:,} rows", style="bold"))
    is_train = report.name == "data.train_files"
    show(_sources_table(report, data.get("source_weights") or {} if is_train else {}))
    show(_lengths_table(report, kind))
    for line in [*_findings(report, kind, data, filters), *truths]:
        show(line)
    if is_train:
        show(_tokens_per_step(report, kind, config, filters))
    legend = Text("\nsamples: ")
    legend.append("context", style="" if is_plain else "dim")
    legend.append(", ")
    _append_trained(legend, "the response is sampled here" if kind.root is PPOConfig else "trained on", is_plain)
    show(legend)
    for sample in report.samples:
        show(_sample_text(sample, kind, is_plain))


def _sources_table(report: DataReport, weights: dict[str, float]) -> Table:
    table = Table("source", "rows", "share of the data", *(["share of a batch"] if weights else []))
    for source, count in report.sources.items():
        cells = [source, f"{count:,}", f"{count / report.rows:.1%}"]
        if weights:
            cells.append(f"{weights.get(source, 0.0) / sum(weights.values()):.1%}")
        table.add_row(*map(Text, cells))
    return table


def _lengths_table(report: DataReport, kind: Kind) -> Table:
    from verl.plugins.inspect.report import histogram, quantiles

    summary = "  ".join(f"{name} {value:,.0f}" for name, value in quantiles(report.lengths).items())
    table = Table("tokens", "rows", "", title=f"tokens of a {kind.sequence}: {summary}", title_justify="left")
    bins = histogram(report.lengths)
    most = max(count for _, _, count in bins)
    for first, last, count in bins:
        style = "red" if first > report.limit else "yellow" if last > report.limit else "green"
        bar = "█" * max(round(BAR * count / most), 1 if count else 0)
        beyond = f"  beyond data.{kind.limit}" if first > report.limit and count else ""
        table.add_row(f"{first:,}-{last:,}", f"{count:,}", Text(bar + beyond, style=style))
    return table


def _findings(report: DataReport, kind: Kind, data: Any, filters: bool) -> list[str]:
    lines = []
    if report.too_long:
        count, lost = len(report.too_long), sum(report.lengths[i] - report.limit for i in report.too_long)
        if filters:
            outcome = "are left out (data.filter_overlong_prompts)"
        elif data.truncation == "error":
            outcome = "stop the run (data.truncation=error)"
        elif with_images := sum(bool(report.images[i]) for i in report.too_long):
            remainder = f"; the others are cut (data.truncation={data.truncation})" if with_images < count else ""
            outcome = f"{with_images:,} of them with images, which are never cut, stop the run{remainder}"
        else:
            outcome = f"are cut, {lost:,} tokens in all (data.truncation={data.truncation})"
        longest = ", ".join(f"{report.places[i]} with {report.lengths[i]:,}" for i in report.too_long[:3])
        lines.append(
            f"too long: {count:,} rows ({count / report.rows:.1%}) are longer than data.{kind.limit}={report.limit} "
            f"and {outcome}: {longest}"
        )
    else:
        lines.append(f"too long: none (data.{kind.limit}={report.limit})")
    lines += _image_findings(report)
    gaps = ", ".join(f"{column} in {count:,} rows" for column, count in report.gaps.items())
    lines.append(f"no value: {gaps or 'in no column'}")
    if report.duplicates:
        pairs = "; ".join(
            f"{report.places[item]} repeats {report.places[first]}" for item, first in report.duplicates[:3]
        )
        lines.append(f"duplicates: {len(report.duplicates):,} rows are written as an earlier one: {pairs}")
    else:
        lines.append("duplicates: none")
    if report.untrained:
        first = ", ".join(report.places[item] for item in report.untrained[:3])
        lines.append(
            f"nothing to learn: {len(report.untrained):,} rows ({len(report.untrained) / report.rows:.1%}) lose "
            f"everything that is trained on to data.truncation={data.truncation}: {first}"
        )
    if report.unusable:
        lines.append(f"unusable: {len(report.unusable):,} rows would stop the run; the first:")
        lines += [f"  {words}" for _, words in report.unusable[:3]]
    return lines


def _image_findings(report: DataReport) -> list[str]:
    lines = []
    tokens = [count for counts in report.images for count in counts]
    if tokens:
        row_tokens = [sum(counts) for counts in report.images if counts]
        share = sum(tokens) / sum(report.lengths)
        lines.append(
            f"images: {len(tokens):,} in {len(row_tokens):,} rows, {sum(tokens):,} tokens ({share:.1%} of all, "
            f"counted in the lengths above): {min(tokens):,} to {max(tokens):,} an image, at most {max(row_tokens):,} "
            "in a row"
        )
    if report.broken:
        count = len(report.broken)
        lines.append(f"broken images: {count:,} rows are left out, and not counted here; the first:")
        lines += [f"  {words}" for words in report.broken[:3]]
    return lines


def _tokens_per_step(report: DataReport, kind: Kind, config: Any, filters: bool) -> str:
    data, batch = config.data, config.data.train_batch_size
    used_lengths = [min(length, report.limit) for length in report.lengths if not filters or length <= report.limit]
    if not used_lengths:
        return "a step: no row is left"
    mean, steps = sum(used_lengths) / len(used_lengths), len(used_lengths) // batch
    if kind.root is PPOConfig:
        n = config.actor_rollout_ref.rollout.n
        return (
            f"a step: {batch:,} prompts x {n} responses: about {batch * n * mean:,.0f} prompt tokens and at most "
            f"{batch * n * data.max_response_length:,} response tokens; {steps:,} steps an epoch"
        )
    sides = 2 if kind.limit == "max_length" and kind.root is not SFTConfig else 1
    about = "at most" if sides == 2 else "about"
    return (
        f"a step: {batch:,} rows: {about} {batch * sides * mean:,.0f} tokens, {report.trained:.1%} of them trained on; "
        f"{steps:,} steps an epoch"
    )


def _sample_text(sample: Sample, kind: Kind, is_plain: bool) -> Text:
    text = Text(f"--- {sample.title}: {sample.tokens:,} tokens")
    if kind.root is not PPOConfig:
        text.append(f", {sample.trained:,} trained on")
    text.append("\n")
    left = SHOWN_TEXT
    for is_trained, piece in sample.runs:
        shown = piece if len(piece) <= left else f"{piece[:left]} … ({len(piece) - left:,} more characters)"
        left = max(0, left - len(piece))
        if is_trained:
            _append_trained(text, shown, is_plain)
        else:
            text.append(shown, style="" if is_plain else "dim")
    if kind.root is PPOConfig:
        _append_trained(text, "…", is_plain)
    return text


def _append_trained(text: Text, piece: str, is_plain: bool) -> None:
    text.append(f"[[{piece}]]" if is_plain else piece, style="" if is_plain else "green")


def main() -> None:
    """Run the command line."""
    arguments = [argument for argument in sys.argv[1:] if argument != NO_COLOR]
    if arguments and arguments[0] in ("-h", "--help"):
        sys.stdout.write(__doc__ or "")
        return
    name = arguments.pop(0) if arguments and arguments[0] in KINDS else "ppo"
    if arguments and "=" not in arguments[0] and not arguments[0].startswith("-"):
        sys.stderr.write(f"'{arguments[0]}' is no kind of run; there are {', '.join(KINDS)}.\n")
        raise SystemExit(2)
    is_plain = NO_COLOR in sys.argv or not console().is_terminal
    if not any(argument.lstrip("+").startswith("data.val_files=") for argument in arguments):
        arguments.append("data.val_files=[]")  # inspect only files that the user named
    kind, stops = KINDS[name], 0

    def run(config: Any) -> None:
        nonlocal stops
        stops = inspect(config, kind, is_plain)

    command(run, config_name=kind.config_name, root=kind.root, data_only=True)(arguments)
    if stops:
        raise SystemExit(1)
