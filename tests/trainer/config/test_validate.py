"""Rules that span keys, each with the message that a user sees."""

from __future__ import annotations

import json
import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.trainer.config.support import Run, only
from verl.config import RMConfig
from verl.errors import ConfigError
from verl.trainer.config import EvalConfig, GenerationConfig, SFTConfig, load_config

ACTOR = "actor_rollout_ref.actor"
ROLLOUT = "actor_rollout_ref.rollout"


def gae(run: Run, **changes: Any) -> dict[str, Any]:
    """PPO with a critic."""
    return {
        "algorithm.adv_estimator": "gae",
        "critic.model.path": str(run.folder / "model"),
        "critic.ppo_micro_batch_size_per_gpu": 2,
    } | changes


# --- batch sizes


def test_mini_batches_divide_the_batch(run: Run):
    message = only(run.refusal({"data.train_batch_size": 12, f"{ACTOR}.ppo_mini_batch_size": 8}))
    assert f"{ACTOR}.ppo_mini_batch_size=8: it does not divide data.train_batch_size=12" in message
    assert "allowed: divisors of 12, nearest 6 and 12" in message


def test_a_mini_batch_larger_than_the_batch(run: Run):
    message = only(run.refusal({f"{ACTOR}.ppo_mini_batch_size": 256}))
    assert "divisors of 8, nearest 8" in message


def test_ranks_share_a_mini_batch_equally(run: Run):
    # 4 prompts × 4 responses = 16 on 3 ranks; 12 prompts: d·4 must be a multiple of 3, so d is 3, 6 or 12.
    message = only(run.refusal({"trainer.n_gpus_per_node": 3, "data.train_batch_size": 12}))
    assert "with rollout.n=4 a mini-batch has 16 responses, which 3 ranks cannot share equally" in message
    assert "divisors d of 12 for which 3 divides d·4, nearest 3 and 6" in message


def test_no_mini_batch_would_do(run: Run):
    message = only(run.refusal({"trainer.n_gpus_per_node": 3}))
    assert "there is none, change data.train_batch_size" in message


def test_several_nodes_are_all_ranks(run: Run):
    # 2 nodes × 8 = 16 ranks share 4 prompts × 4 responses; each then has one response.
    many = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 8, f"{ACTOR}.ppo_micro_batch_size_per_gpu": 1}
    assert run.load(many).trainer.nnodes == 2


def test_the_critics_own_mini_batch(run: Run):
    message = only(run.refusal(gae(run, **{"critic.ppo_mini_batch_size": 3})))
    assert "critic.ppo_mini_batch_size=3: it does not divide data.train_batch_size=8" in message
    assert "nearest 2 and 4" in message


def test_micro_batches_divide_the_share_of_a_rank(run: Run):
    # 4 prompts × 4 responses ÷ 2 ranks = 8
    message = only(run.refusal({f"{ACTOR}.ppo_micro_batch_size_per_gpu": 3}))
    assert f"{ACTOR}.ppo_micro_batch_size_per_gpu=3: it does not divide the 8 responses" in message
    assert "4 prompts × 4 responses ÷ 2 ranks" in message
    assert "allowed: divisors of 8, nearest 2 and 4" in message
    assert f"or set {ACTOR}.use_dynamic_bsz=true" in message


def test_the_critics_micro_batch(run: Run):
    message = only(run.refusal(gae(run, **{"critic.ppo_micro_batch_size_per_gpu": 3})))
    assert "critic.ppo_micro_batch_size_per_gpu=3: it does not divide the 8 responses" in message


def test_dynamic_batches_need_no_micro_batch(run: Run):
    changes = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_micro_batch_size_per_gpu": None}
    config = run.load(changes)
    assert config.actor_rollout_ref.rollout.log_prob_use_dynamic_bsz is True


@pytest.mark.parametrize(
    "key, switch",
    [
        (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.use_dynamic_bsz"),
    ],
)
def test_a_micro_batch_must_be_set(run: Run, key: str, switch: str):
    message = only(run.refusal({key: None}))
    assert f"{key}=null: it must be set while {switch}=false" in message
    assert f"or set {switch}=true" in message


def test_micro_batches_of_roles_that_take_part(run: Run):
    message = only(run.refusal(gae(run, **{"critic.ppo_micro_batch_size_per_gpu": None})))
    assert "critic.ppo_micro_batch_size_per_gpu=null" in message


def test_passes_without_gradients_follow_the_update(run: Run):
    del run.ppo[f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu"]
    model = {"reward_model.enable": True, "reward_model.model.path": str(run.folder / "model")}
    config = run.load({f"{ACTOR}.use_kl_loss": True} | model)
    roles = config.actor_rollout_ref
    assert roles.rollout.log_prob_micro_batch_size_per_gpu == roles.ref.log_prob_micro_batch_size_per_gpu == 2
    assert config.reward_model.micro_batch_size_per_gpu == 2  # actor.ppo_micro_batch_size_per_gpu
    config = run.load({f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu": 4, f"{ACTOR}.use_kl_loss": True})
    assert config.actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu == 4


def test_the_longest_sequence_fits_into_a_pass(run: Run):
    changes = {f"{ACTOR}.use_dynamic_bsz": True, f"{ACTOR}.ppo_max_token_len_per_gpu": 1000}
    message = only(run.refusal(changes))  # 512 + 512 = 1024; log-probs follow the actor
    assert f"{ACTOR}.ppo_max_token_len_per_gpu=1000: the longest sequence has 1024 tokens" in message
    assert "allowed: at least 1024" in message
    both = changes | {f"{ROLLOUT}.log_prob_max_token_len_per_gpu": 900}
    assert f"{ROLLOUT}.log_prob_max_token_len_per_gpu=900" in run.refusal(both)
    assert run.load(changes | {"data.max_prompt_length": 488})  # 488 + 512 = 1000


def test_the_longest_sequence_fits_into_every_role(run: Run):
    changes = gae(
        run,
        **{
            f"{ACTOR}.use_dynamic_bsz": True,
            f"{ACTOR}.use_kl_loss": True,
            "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu": 1,
            "critic.ppo_max_token_len_per_gpu": 2,
            "critic.forward_max_token_len_per_gpu": 3,
            "reward_model.enable": True,
            "reward_model.model.path": str(run.folder / "model"),
            "reward_model.forward_max_token_len_per_gpu": 4,
        },
    )
    message = run.refusal(changes)
    assert message.startswith("4 problems")
    assert "actor_rollout_ref.ref.log_prob_max_token_len_per_gpu=1" in message
    assert "critic.ppo_max_token_len_per_gpu=2" in message
    assert "critic.forward_max_token_len_per_gpu=3" in message
    assert "reward_model.forward_max_token_len_per_gpu=4" in message


def test_lengths_of_data_and_engine_agree(run: Run):
    message = only(run.refusal({f"{ROLLOUT}.response_length": 100}))
    assert f"{ROLLOUT}.response_length=100: it differs from data.max_response_length=512" in message
    message = only(run.refusal({f"{ROLLOUT}.max_model_len": 1023}))
    assert f"{ROLLOUT}.max_model_len=1023: the longest sequence has 1024 tokens" in message
    message = only(run.refusal({f"{ROLLOUT}.val_kwargs.max_tokens": 513}))
    assert "it is longer than data.max_response_length=512" in message
    assert "allowed: 1 to 512" in message


# --- engines


def test_sharding_groups_divide_the_ranks(run: Run):
    message = only(run.refusal({f"{ACTOR}.fsdp_config.fsdp_size": 3, "trainer.n_gpus_per_node": 4}))
    assert "fsdp_size=3: it does not divide 4 ranks" in message
    assert "divisors of 4, or -1" in message
    assert run.load({f"{ACTOR}.fsdp_config.fsdp_size": 2, "trainer.n_gpus_per_node": 4})
    assert run.load({f"{ACTOR}.fsdp_config.fsdp_size": 8, "trainer.n_gpus_per_node": 4})  # more than there are: all


def test_nothing_that_is_trained_is_stored_in_fp16(run: Run):
    message = only(run.refusal({f"{ACTOR}.fsdp_config.model_dtype": "fp16", f"{ACTOR}.fsdp_config.dtype": "fp16"}))
    assert "dtype=fp16 only computes in it" in message
    only(run.refusal({"engine.model_dtype": "float16"}, SFTConfig))


# --- files


def test_data_files_exist(run: Run):
    message = only(run.refusal({"data.train_files": str(run.folder / "none.parquet")}))
    assert f"data.train_files={run.folder}/none.parquet: there is no such file" in message
    assert "remedy: the folder has train.jsonl, val.jsonl" in message
    message = only(run.refusal({"data.train_files": str(run.folder / "trian.jsonl")}))
    assert f"remedy: did you mean {run.folder}/train.jsonl?" in message
    message = only(run.refusal({"data.val_files": [str(run.folder / "val.jsonl"), "elsewhere/x.parquet"]}))
    assert "data.val_files=elsewhere/x.parquet" in message
    assert "examples/data_preprocess" in message


def test_data_files_may_be_a_glob(run: Run):
    assert run.load({"data.train_files": str(run.folder / "t*.jsonl")})
    assert "there is no such file" in only(run.refusal({"data.train_files": str(run.folder / "x*.jsonl")}))


def test_data_files_are_files_of_a_known_format(run: Run):
    (run.folder / "train.csv").write_text("a")
    assert "the format is not known" in only(run.refusal({"data.train_files": str(run.folder / "train.csv")}))
    assert "this is a folder, not a file" in only(run.refusal({"data.train_files": str(run.folder)}))
    assert "nothing to train on" in only(run.refusal({"data.train_files": []}))


def test_a_wrong_name_of_a_function_is_answered_by_those_of_the_file(run: Run):
    (run.folder / "mine.py").write_text(
        "import re\ndef reward(solution_str): ...\nclass Judge: ...\ndef _part(): ...\n"
    )
    wrong = {"custom_reward_function.path": str(run.folder / "mine.py"), "custom_reward_function.name": "score"}
    assert "allowed: functions and classes of that file: reward, Judge\n" in only(run.refusal(wrong))
    missing = {"custom_reward_function.path": str(run.folder / "mien.py"), "custom_reward_function.name": "reward"}
    assert f"did you mean {run.folder}/mine.py?" in only(run.refusal(missing))


@pytest.mark.parametrize(
    "changes, said",
    [
        ({"data.max_response_length": 4096}, "data.max_response_length=4096: the model has 1,024 positions"),
        ({"data.max_prompt_length": 1000}, "data.max_prompt_length=1000: the model has 1,024 positions"),
        ({"data.max_response_length": 4096}, "allowed: 1 to 512"),
        (
            {"data.max_response_length": 4096},
            "set actor_rollout_ref.model.override_config.max_position_embeddings=4608",
        ),
        (
            {"actor_rollout_ref.rollout.max_model_len": 2048},
            "rollout.max_model_len=2048: the model has 1,024 positions",
        ),
    ],
)
def test_lengths_beyond_the_positions_of_the_model_are_told_by_the_key_that_was_set(
    run: Run, changes: dict[str, int], said: str
):
    config = run.folder / "model/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"max_position_embeddings": 1024}))
    run.load()  # 512 + 512
    assert said in only(run.refusal(changes))
    wider = {"actor_rollout_ref.model.override_config": {"max_position_embeddings": 8192}}
    assert run.load(changes | wider)


@pytest.mark.parametrize("files", [None, []])
def test_validation_can_be_switched_off(run: Run, files: list[str] | None, caplog: pytest.LogCaptureFixture):
    assert not run.load({"data.val_files": files}).data.val_files
    assert not caplog.messages
    assert "nothing to validate on" in only(run.refusal({"data.val_files": files, "trainer.val_only": True}))


def test_a_dataset_of_ones_own_reads_what_it_likes(run: Run):
    (run.folder / "mine.py").write_text("class Mine: ...")
    changes = {"data.custom_cls.path": str(run.folder / "mine.py"), "data.custom_cls.name": "Mine"}
    assert run.load(changes | {"data.train_files": "s3://anything"})


def test_model_folders_exist(run: Run):
    for path in (str(run.folder / "none"), "./none", "~/none"):
        message = only(run.refusal({"actor_rollout_ref.model.path": path}))
        assert "there is no such folder" in message
        assert "Qwen/Qwen3-0.6B" in message
    (run.folder / "empty").mkdir()
    message = run.refusal({"actor_rollout_ref.model.path": str(run.folder / "empty")})
    assert "the folder has no config.json" in message
    (run.folder / "model" / "model.safetensors").unlink()
    assert "the folder holds no weights" in only(run.refusal({}))


ROLES = pytest.mark.parametrize(
    "key, more",
    [
        ("actor_rollout_ref.model.path", {}),
        ("critic.model.path", {"algorithm.adv_estimator": "gae"}),
        ("reward_model.model.path", {"reward_model.enable": True}),
    ],
)


@ROLES
def test_models_may_be_gguf_files(run: Run, key: str, more: dict):
    file = run.folder / "model.gguf"
    assert f"{key}={file}: the file does not exist" in run.refusal({key: str(file)} | more)
    file.write_bytes(b"PK\x03\x04")
    assert f"{key}={file}: the file is no GGUF file" in run.refusal({key: str(file)} | more)
    file.write_bytes(b"GGUF")
    assert run.load({"actor_rollout_ref.model.path": str(file)})
    message = only(run.refusal({"actor_rollout_ref.model.lora_adapter_path": str(file)}))
    assert "adapters are not read from GGUF" in message


@ROLES
def test_quantized_models_are_refused(run: Run, key: str, more: dict):
    folder = shutil.copytree(run.folder / "model", run.folder / "quantized")
    (folder / "config.json").write_text('{"quantization_config": {"quant_method": "gptq", "bits": 4}}')
    message = run.refusal({key: str(folder)} | more)
    assert f"{key}={folder}: its weights are quantized (gptq)" in message
    assert "model.dequantize()" in message


@pytest.mark.parametrize(
    "section, more", [("actor_rollout_ref.model", {}), ("critic.model", {"algorithm.adv_estimator": "gae"})]
)
def test_folders_of_adapters_exist(run: Run, section: str, more: dict):
    (run.folder / "adapters").mkdir()
    message = run.refusal({f"{section}.lora_adapter_path": str(run.folder / "adapters")} | more)
    assert f"{section}.lora_adapter_path={run.folder / 'adapters'}: the folder has no adapter_config.json" in message
    message = run.refusal({f"{section}.lora_adapter_path": str(run.folder / "none")} | more)
    assert "there is no such folder" in message
    assert "name a folder that peft's save_pretrained wrote" in message


@pytest.mark.parametrize(
    "config, wrong",
    [
        ('{"peft_type": "IA3"}', "the folder holds adapters of kind IA3"),
        ('{"peft_type": "LORA"}', "the folder has no adapter_model.safetensors"),
        ('["LORA"]', "its adapter_config.json cannot be read: 'list' object has no attribute"),
    ],
)
def test_folders_of_adapters_hold_those_of_lora(run: Run, config: str, wrong: str):
    folder = run.folder / "adapters"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(config)
    message = run.refusal({"actor_rollout_ref.model.lora_adapter_path": str(folder)})
    assert f"actor_rollout_ref.model.lora_adapter_path={folder}: {wrong}" in message


@pytest.mark.parametrize("key", ["actor_rollout_ref.model.target_modules", "critic.model.exclude_modules"])
def test_layers_are_chosen_by_expressions_that_can_be_read(run: Run, key: str):
    assert f"{key}=(q_proj: no regular expression: missing )" in run.refusal({key: "(q_proj"})
    assert run.load({key: r".*\.(q|v)_proj"})


def test_names_on_the_hub_pass(run: Run):
    assert run.load({"actor_rollout_ref.model.path": "org/name"}).actor_rollout_ref.model.path == "org/name"


def test_models_of_roles_that_take_part(run: Run):
    nowhere = {"critic.model.path": "/none", "reward_model.model.path": "/none"}
    assert run.load(nowhere)  # grpo, no reward model
    message = run.refusal(
        gae(run) | nowhere | {"reward_model.enable": True, "reward_model.micro_batch_size_per_gpu": 1}
    )
    assert message.startswith("2 problems")
    assert "critic.model.path=/none" in message
    assert "reward_model.model.path=/none" in message


def test_tokenizer_folder(run: Run):
    message = only(run.refusal({"actor_rollout_ref.model.tokenizer_path": "/none"}))
    assert "actor_rollout_ref.model.tokenizer_path=/none: there is no such folder" in message


def test_code_of_ones_own(run: Run):
    mine = run.folder / "mine.py"
    mine.write_text("import math\nscore = math.sqrt\n\ndef compute_scores(x): ...\n")
    path = {"custom_reward_function.path": str(mine)}
    message = only(run.refusal(path))
    assert "custom_reward_function.name=compute_score:" in message
    assert "Did you mean 'compute_scores'?\n" in message
    assert run.load(path | {"custom_reward_function.name": "score"})
    message = only(run.refusal({"custom_reward_function.path": "nowhere/mine.py"}))
    assert "custom_reward_function.path=nowhere/mine.py: there is no such file" in message
    assert run.load({"custom_reward_function.path": "math", "custom_reward_function.name": "sqrt"})  # a module
    mine.write_bytes(b"name = 'caf\xe9'\n")  # not in UTF-8
    assert run.load(path)  # importing it tells what is wrong


def test_code_of_ones_own_needs_path_and_name(run: Run):
    (run.folder / "mine.py").write_text("class Mine: ...")
    mine = str(run.folder / "mine.py")
    assert "data.custom_cls.name=null: it must be set" in only(run.refusal({"data.custom_cls.path": mine}))
    assert "data.sampler.class_name=null: it must be set" in only(run.refusal({"data.sampler.class_path": mine}))
    message = only(run.refusal({"reward_manager.source": "importlib"}))
    assert "reward_manager.module.path=null: it must be set with source=importlib" in message
    own = {
        "reward_manager.source": "importlib",
        "reward_manager.module.path": mine,
        "reward_manager.name": "Mine",
    }
    assert run.load(own)


def test_a_file_that_python_cannot_read_is_left_to_python(run: Run):
    (run.folder / "mine.py").write_text("def (")
    assert run.load({"custom_reward_function.path": str(run.folder / "mine.py")})


@pytest.mark.parametrize(
    "key", ["trainer.default_local_dir", "trainer.rollout_data_dir", "trainer.validation_data_dir"]
)
def test_folders_to_write_to(run: Run, key: str):
    # A file where a folder should be: nobody can write there, not even root.
    (run.folder / "occupied").write_text("")
    message = only(run.refusal({key: str(run.folder / "occupied" / "x"), "trainer.save_freq": 1}))
    assert f"{key}={run.folder}/occupied/x: the folder cannot be made" in message
    target = run.folder / "new" / "folder"
    run.load({key: str(target), "trainer.save_freq": 1})
    assert target.is_dir()


def test_a_run_that_saves_nothing_makes_no_folder(run: Run):
    run.load({"trainer.default_local_dir": str(run.folder / "never"), "trainer.save_freq": -1})
    assert not (run.folder / "never").exists()


# --- algorithm


def test_the_estimator_exists(run: Run):
    message = only(run.refusal({"algorithm.adv_estimator": "grop"}))
    assert "algorithm.adv_estimator=grop: unknown advantage estimator 'grop'. Did you mean 'grpo'?" in message
    assert "@register_adv_est" in message


@pytest.mark.parametrize("name", ["grpo", "rloo"])
def test_estimators_that_compare_siblings_want_some(run: Run, name: str, caplog: pytest.LogCaptureFixture):
    assert run.load({"algorithm.adv_estimator": name, f"{ROLLOUT}.n": 1})
    assert f"algorithm.adv_estimator={name} compares the responses of one prompt" in caplog.text
    assert "at least 2" in caplog.text


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "remax"])
def test_other_estimators_need_none(run: Run, name: str):
    assert run.load({"algorithm.adv_estimator": name, f"{ROLLOUT}.n": 1})


def test_an_estimator_that_compares_turns_wants_trajectories_of_one_sequence(run: Run):
    rewrites = {"actor_rollout_ref.rollout.multi_turn.use_inference_chat_template": True}
    message = only(run.refusal({"algorithm.adv_estimator": "gigpo"} | rewrites))
    assert "use_inference_chat_template=true: algorithm.adv_estimator=gigpo compares turns by what the" in message
    assert run.load({"algorithm.adv_estimator": "grpo_per_turn"} | rewrites)


def test_an_estimator_that_reads_values_needs_a_critic(run: Run):
    message = only(run.refusal(gae(run, **{"critic.enable": False})))
    assert "critic.enable=false: algorithm.adv_estimator=gae reads the critic's values" in message
    assert "set critic.enable=true, or choose an estimator without values: grpo" in message


def test_the_policy_loss_exists(run: Run):
    message = only(run.refusal({f"{ACTOR}.policy_loss.loss_mode": "vanila"}))
    assert "policy_loss.loss_mode=vanila: unknown policy loss 'vanila'. Did you mean 'vanilla'?" in message


def test_two_kl_terms_are_advised_against(run: Run, caplog: pytest.LogCaptureFixture):
    both = {
        f"{ACTOR}.use_kl_loss": True,
        "algorithm.use_kl_in_reward": True,
        "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": 1,
    }
    with caplog.at_level(logging.WARNING, "verl"):
        assert run.load(both)
    assert "is penalised twice" in caplog.text


def test_greedy_and_sampling(run: Run, caplog: pytest.LogCaptureFixture):
    message = only(run.refusal({f"{ROLLOUT}.temperature": 0}))
    assert f"{ROLLOUT}.temperature=0: temperature 0 is greedy, but do_sample=true" in message
    message = only(run.refusal({f"{ROLLOUT}.do_sample": False}))
    assert f"{ROLLOUT}.n=4: greedy responses of one prompt are all the same" in message
    run.load({f"{ROLLOUT}.val_kwargs.n": 4})  # takes time, and changes no number of validation
    assert f"{ROLLOUT}.val_kwargs.n=4: greedy responses" in caplog.text
    message = only(run.refusal({f"{ROLLOUT}.val_kwargs.n": 4, f"{ROLLOUT}.val_kwargs.do_sample": True}))
    assert f"{ROLLOUT}.val_kwargs.temperature=0" in message
    assert f"set {ROLLOUT}.val_kwargs.temperature=1.0" in message


def test_what_ends_a_response_can_end_one(run: Run):
    for prefix in (ROLLOUT, f"{ROLLOUT}.val_kwargs"):
        assert f"{prefix}.stop=[x, '']: the empty text" in only(run.refusal({f"{prefix}.stop": ["x", ""]}))
        told = only(run.refusal({f"{prefix}.stop_token_ids": [5, -1]}))
        assert f"{prefix}.stop_token_ids=[5, -1]: no token has such an id" in told


# --- rewards, schedule, place


def test_the_reward_manager_exists(run: Run):
    message = only(run.refusal({"reward_model.reward_manager": "naiv"}))  # reward_manager.name follows it
    assert "reward_manager.name=naiv: unknown reward manager 'naiv'. Did you mean 'naive'?" in message


def test_the_scorer_exists(run: Run):
    assert run.load({"reward_model.reward_format": "math"}).reward_model.reward_format == "math"
    message = only(run.refusal({"reward_model.reward_format": "countdwn"}))
    assert "there is no such scorer. Did you mean 'countdown'?" in message


def test_one_scorer_for_all_rows(run: Run):
    (run.folder / "mine.py").write_text("def compute_score(): ...")
    both = {"reward_model.reward_format": "countdown", "custom_reward_function.path": str(run.folder / "mine.py")}
    assert "scores all rows already" in only(run.refusal(both))


def test_a_pool_of_its_own_has_nodes(run: Run):
    message = only(run.refusal({"reward_model.enable_resource_pool": True}))
    assert "reward_model.nnodes=0: a separate pool needs at least one node" in message


def test_warm_up_of_a_critic_that_is_not_there(run: Run):
    message = only(run.refusal({"trainer.critic_warmup": 5}))
    assert "trainer.critic_warmup=5: there is no critic to warm up (algorithm.adv_estimator=grpo)" in message
    assert run.load(gae(run, **{"trainer.critic_warmup": 5}))


def test_a_run_that_does_nothing(run: Run):
    message = only(run.refusal({"trainer.val_only": True, "trainer.val_before_train": False}))
    assert "the run would do nothing" in message
    message = only(run.refusal({"trainer.val_only": True, "trainer.rollout_only": True}))
    assert "trainer.rollout_only=true: trainer.val_only=true stops before the first step" in message


def test_resuming(run: Run, caplog: pytest.LogCaptureFixture):
    path = "trainer.resume_from_path"
    assert run.load({path: "x/global_step_1"})
    assert f"{path}=x/global_step_1: it is not read with trainer.resume_mode=auto" in caplog.text
    assert run.load({path: False}).trainer.resume_from_path is None  # the default of older public scripts
    mode = {"trainer.resume_mode": "resume_path"}
    assert f"{path}=null: trainer.resume_mode=resume_path needs it" in only(run.refusal(mode))
    assert "this is no checkpoint" in only(run.refusal(mode | {path: str(run.folder)}))
    (run.folder / "global_step_9").mkdir()
    (run.folder / "global_step_10").mkdir()
    message = only(run.refusal(mode | {path: str(run.folder / "global_step_11")}))
    assert "remedy: there is global_step_9, global_step_10" in message
    assert run.load(mode | {path: str(run.folder / "global_step_10") + "/"})


def test_trackers(run: Run, monkeypatch: pytest.MonkeyPatch):
    message = only(run.refusal({"trainer.logger": ["console", "wandbb"]}))
    assert "there is no tracker 'wandbb'. Did you mean 'wandb'?" in message
    monkeypatch.setattr("verl.config.trainer.TRACKERS", {"console": None, "wandb": "a_module_that_is_not"})
    message = only(run.refusal({"trainer.logger": ["console", "wandb"]}))
    assert "trainer.logger=[console, wandb]: wandb is not installed" in message
    assert "pip install 'wandb', or set trainer.logger=[console]" in message
    message = only(run.refusal({"trainer.logger": ["console"], "trainer.log_checkpoints": True}))
    assert "trainer.log_checkpoints=true: no tracker of trainer.logger=[console] keeps files" in message


def test_the_local_controller_runs_one_rank(run: Run):
    message = only(run.refusal({"trainer.controller": "local"}))
    assert "it runs one rank in this process, and 2 are asked for" in message
    assert "trainer.controller=ray" in message
    assert run.load({"trainer.controller": "local", "trainer.n_gpus_per_node": 1})


# --- the other entry points


def test_supervised_batches(run: Run):
    message = only(run.refusal({"trainer.n_gpus_per_node": 3}, SFTConfig))
    assert "data.train_batch_size=8: 3 ranks cannot share it equally" in message
    message = only(run.refusal({"data.max_length": 9000}, SFTConfig))
    assert "data.max_token_len_per_gpu=8192: the longest sequence has 9000 tokens" in message
    fixed = {"data.use_dynamic_bsz": False}
    message = only(run.refusal(fixed | {"data.micro_batch_size_per_gpu": 3}, SFTConfig))
    assert "it does not divide the 8 sequences of a batch on one rank" in message
    assert "nearest 2 and 4" in message
    assert run.load(fixed, SFTConfig)


def test_both_sides_of_a_pair_fit_into_one_pass(run: Run):
    by_tokens = {"data.use_dynamic_bsz": True, "data.max_length": 1000}
    message = only(run.refusal(by_tokens | {"data.max_token_len_per_gpu": 1999}, RMConfig))
    assert "data.max_token_len_per_gpu=1999: the longest sequence has 2000 tokens" in message
    assert run.load(by_tokens | {"data.max_token_len_per_gpu": 2000}, RMConfig)


def test_supervised_columns(run: Run):
    message = only(run.refusal({"data.prompt_key": "question"}, SFTConfig))
    assert "data.prompt_key=question: data.response_key is not set" in message
    assert run.load({"data.prompt_key": "question", "data.response_key": "answer"}, SFTConfig)


def test_generation(run: Run):
    good = {
        "data": {"path": str(run.folder / "val.jsonl"), "output_path": str(run.folder / "out" / "x.parquet")},
        "model": {"path": str(run.folder / "model")},
    }
    assert load_config(good, GenerationConfig).rollout.top_k == 50
    assert (run.folder / "out").is_dir()
    with pytest.raises(ConfigError, match=r"data\.output_path=x\.txt: .*\n.*ends in \.parquet or \.jsonl"):
        load_config({**good, "data": {**good["data"], "output_path": "x.txt"}}, GenerationConfig)
    with pytest.raises(ConfigError, match="it is the file of prompts, which the responses would replace"):
        load_config({**good, "data": {**good["data"], "output_path": good["data"]["path"]}}, GenerationConfig)
    with pytest.raises(ConfigError) as caught:
        load_config({"rollout": {"do_sample": False}, "model": {"path": "/none"}}, GenerationConfig)
    for said in ("data.path=null: it must be set", "data.output_path=null", "model.path=/none", "data.n_samples=5"):
        assert said in str(caught.value)


def test_evaluation(run: Run):
    config = load_config({"data": {"path": str(run.folder / "val.jsonl")}}, EvalConfig)
    assert Path(str(config.data.path)).name == "val.jsonl"
    with pytest.raises(ConfigError, match=r"data\.path=null: it must be set"):
        load_config({}, EvalConfig)


def test_validation_on_a_file_that_is_trained_on_is_told(run: Run, caplog: pytest.LogCaptureFixture):
    run.load()
    assert "learned by heart" not in caplog.text
    train = run.ppo["data.train_files"]
    run.load({"data.val_files": [f"{run.folder}/../{run.folder.name}/train.jsonl"]})
    assert f"data.val_files={train}: the run trains on this file too" in caplog.text
