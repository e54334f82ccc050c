"""How training rows are drawn: samplers, shares of sources, rows that are generated."""

from __future__ import annotations

from collections.abc import Iterator

from verl.trainer.config.ppo import PPOConfig
from verl.trainer.config.problems import Problem
from verl.utils.registry import suggest

Problems = Iterator[Problem]


def order_of_rows(config: PPOConfig) -> Problems:
    """One thing orders the rows, and it exists."""
    from verl.utils.dataset.build import SAMPLERS

    data, sampler = config.data, config.data.sampler
    if data.source_weights and (sampler.class_path or sampler.class_name):
        remedy = "set one of the two; a sampler of your own can read data.source_weights itself"
        wrong = "data.sampler decides the order of the rows, so nothing would use the weights"
        yield Problem("data.source_weights", dict(data.source_weights), wrong, remedy=remedy)
    for source, weight in data.source_weights.items():
        if not 0 <= weight < float("inf"):
            yield Problem(f"data.source_weights.{source}", weight, "a weight is no share", "a number >= 0")
    if data.source_weights and not sum(data.source_weights.values()) > 0:
        wrong = "no source has a positive weight"
        yield Problem("data.source_weights", dict(data.source_weights), wrong, remedy="give one at least")
    if sampler.class_path is not None or sampler.class_name is None:
        return
    if sampler.class_name not in SAMPLERS:
        wrong = f"there is no such sampler.{suggest(sampler.class_name, list(SAMPLERS))}"
        remedy = "set data.sampler.class_path too for a class of your own"
        yield Problem("data.sampler.class_name", sampler.class_name, wrong, ", ".join(SAMPLERS), remedy)
    elif data.dataloader_num_workers != 0:
        yield _reads_ahead(data.dataloader_num_workers, f"data.sampler.class_name={sampler.class_name}")


def growing_data(config: PPOConfig) -> Problems:
    """Generated rows have a generator, a data set that takes them, and no reader that misses them."""
    data = config.data
    if data.datagen.path is None:
        if data.datagen.name is not None:
            remedy = "set data.datagen.path to the file that holds it"
            yield Problem("data.datagen.name", data.datagen.name, "data.datagen.path is not set", remedy=remedy)
        return
    if data.custom_cls.path is not None:
        wrong = "data.custom_cls replaces the data set that would take the generated rows"
        remedy = "set one of the two; a class of your own can inherit from DynamicGenDataset and be its own generator"
        yield Problem("data.datagen.path", data.datagen.path, wrong, remedy=remedy)
    if data.dataloader_num_workers != 0:
        yield _reads_ahead(data.dataloader_num_workers, "data.datagen")


def _reads_ahead(workers: int, why: str) -> Problem:
    wrong = f"these processes read rows ahead of the step that {why} has to see first"
    return Problem("data.dataloader_num_workers", workers, wrong, "0", "set data.dataloader_num_workers=0")
