"""Names of public modules in five versions of verl: each is here, or says why not."""

from __future__ import annotations

from pathlib import Path

from benchmarks.public_imports import UNEXPLAINED
from benchmarks.public_names import VERSIONS, count_names, public_names

LINES = (Path(__file__).resolve().parents[1] / "public_names.txt").read_text().splitlines()

LEFT = {
    "verl.single_controller.base.Worker.create_transferqueue_client",
    "verl.single_controller.base.Worker.env_keys",
    "verl.trainer.main_ppo.TaskRunner.add_teacher_model_resource_pool",
    "verl.trainer.main_ppo_v0.BaseTaskRunner.add_teacher_model_resource_pool",
    "verl.utils.dataset.multiturn_sft_dataset.MultiTurnSFTDataset.sanity_check",
    "verl.workers.config.HFModelConfig.get_processor",
    "verl.workers.config.model.HFModelConfig.get_processor",
    "verl.workers.engine.base.BaseEngine.get_per_tensor_param_delta_shard",
    "verl.workers.engine.base.BaseEngine.get_per_tensor_param_shard",
    "verl.workers.engine.base.BaseEngine.is_optimizer_offload_enabled",
    "verl.workers.engine.base.BaseEngine.is_param_offload_enabled",
    "verl.workers.engine.base.BaseEngine.prime_delta_snapshots",
}
"""Attributes of classes that are missing without a word."""
SENDING = "verl.utils.tracking.ValidationGenerationsLogger.log_generations_to_"


def test_every_name_is_here_or_says_why_not():
    counted = count_names(public_names(LINES))
    missing = {name for (kind, _), names in counted.rest.items() if kind == UNEXPLAINED for _, name in names}
    assert {name for name in missing if not name.startswith(SENDING)} <= LEFT
    assert counted.resolved_names > 950


def test_names_by_version():
    lines = [
        "# a comment",
        "dev,v0.8.0\tverl.protocol\tDataProto\tclass\t(batch=None)",
        "v0.8.0\tverl.protocol\tDataProto.chunk\tmethod\t(chunks)",
        "v0.8.0\tverl.protocol\tDataProto.no_such\tmethod\t()",
        "head\tverl.models.mcore\tget_mcore_forward_fn\tdef\t(hf_config)",
        "head\tverl.no_such\t(module)\tmodule",
    ]
    counts = {version: count_names(public_names(lines, version)) for version in VERSIONS}
    assert [(c.resolved_names, c.names) for c in counts.values()] == [(1, 1), (2, 3), (0, 0), (0, 0), (0, 2)]
    assert [kind for kind, _ in counts["head"].rest] == ["other design", UNEXPLAINED]
    assert public_names(lines, "dev") == {("verl.protocol", "DataProto"): [("class", "(batch=None)")]}
