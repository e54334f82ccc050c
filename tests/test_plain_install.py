"""What needs a package of an extra says so when it is used; each command runs without."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import verl.trainer

OF_EXTRAS = [
    *("anthropic", "av", "clearml", "datasets", "gcsfs", "gymnasium", "liger_kernel", "matplotlib", "mcp", "megatron"),
    *("mlflow", "openai", "s3fs", "sglang", "swanlab", "tensorboard", "trackio", "trl", "verifiers", "vllm", "wandb"),
]
IMPORT = """
import importlib, sys

sys.modules.update(dict.fromkeys({missing!r}))  # None: Python finds no such package
for module in {modules!r}:
    importlib.import_module(module)
"""


def test_commands_import_no_package_of_an_extra():
    commands = Path(verl.trainer.__file__).parent.glob("*.py")
    # The modules that main_*.py load when a run starts, and their own.
    named = r'"(verl\.[a-z0-9_.]+)(?::\w+)?"|^    +from (verl\.[\w.]+) import'
    runners = {a or b for path in commands for a, b in re.findall(named, path.read_text(), re.MULTILINE)}
    assert {"verl.plugins.serve.service", "verl.trainer.ppo.trainer", "verl.trainer.evaluation"} <= runners
    needed = sorted(runners - {"verl.plugins.endpoint.judge"})  # that is of the extra judge
    code = IMPORT.format(missing=OF_EXTRAS, modules=needed)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
