"""Rules about VeOmni: it is installed, and its model of the folder gives what Transformers' own gives."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from verl.base.requirements import install_command
from verl.config import FSDPEngineConfig, Problem
from verl.config.model import VEOMNI_FAMILIES
from verl.utils.model_facts import model_files


def model(section: str, engine: FSDPEngineConfig, path: str) -> Iterator[Problem]:
    """Check that VeOmni can hold the model in the folder ``path`` as ``section`` says."""
    key = f"{section.removesuffix('.fsdp_config').removesuffix('.model')}.strategy"
    if importlib.util.find_spec("veomni") is None:
        remedy = f"{install_command('veomni')} on every node, or use strategy=fsdp2"
        yield Problem(key, "veomni", "VeOmni is not installed", "fsdp2", remedy)
    kind = model_files.config_entries(Path(path).expanduser()).get("model_type")
    if kind is not None and kind not in VEOMNI_FAMILIES:
        cause = f"VeOmni's {kind} has not been compared with that of Transformers"
        yield Problem(key, "veomni", cause, "fsdp2", f"or train one of {', '.join(VEOMNI_FAMILIES)}")
    if engine.tensor_parallel_size > 1:
        size, remedy = engine.tensor_parallel_size, "or use strategy=fsdp2"
        yield Problem(f"{section}.tensor_parallel_size", size, "VeOmni's matrices are not divided", "1", remedy)
