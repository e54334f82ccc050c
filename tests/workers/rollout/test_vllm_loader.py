"""What a worker of vLLM loads of an update; vLLM itself is not needed."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import nn

import verl.workers.rollout.engine_side

NAMES = [
    *(f"model.layers.0.mlp.experts.{expert}.{kind}_proj.weight" for kind in ("gate", "down") for expert in range(16)),
    "model.layers.0.mlp.gate.weight",
]


@pytest.fixture
def loader(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(verl.workers.rollout.engine_side.__path__[0])))
    return importlib.import_module("verl_vllm")


class Model(nn.Module):
    """A model with two layers, of whose 16 experts this worker has the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Module(), nn.Module()])
        for layer in self.layers:
            layer.register_buffer("expert_map", torch.tensor([-1] * 14 + [0, 1]))
        self.loaded: list[str] = []

    def load_weights(self, weights):
        self.loaded = [name for name, _ in weights]


@pytest.mark.parametrize("enable_eplb", [False, True])
def test_experts_of_other_workers_are_not_loaded(
    loader: ModuleType, monkeypatch: pytest.MonkeyPatch, enable_eplb: bool
) -> None:
    model, worker = Model(), loader.WeightLoader()
    worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(enable_eplb=enable_eplb))
    config = SimpleNamespace(hf_text_config=SimpleNamespace(num_hidden_layers=2))
    worker.model_runner = SimpleNamespace(get_model=lambda: model, model_config=config)
    reload = ModuleType("vllm.model_executor.model_loader.reload")
    reload.initialize_layerwise_reload = lambda model: model.to("meta")  # as vLLM does, the maps too
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    worker.begin_weights()
    worker._load_weights(model, ((name, torch.zeros(1)) for name in NAMES))
    own = [name for name in NAMES if ".experts." not in name or ".14." in name or ".15." in name]
    assert model.loaded == (NAMES if enable_eplb else own)


def test_copies_of_what_waits_are_counted(loader: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = torch.arange(8.0)
    call = SimpleNamespace(arguments={"loaded_weight": memory[2:4], "other": torch.ones(1)})
    reload = ModuleType("vllm.model_executor.model_loader.reload.layerwise")
    reload.LAYERWISE_INFO = {nn.Module(): SimpleNamespace(loaded_weights=[("weight", call)])}
    monkeypatch.setitem(sys.modules, reload.__name__, reload)
    assert loader._copy_waiting(memory) == 1, "after which the device is waited for"
    memory.zero_()
    assert call.arguments["loaded_weight"].tolist() == [2, 3]
    assert loader._copy_waiting(memory) == 0
