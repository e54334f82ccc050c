"""`verl plan --suggest`: layouts that fit, that are fastest, and that can be pasted."""

from __future__ import annotations

import json
import sys
from dataclasses import replace

import pytest

from benchmarks.plan_published import RUNS, show_factors, suggestions
from tests.plugins.plan.test_shapes import QWEN_7B
from verl.plugins.plan import constants
from verl.plugins.plan.advice import with_settings
from verl.plugins.plan.command import check_layouts, main, make_plan, show_suggestions
from verl.plugins.plan.suggest import suggest

ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
PARAMETERS = 7_615_616_512


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


def words_of(folder, gpus, *words):
    path = f"actor_rollout_ref.model.path={folder}"
    usual = ["algorithm.adv_estimator=grpo", f"{ROLLOUT}.name=vllm", f"{ROLLOUT}.n=8", "data.train_batch_size=128"]
    usual += [f"{ACTOR}.ppo_mini_batch_size=64", "data.max_prompt_length=1024", "data.max_response_length=3072"]
    return [path, *usual, "--gpus", str(gpus), *words]


def test_the_fastest_can_be_pasted_and_no_other_size_is_faster(folder, capsys):
    words = words_of(folder, 4, f"{ACTOR}.strategy=fsdp2", f"{ROLLOUT}.tensor_model_parallel_size=2")
    plan, _, keys = make_plan(words)
    found = suggest(plan, keys, check_layouts)
    best, second = found.layouts[:2]
    show_suggestions(plan, found)
    shown = capsys.readouterr().out
    assert " \\\n".join(f"    {word}" for word in best.words) in shown
    assert "fastest" in shown
    assert f"{second.plan.seconds:.1f}" in shown
    assert best.sizes != second.sizes
    assert best.plan.seconds <= 1.02 * second.plan.seconds
    # The command with its settings is the same plan, and a run that is not refused.
    pasted = make_plan([*words, *best.words])[0]
    check_layouts(pasted)
    assert pasted.excess <= 0
    assert pasted.stages == best.plan.stages
    assert not [word for word in best.words if word.startswith((f"{ACTOR}.strategy", f"{ROLLOUT}.tensor"))]
    # Ulysses and TP of 1, 2 and 4 on one node: all were tried, and no budget of tokens or offload makes one faster.
    assert found.tried == 5
    for offload in (False, True):
        for tokens in (4096, 8192, 16384, 32768):
            tried = {f"{ACTOR}.ppo_max_token_len_per_gpu": tokens, f"{ROLLOUT}.log_prob_max_token_len_per_gpu": tokens}
            tried[f"{ACTOR}.fsdp_config.optimizer_offload"] = offload
            other = replace(pasted, config=with_settings(pasted.config, tried))
            assert other.excess > 0 or other.seconds > best.plan.seconds / 1.02


def test_a_layout_of_megatron_with_uneven_stages_can_be_pasted(folder):
    # 30 layers in 4 stages: with embedding and head they are 32.
    (folder / "config.json").write_text(json.dumps(QWEN_7B | {"num_hidden_layers": 30}))
    section = f"{ACTOR}.megatron"
    words = words_of(folder, 4, "model_engine=megatron", f"{section}.pipeline_model_parallel_size=4")
    plan, _, keys = make_plan(words)
    best = suggest(plan, keys, check_layouts).layouts[0]
    counted = f"++{section}.override_transformer_config.account_for_loss_in_pipeline_split=true"
    assert counted in best.words
    pasted = make_plan([*words, *best.words])[0]
    check_layouts(pasted)
    assert pasted.stages == best.plan.stages


def test_where_nothing_fits_the_least_memory_is_said(folder, monkeypatch: pytest.MonkeyPatch, capsys):
    # Weights, gradients and two moments in fp32 are 16 bytes a parameter: 121.8 GB on one GPU, whatever is offloaded.
    monkeypatch.setattr(sys, "argv", ["plan", *words_of(folder, 1), "--suggest"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 1
    shown = " ".join(capsys.readouterr().out.split())
    assert "fit in 77 GB" in shown
    least = float(shown.partition("The passes of the smallest need ")[2].split()[0])
    assert 16 * PARAMETERS / 1e9 < least < 16 * PARAMETERS / 1e9 + 20


def test_layouts_are_written_as_json(folder, monkeypatch: pytest.MonkeyPatch, capsys):
    kept = [f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.ulysses_sequence_parallel_size=1"]
    kept.append(f"{ACTOR}.fsdp_config.tensor_parallel_size=1")
    monkeypatch.setattr(sys, "argv", ["plan", *words_of(folder, 4, *kept), "--suggest", "--json"])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == 0
    layouts = json.loads(capsys.readouterr().out)["layouts"]
    assert f"{ACTOR}.use_dynamic_bsz=true" in layouts[0]["settings"]
    assert layouts[0]["layout"].startswith("FSDP 4, rollout TP ")
    assert all(one["plan"]["fits"] for one in layouts)
    # One training layout; engines of 1, 2 and 4 ranks.
    assert sorted(one["layout"].partition("rollout TP ")[2][0] for one in layouts) == ["1", "2", "4"]


def test_what_takes_no_time_and_fits_stays_on_the_device(folder):
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(QWEN_7B | tiny | heads))
    plan, _, keys = make_plan(words_of(folder, 1))
    assert "offload" not in str(suggest(plan, keys, check_layouts).layouts[0])


def test_copies_of_a_mixture_may_share_experts(folder):
    mixture = {"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
    (folder / "config.json").write_text(json.dumps({**QWEN_7B, **mixture, "num_hidden_layers": 2}))
    kept = [f"{ACTOR}.strategy=fsdp2", f"{ACTOR}.ppo_micro_batch_size_per_gpu=1", f"{ACTOR}.fsdp_config.fsdp_size=-1"]
    plan, _, keys = make_plan(words_of(folder, 2, *kept))
    layouts = suggest(plan, keys, check_layouts).layouts
    assert {layout.rollout_sizes for layout in layouts} == {(1, 1, 1), (2, 1, 1), (1, 1, 2)}
    shared = next(layout for layout in layouts if layout.rollout_sizes == (1, 1, 2))
    assert {f"{ROLLOUT}.data_parallel_size=2", f"{ROLLOUT}.expert_parallel_size=2"} <= set(shared.words)
    assert "rollout TP 1, DP 2 that share experts" in str(shared)


@pytest.mark.slow
def test_factors_are_those_of_published_stages(tmp_path, capsys):
    show_factors(tmp_path)
    shown = capsys.readouterr().out
    assert f"all four: rollout {constants.ROLLOUT_FACTOR:.2f}, passes {constants.PASS_FACTOR:.2f}" in shown
    low, high = constants.STEP_RANGE
    assert f"19 of 22 within 30 %; published / planned {low:.2f} to {high:.2f}" in shown


@pytest.mark.slow
@pytest.mark.parametrize("run", RUNS, ids=lambda run: f"{run.source}-{run.model}-{run.gpus}-{run.gpu}")
def test_published_runs_fit(run, tmp_path):
    if run.layout:
        plan = make_plan([*run.words(tmp_path), *run.layout])[0]
        check_layouts(plan)
        assert plan.excess <= 0
    else:
        assert suggestions(run, tmp_path).layouts
