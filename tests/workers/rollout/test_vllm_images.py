"""Models with images in the real vLLM, against the trainer and the engine ``native``; by ``make test-vllm``."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
from torch.testing import assert_close

from tests.support.vision_models import DENSE_FAMILIES, heads_of_32
from tests.vision.agent_batches import VisionAgents
from tests.vision.test_agents_with_images import LOOPS
from tests.workers.rollout.images_of_engines import check_a_run, check_adapters, check_log_probs
from tests.workers.rollout.vllm_engines import KWARGS, needs_vllm

pytestmark = [
    needs_vllm,
    pytest.mark.skipif(importlib.util.find_spec("torchvision") is None, reason="vLLM needs torchvision for images"),
]


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("qwen2_5_vl", "films"),
        ("qwen3_vl", "films"),
        pytest.param("qwen2_vl", "films", marks=pytest.mark.slow),
        pytest.param("qwen3_vl_moe", "films", marks=pytest.mark.slow),
        pytest.param("qwen2_5_vl", "pictures", marks=pytest.mark.slow),
    ],
)
def test_log_probs_are_the_trainers_and_greedy_tokens_those_of_native(family: str, rows: str, tmp_path: Path) -> None:
    check_log_probs("vllm", family, rows, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", DENSE_FAMILIES)
def test_adapters_of_the_language_model_are_applied_by_vllm(family: str, tmp_path: Path) -> None:
    check_adapters("vllm", family, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_a_run_with_one_engine_split_over_two_ranks(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_cluster: None
) -> None:
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(tmp_path / "metrics.jsonl"))
    split = {
        "trainer__controller": "ray",
        "trainer__n_gpus_per_node": 2,
        "actor_rollout_ref__rollout__tensor_model_parallel_size": 2,
    }
    check_a_run("vllm", family, tmp_path, split)


@pytest.mark.slow
def test_agent_loops_show_the_server_pictures_in_later_turns(tmp_path: Path) -> None:
    """Rows with and without images; the second turn has a picture more. Log-probs are the trainer's."""
    (tmp_path / "loops.py").write_text(LOOPS)
    (tmp_path / "loops.yaml").write_text(f"- {{name: shows, _target_: Shows, path: {tmp_path}/loops.py}}\n")
    rollout = "actor_rollout_ref__rollout__"
    settings = {
        f"{rollout}enforce_eager": "true",
        f"{rollout}engine_kwargs__vllm__kv_cache_memory_bytes": KWARGS["kv_cache_memory_bytes"],
        f"{rollout}agent__agent_loop_config_path": tmp_path / "loops.yaml",
    }
    agents = VisionAgents(tmp_path, "qwen2_5_vl", "vllm", heads_of_32("qwen2_5_vl"), **settings)
    found = agents.answer(agents.prompts(agent_name=["shows"] * 4))
    assert found.non_tensor_batch["trajectory_message"].tolist() == [""] * 8
    assert [len(row["image_grid_thw"]) for row in found.non_tensor_batch["multi_modal_inputs"]] == [*[2] * 6, 1, 1]
    drawn = found.batch["response_mask"].bool()
    assert_close(found.batch["rollout_log_probs"][drawn], agents.trainers_log_probs(found)[drawn], atol=3e-5, rtol=0)
