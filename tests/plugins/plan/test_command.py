"""The command `verl plan`: what it loads, what it says, how it ends."""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.plugins.plan.test_shapes import DEEPSEEK_V3, QWEN_7B
from verl.algorithms import adv_needs
from verl.algorithms.distillation import DISTILLATION_LOSSES, distillation_loss_info
from verl.algorithms.estimator_registry import ESTIMATORS
from verl.errors import ConfigError
from verl.plugins.plan.advice import changes, with_settings
from verl.plugins.plan.command import check_layouts, make_plan, seconds_in_words, show_plan
from verl.plugins.plan.teachers import WHOLE_VOCABULARY
from verl.trainer.roles import WITH_CRITIC, WITHOUT_CRITIC

ROOT = Path(__file__).parents[3]
NATIVE = "actor_rollout_ref.rollout.name=native"
ROLLOUT_RANKS = "actor_rollout_ref.rollout.tensor_model_parallel_size"
LOG_PROBS = "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=1"
UPDATES = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"
DORA = ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.lora.use_dora=true"]
MEGATRON = ("--config-name", "ppo_megatron_trainer")
STAGES = "actor_rollout_ref.actor.megatron.pipeline_model_parallel_size"
PIECES = "actor_rollout_ref.actor.megatron.virtual_pipeline_model_parallel_size"


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(QWEN_7B))
    return tmp_path


def plan_of(folder, *words):
    path = f"actor_rollout_ref.model.path={folder}"
    usual = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]
    plan = make_plan([path, *usual, "data.max_response_length=3584", *words])[0]
    check_layouts(plan)
    return plan


def test_the_command_answers_without_torch(folder):
    words = ["plan", f"actor_rollout_ref.model.path={folder}", "--gpus", "64", "--gpu", "H100", "--json"]
    code = (
        f"import sys; sys.modules.update(torch=None, transformers=None, ray=None); sys.argv[1:] = {words!r}\n"
        "from verl.cli.main import main; main()"
    )
    settings = ["algorithm.adv_estimator=grpo", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2"]
    code = code.replace("'--gpus'", f"*{settings!r}, '--gpus'")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["fits"]
    assert found["parameters"] == 7_615_616_512
    assert [stage["name"] for stage in found["stages"]] == ["rollout", "old log-probs", "actor update"]
    assert found["tokens_per_second"] > 0


def test_the_page_has_the_seconds_of_its_command(folder):
    page = (ROOT / "docs" / "plugins" / "plan.md").read_text()
    _, *words = shlex.split(page.split("```bash\n")[1].split("```")[0].replace("\\\n", " "))[1:]
    path = next(word for word in words if word.startswith("actor_rollout_ref.model.path="))
    words[words.index(path)] = f"actor_rollout_ref.model.path={folder}"
    assert f'"About {seconds_in_words(make_plan(words)[0])}"' in page


def test_estimators_are_those_that_are_registered():
    ours = {name for name in ESTIMATORS.names() if adv_needs(name).function.__module__.startswith("verl.")}
    assert {name for name in ours if "values" in adv_needs(name).columns} == set(WITH_CRITIC)
    assert ours - set(WITH_CRITIC) == set(WITHOUT_CRITIC)


def test_a_pool_of_rollout_engines_has_gpus_and_memory_of_its_own(folder, capsys: pytest.CaptureFixture[str]):
    rollout = "actor_rollout_ref.rollout"
    pool = ["actor_rollout_ref.hybrid_engine=false", f"{rollout}.nnodes=2", f"{rollout}.n_gpus_per_node=2"]
    words = ["--gpus", "8", NATIVE, f"{rollout}.n=4", "data.train_batch_size=64", "trainer.async.lag=1"]
    words += ["actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    pooled, shared = plan_of(folder, *words, *pool), plan_of(folder, *words)
    assert (pooled.gpus, shared.gpus) == (12, 8)
    assert (pooled.stages[0].micro_batch, shared.stages[0].micro_batch) == (64, 32)  # of 256 rows on 4 and on 8 ranks
    assert [*pooled.stages[0].parts] == ["engine weights", "KV cache", "CUDA graphs"]
    assert pooled.stages[1:] == shared.stages[1:]
    training = sum(stage.seconds for stage in shared.stages[1:])
    assert pooled.seconds == max(pooled.stages[0].seconds, training)
    assert shared.seconds == shared.stages[0].seconds + training
    show_plan(pooled, [])
    assert "on 12 x H100 (8 on 1 node train, 4 on 2 of their own sample)" in " ".join(capsys.readouterr().out.split())


def test_a_run_that_is_too_large_is_told_what_makes_it_fit(folder):
    # 7.6 billion parameters take 16 bytes each: 122 GB on one GPU, 61 GB on two, and activations come on top.
    alone = plan_of(folder, "--gpus", "1")
    assert alone.excess > 40e9
    assert not any(change.fits for change in changes(alone))
    long = plan_of(folder, "--gpus", "4", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32")
    assert long.excess > 0
    advice = changes(long)
    assert advice[-1].fits
    config = long.config
    for change in advice:
        config = with_settings(config, change.settings)
    update = plan_of(folder, "--gpus", "4").stages[-1]
    assert config.actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu <= update.largest < 32


def test_the_largest_micro_batch_is_the_largest_that_divides_the_mini_batch(folder):
    # 256 prompts on 8 ranks are 32 rows a mini-batch on each, and their divisors are the powers of two.
    largest = plan_of(folder, "--gpus", "8").stages[-1].largest
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    assert largest in (1, 2, 4, 8, 16)
    assert plan_of(folder, "--gpus", "8", f"{key}={largest}").excess <= 0
    assert plan_of(folder, "--gpus", "8", f"{key}={2 * largest}").excess > 0
    # 48 prompts x 5 responses / 8 ranks = 30 rows: all of them where memory has no bound, else a divisor of 30.
    words = ["data.train_batch_size=96", "actor_rollout_ref.actor.ppo_mini_batch_size=48"]
    words += ["actor_rollout_ref.rollout.n=5", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1"]
    sizes = [
        plan_of(folder, "--gpus", "8", *words, "--memory_gb", memory).stages[-1].largest for memory in ("80", "1000")
    ]
    assert sizes[1] == 30
    assert 0 < sizes[0] < 30
    assert 30 % sizes[0] == 0


def test_offload_ulysses_and_adapters_take_less(folder):
    def peak(*words):
        return max(stage.bytes for stage in plan_of(folder, "--gpus", "8", *words).stages[1:])

    usual = peak()
    assert peak("actor_rollout_ref.model.lora_rank=32") < usual
    assert peak("actor_rollout_ref.actor.ulysses_sequence_parallel_size=2") < usual
    assert peak("actor_rollout_ref.model.enable_gradient_checkpointing=false") > usual
    # The reference of adapters is the actor without them: no second model, but a pass of its own.
    kl = ["actor_rollout_ref.actor.use_kl_loss=true", "actor_rollout_ref.model.lora_rank=32"]
    plan = plan_of(folder, "--gpus", "8", *kl)
    assert list(plan.models) == ["actor"]
    assert [stage.name for stage in plan.stages] == ["rollout", "old log-probs", "reference log-probs", "actor update"]
    critic = ["algorithm.adv_estimator=gae", f"critic.model.path={folder}", "critic.ppo_micro_batch_size_per_gpu=2"]
    assert peak(*critic) > usual
    assert peak(*critic, "critic.model.fsdp_config.optimizer_offload=true") < peak(*critic)


def test_adapters_of_experts_are_planned_for_policy_and_critic_alike(tmp_path):
    experts = {
        "model_type": "qwen3_moe", "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151936, "num_experts": 128,
        "num_experts_per_tok": 8, "moe_intermediate_size": 768, "tie_word_embeddings": False,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(experts))
    words = ["algorithm.adv_estimator=gae", f"critic.model.path={tmp_path}", "critic.ppo_micro_batch_size_per_gpu=2"]
    for model in ("actor_rollout_ref.model", "critic.model"):
        words += [
            f"{model}.lora_rank=4",
            f"{model}.target_modules=[q_proj]",
            f"{model}.lora.target_parameters=[gate_up_proj]",
        ]
    models = plan_of(tmp_path, *words).models
    # In each of 48 layers 4·(2048 + 4096) on q_proj and 128·4·(2048 + 2·768) on the experts.
    assert models["actor"].memory.trained == models["critic"].memory.trained == 48 * (24_576 + 1_835_008)


def test_a_shared_prompt_counts_once(folder):
    shares = "actor_rollout_ref.actor.use_prefix_grouper=true"
    words = ["data.max_prompt_length=4096", "data.max_response_length=512", "actor_rollout_ref.rollout.n=8"]
    words += ["actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=8", "--gpus", "8", "--memory_gb", "200"]
    apart, shared = (plan_of(folder, *words, *more).stages for more in ([], [shares]))
    assert [stage.name for stage in shared] == ["rollout", "old log-probs", "actor update"]
    assert shared[0] == apart[0]
    # 4096 + 8 · 512 tokens in place of 8 · 4608; attention of responses to the prompt is not spared.
    for before, after in zip(apart[1:], shared[1:], strict=True):
        assert 3.5 < before.seconds / after.seconds < 36864 / 8192
        assert after.parts["activations"] < before.parts["activations"] / 3
        assert after.largest >= before.largest
    # One response of a group in a pass shares nothing.
    alone = [plan_of(folder, *words, LOG_PROBS, UPDATES, *more).stages for more in ([], [shares])]
    for one, other in zip(*alone, strict=True):
        assert (one.parts, one.seconds) == (other.parts, other.seconds)
    # In a budget of 8192 tokens a group is whole; in one of 6144 the prompt is computed twice.
    by_tokens = ["actor_rollout_ref.actor.use_dynamic_bsz=true", shares]
    budgets = [f"actor_rollout_ref.actor.ppo_max_token_len_per_gpu={tokens}" for tokens in (8192, 6144)]
    whole, halves = (plan_of(folder, *words, *by_tokens, budget).stages[-1].seconds for budget in budgets)
    assert whole == pytest.approx(shared[-1].seconds)
    assert halves > 1.3 * whole
    # A critic has a key of its own.
    critic = ["algorithm.adv_estimator=gae", f"critic.model.path={folder}", "critic.ppo_micro_batch_size_per_gpu=8"]
    own = ["critic.use_prefix_grouper=true", "critic.model.use_remove_padding=true"]
    values = [plan_of(folder, *words, *critic, *more).stages[2:4] for more in ([], [shares], own)]
    assert [stage.name for stage in values[0]] == ["values", "critic update"]
    assert values[0] == values[1]
    assert values[2][0].seconds < values[0][0].seconds / 3.5


def test_pieces_of_a_pipeline_that_divide_the_layers_are_planned(folder):
    plan = plan_of(folder, *MEGATRON, f"{STAGES}=2", f"{PIECES}=7", "--gpus", "2")
    assert plan.models["actor"].memory.layout.pipeline == 2


def test_recomputation_is_planned_as_checkpoints_if_it_is_of_each_layer_alone(folder):
    """28 layers in two stages are 14 in each."""
    section = "++actor_rollout_ref.actor.megatron.override_transformer_config"

    def checkpoints(method, layers):
        recompute = f"{{recompute_granularity: full, recompute_method: {method}, recompute_num_layers: {layers}}}"
        plan = plan_of(folder, *MEGATRON, f"{STAGES}=2", "--gpus", "2", f"{section}={recompute}")
        return plan.models["actor"].memory.checkpoints

    assert checkpoints("uniform", 1)
    assert not checkpoints("uniform", 2)
    assert checkpoints("block", 14)
    assert not checkpoints("block", 13)


def test_trained_heads_are_planned(folder):
    heads = {**DEEPSEEK_V3, "num_hidden_layers": 4, "num_nextn_predict_layers": 1}
    (folder / "config.json").write_text(json.dumps(heads))
    words, mtp = [*MEGATRON, f"{STAGES}=2", "--gpus", "2"], "actor_rollout_ref.model.mtp"
    without, trained = (
        plan_of(folder, *words, f"{mtp}.enable={on}", f"{mtp}.enable_train={on}") for on in ("false", "true")
    )
    memory = trained.models["actor"].memory
    # A sparse layer, 2 x 7168 x 7168, three norms.
    assert memory.trained - without.models["actor"].memory.trained == sum(memory.shape.parameters_of_head)
    assert trained.stages[-1].seconds > without.stages[-1].seconds
    assert trained.stages[1].seconds == without.stages[1].seconds  # log-probs need none


def test_advice_is_what_a_run_takes(folder):
    # A rank's share of a mini-batch is 256 / 8 = 32 rows: what fits in between is rounded down to a divisor.
    plan = plan_of(folder, "--gpus", "8", "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=32")
    key = "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu"
    sizes = [change.settings[key] for change in changes(plan) if key in change.settings]
    assert sizes
    assert all(32 % size == 0 for size in sizes)
    # 7.6 billion parameters are 15.2 GB in bf16: a copy in each rank is too much here, and native splits none.
    offload = [f"actor_rollout_ref.actor.fsdp_config.{part}_offload=true" for part in ("param", "optimizer")]
    words = [NATIVE, *offload, "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1", "--memory_gb", "18.3"]
    native = plan_of(folder, "--gpus", "32", *words)
    assert native.stages[0].largest == 0
    assert not [change for change in changes(native) if ROLLOUT_RANKS in change.settings]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--mfu", "40"], "a part of the peak, at most 1"),
        (["--mfu", "nan"], "must be a number above 0"),
        (["--memory_gb", "3"], "3 GB are kept"),
        (["--gpus", "-1"], "must be a number above 0"),
    ],
)
def test_options_out_of_range_are_said(folder, capsys, words, said):
    with pytest.raises(SystemExit):
        plan_of(folder, *words)
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--gpu", "h1000"], "no figures of it are known. Did you mean 'h100'"),
        (["--gpus", "12"], "nodes of 8 GPUs do not add up"),
        (["--gpus", "16", "trainer.nnodes=3"], "nodes of 8 GPUs are another number"),
        (["data.train_batch_sise=4"], "train_batch_size"),
        (["actor_rollout_ref.actor.fsdp_config.fsdp_size=3", "--gpus", "8"], "must divide"),
        (["trainer.n_gpus_per_node=0", "--gpus", "8"], "must be a whole number above 0"),
        (["--config-name", "ppo_megatron"], "Known are ppo_megatron_trainer, ppo_trainer"),
        (["--config-dir", "nowhere", "--config-name", "mine"], "Cannot find primary config 'mine'"),
        (["--config-path", "nowhere"], "Primary config directory not found"),
        (["--cfg", "job"], "verl train ... --cfg job"),
        (["--response_tokens", "3585"], "no response is longer than data.max_response_length=3584"),
        (["actor_rollout_ref.actor.ulysses_sequence_parallel_size=8", "--gpus", "8"], "28 attention heads"),
        ([NATIVE, f"{ROLLOUT_RANKS}=2", "--gpus", "4"], "each rank generates with a whole copy of the model"),
        (["--gpus", "3"], "which 3 ranks cannot share equally"),
        ([*MEGATRON, f"{STAGES}=2", "--gpus", "3"], "2 ranks share the model, which does not divide 3 ranks"),
        ([*MEGATRON, f"{STAGES}=2", f"{PIECES}=4", "--gpus", "2"], "=8 does not divide the model's 28 layers"),
        ([*MEGATRON, *DORA, "--gpus", "2"], "strategy=megatron has no DoRA"),
        (
            ["actor_rollout_ref.model.lora_rank=8", "actor_rollout_ref.model.target_modules=[linear_qkv]"],
            "no linear layer that can have an adapter has such a name",
        ),
    ],
)
def test_what_cannot_be_planned_is_said(folder, words, said):
    with pytest.raises(ConfigError, match=said.replace(".", r"\.")):
        _ = plan_of(folder, *words).stages


@pytest.mark.parametrize("flag", ["--config-dir", "--config-path"])
def test_a_yaml_file_of_the_user_is_planned_as_verl_train_reads_it(folder, flag):
    (folder / "mine.yaml").write_text("defaults: [ppo_trainer, _self_]\ndata: {train_batch_size: 512}\n")
    plan = plan_of(folder, flag, str(folder), "--config-name", "mine", "--gpus", "16")
    assert (plan.config.data.train_batch_size, plan.config.trainer.nnodes) == (512, 2)


def test_small_models_and_one_node_are_said_so(folder, capsys):
    show_plan(plan_of(folder, "--gpus", "8"), [])
    assert "7.62 billion parameters, on 8 x h100 (1 node):" in " ".join(capsys.readouterr().out.split()).lower()
    tiny = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "vocab_size": 1000}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(QWEN_7B | tiny | heads))
    show_plan(plan_of(folder, "--gpus", "16"), [])
    said = " ".join(capsys.readouterr().out.split()).lower()
    # Embedding and head 2 x 64,000; a layer: attention 12,416 with biases, MLP 24,576, two norms 128; a norm of 64.
    assert "qwen2, 202,304 parameters" in said
    assert "(2 nodes):" in said


def test_the_time_limits_of_a_run_are_shown(folder, capsys):
    # 70B in bf16 by 80 layers: 70,553,706,496 parameters, 141.1 GB, read in 705.5 s.
    large = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64,
             "num_key_value_heads": 8, "vocab_size": 128256, "model_type": "llama"}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(large))
    engine = "actor_rollout_ref.rollout.name=vllm"
    show_plan(plan_of(folder, engine, "trainer.recovery.hang_timeout_s=90", "--gpus", "64"), [])
    shown = " ".join(capsys.readouterr().out.split())
    assert "Time limits in seconds, for a disk that gives 0.2 GB/s: actor_rollout_ref.nccl_timeout=3528" in shown
    assert "trainer.recovery.hang_timeout_s=90" in shown
    assert "actor_rollout_ref.rollout.engine_kwargs.vllm.start_timeout_s=2117" in shown


PARAMETERS, VOCABULARY, HIDDEN = 7_615_616_512, 152_064, 3_584


def taught_plan(folder, *words):
    """Of 8 GPUs and 64 rows, with a teacher of the policy's shape unless the words say otherwise."""
    given = ["--gpus", "8", NATIVE, "actor_rollout_ref.rollout.n=4", "data.train_batch_size=16", LOG_PROBS]
    given += ["actor_rollout_ref.actor.ppo_mini_batch_size=16", "distillation.enabled=true"]
    if "distillation.self_distillation.enabled=true" not in words:
        given.append(f"{TEACHER}.model_path={folder}")
    return plan_of(folder, *given, *words)


TEACHER = "distillation.teacher_models.teacher_model"
LOSS_MODE = "distillation.distillation_loss.loss_mode"


def test_a_teacher_on_the_ranks_of_the_trainer_and_on_its_own(folder, capsys: pytest.CaptureFixture[str]):
    plan = taught_plan(folder, "--mfu", "0.4")
    assert [stage.name for stage in plan.stages] == ["rollout", "teacher teacher_model", "actor update"]
    teacher, update = plan.stages[1:]
    # Eight shards in bf16, as a frozen model is stored; between calls they leave the device.
    assert teacher.parts["teacher teacher_model weights"] == PARAMETERS * 2 / 8
    assert not [name for name in update.parts if "teacher" in name]
    stays = taught_plan(folder, f"{TEACHER}.inference.free_cache_engine=false")
    assert stays.stages[2].parts["teacher teacher_model"] == PARAMETERS * 2 / 8
    assert stays.stages[2].bytes - update.bytes == PARAMETERS * 2 / 8
    assert plan.seconds == pytest.approx(sum(stage.seconds for stage in plan.stages))
    # On four ranks of its own each has twice as much, and twice the rows of a step.
    alone = taught_plan(folder, "--mfu", "0.4", "distillation.nnodes=1", "distillation.n_gpus_per_node=4")
    assert (plan.gpus, alone.gpus) == (8, 12)
    assert alone.stages[1].parts["teacher teacher_model weights"] == PARAMETERS * 2 / 4
    assert alone.stages[2] == update
    # It stays there, whereas beside the trainer it comes from the host's memory and goes back, at 55 GB/s.
    moving = 2 * PARAMETERS * 2 / 8 / (0.86 * 64e9)
    assert alone.stages[1].seconds == pytest.approx(2 * (teacher.seconds - moving))
    show_plan(alone, [])
    assert "on 12 x H100 (8 on 1 node train, 4 on 1 of their own teach)" in " ".join(capsys.readouterr().out.split())


def test_divergences_of_the_whole_vocabulary_hold_output_matrices(folder):
    sampled, whole = taught_plan(folder), taught_plan(folder, f"{LOSS_MODE}=reverse_kl")
    matrix = VOCABULARY * HIDDEN * 2
    assert whole.stages[-1].parts["output matrices of teachers"] == matrix == 1_089_994_752
    assert whole.stages[-1].bytes - sampled.stages[-1].bytes == matrix
    reads_whole = {name for name in DISTILLATION_LOSSES if distillation_loss_info(name).reads == "full"}
    assert reads_whole == set(WHOLE_VOCABULARY)


def test_teachers_that_are_engines_share_their_matrices_and_their_memory(folder):
    engine = [f"{TEACHER}.inference.name=vllm", f"{TEACHER}.inference.tensor_model_parallel_size=2"]
    asleep, awake = (
        taught_plan(folder, *engine, f"{TEACHER}.inference.free_cache_engine={sleeps}") for sleeps in ("true", "false")
    )
    parts = asleep.stages[1].parts
    assert parts["engine weights"] == PARAMETERS * 2 / 2  # in bf16 on two ranks
    assert parts["engine weights"] + parts["engine reserve"] + parts["KV cache"] == 80e9 * 0.5
    assert awake.stages[2].bytes - asleep.stages[2].bytes == 80e9 * 0.5


def test_a_policy_that_teaches_itself_reads_longer_prompts_with_other_weights(folder):
    itself = ["distillation.self_distillation.enabled=true", "distillation.self_distillation.template=reference"]
    itself += ["data.return_raw_chat=true", "distillation.self_distillation.teacher_prompt_length=2048"]
    policy = taught_plan(folder, *itself)
    average = taught_plan(folder, *itself, "distillation.self_distillation.weights=ema")
    teacher = policy.stages[1]
    assert (teacher.name, teacher.micro_batch_key) == (
        "teacher",
        "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu",
    )
    # The policy's prompts have 512 tokens; 2,048 + 3,584 tokens are a row of the teacher.
    shorter = taught_plan(folder, *itself[:-1], "distillation.self_distillation.teacher_prompt_length=512")
    assert 1.3 < teacher.seconds / shorter.stages[1].seconds < 1.5
    for before, after in zip(policy.stages[2:], average.stages[2:], strict=True):
        assert after.parts["weights of the teacher"] == PARAMETERS * 4 / 8
        assert after.bytes - before.bytes == PARAMETERS * 4 / 8
    # During its passes the policy's weights are kept too.
    assert average.stages[1].bytes - teacher.bytes == 2 * PARAMETERS * 4 / 8
