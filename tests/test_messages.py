"""Messages of the library name what its caller wrote; the command line adds the keys of the configuration."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from verl import DataProto
from verl.config import (
    ActorConfig,
    DataConfig,
    DPOConfig,
    GenerationConfig,
    PPOConfig,
    RMConfig,
    ServeConfig,
    SFTConfig,
)
from verl.errors import VerlError
from verl.tools.function_tool import load_function_tools
from verl.trainer.config.keys import iter_keys, keys_named
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import compute_advantage
from verl.utils.reward_score import default_compute_score
from verl.utils.seqlen_balancing import rearrange_micro_batches
from verl.workers.reward_manager import get_reward_manager_cls

ROOT = Path(__file__).parents[1]

# Packages that know the configuration, or are given its sections: messages of workers and agents name a key by the
# section that they got, such as rollout.max_model_len.
KNOW_THE_CONFIGURATION = (
    "trainer",
    "config",
    "cli",
    "testing",
    "compat",
    "agents",
    "workers",
    "api",
    "experience",
    "serving",
    "plugins/endpoint",
    "plugins/inspect",
    "plugins/megatron",
    "plugins/plan",
    "plugins/veomni",
)
SECTIONS = {"data", "trainer", "algorithm", "actor_rollout_ref", "actor", "rollout", "ref", "model", "optim", "critic"}
SECTIONS |= {"reward_model", "custom_reward_function", "checkpoint"}

# File to the reason why its messages name keys.
EXCEPTIONS = {
    "schema.py": "tells by which setting a run makes a column",
    "single_controller/ray/failures.py": "time limits come from settings, and no caller passes them",
    "utils/device.py": "auto_set_device is given the whole configuration",
    "plugins/view/report.py": "tells by which setting a run writes the file that a report is made of",
    "plugins/view/samples.py": "tells by which settings a run writes samples",
    "plugins/view/command.py": "tells by which setting a run writes the file that the page shows",
    "scorers/registry.py": "a user's own scorer is chosen by a setting; no argument takes it",
}
DOTTED = re.compile(r"(?<![\w./-])[a-z_]\w*(?:\.[a-z_]\w*)+")


def known_keys() -> set[str]:
    """Keys of all commands, and what remains of them without their first sections: ``rollout.n``."""
    known = set()
    for root in (PPOConfig, SFTConfig, RMConfig, DPOConfig, GenerationConfig, ServeConfig):
        for key in iter_keys(root):
            parts = key.path.split(".")
            known |= {".".join(parts[first:]) for first in range(len(parts) - 1)}
    return known


def texts(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and text of the sentences in a module that are no docstrings."""
    described = {node.value for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        parts = node.values if isinstance(node, ast.JoinedStr) else [node]
        text = "".join(part.value for part in parts if isinstance(part, ast.Constant) and isinstance(part.value, str))
        if " " in text.strip() and node not in described:
            yield parts[0].lineno, text


def keys_in(text: str, known: set[str]) -> list[str]:
    """Keys of the configuration in a text, by two or more of their parts."""
    found = []
    for word in DOTTED.findall(text):
        parts = word.split(".")
        if any(".".join(parts[:last]) in known for last in range(2, len(parts) + 1)):
            found.append(word)
    return found


def test_no_message_of_the_library_names_a_key_of_the_command_line():
    known = known_keys()
    named, files = [], set()
    for path in sorted((ROOT / "verl").rglob("*.py")):
        file = path.relative_to(ROOT / "verl").as_posix()
        if file.startswith(KNOW_THE_CONFIGURATION):
            continue
        for line, text in texts(ast.parse(path.read_text())):
            if keys := [key for key in keys_in(text, known) if key.partition(".")[0] in SECTIONS]:
                files.add(file)
                if file not in EXCEPTIONS:
                    named.append(f"verl/{file}:{line} names {', '.join(keys)}")
    assert not named, "\n".join(["Name the argument as the caller wrote it:", *named])
    assert files == EXCEPTIONS.keys()


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ("all 2 prompts are longer than max_prompt_length=3: set max_prompt_length to 9.", ["data.max_prompt_length"]),
        ("kl_ctrl.type='x' is neither fixed nor adaptive.", ["algorithm.kl_ctrl.type"]),
        ("gamma=2 is too large", ["algorithm.gamma"]),
        ("resume_mode=resume_path and resume_from_path=...", ["trainer.resume_mode", "trainer.resume_from_path"]),
        ("dataloader_num_workers=0, data.dataloader_num_workers", []),  # the key is there already
        ("name=vllm", []),  # many sections have a name
        ("gamma is a letter, and ordinary words are no settings: seed, shuffle", []),
        ("'prompt_key', data/max_prompt_length and prompt_key()", []),
        ("1 problem in the configuration:\n  1. data.path: set prompt_key", []),
    ],
)
def test_the_command_line_adds_the_keys_behind_the_arguments(text, keys):
    assert keys_named(text, PPOConfig) == keys


def test_of_a_setting_that_several_models_have_all_keys_are_told():
    told = keys_named("set trust_remote_code=true for this model", PPOConfig)
    assert told == [f"{section}.model.trust_remote_code" for section in ("actor_rollout_ref", "critic", "reward_model")]
    assert keys_named("set trust_remote_code=true for this model", SFTConfig) == ["model.trust_remote_code"]


ONES, ZEROS = torch.ones(2, 3), torch.zeros(2, 3)
BATCH = DataProto.from_dict(tensors={"responses": ZEROS, "attention_mask": torch.ones(2, 9)})


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (
            lambda: core_algos.compute_grpo_outcome_advantage(ZEROS, ONES, index=[0, 1, 2]),
            "index has 3 group ids, and there are 2 rows: give one id for each row.",
        ),
        (
            lambda: core_algos.compute_policy_loss_vanilla(ZEROS, torch.zeros(2, 4), ZEROS, ONES, config=ActorConfig()),
            "the tensors of a policy loss are all (bsz, response_length), and these differ: old_log_prob (2, 3), "
            "log_prob (2, 4), advantages (2, 3), response_mask (2, 3).",
        ),
        (lambda: core_algos.get_kl_controller(SimpleNamespace(type="x")), "kl_ctrl.type='x' is neither fixed nor adap"),
        (lambda: compute_advantage(BATCH, "grpoo"), "unknown advantage estimator 'grpoo'. Did you mean 'grpo'?"),
        (
            lambda: compute_advantage(BATCH.select(batch_keys=["responses"]), "grpo"),
            "and the batch has no attention_mask; it has: responses.",
        ),
        (
            lambda: rearrange_micro_batches(BATCH.batch, max_token_len=5),
            "a sequence of 9 tokens does not fit into a micro-batch of 5. Raise max_token_len (",
        ),
        (
            lambda: DataConfig.from_mapping({"truncation": "centre"}),
            "DataConfig cannot be made: truncation='centre': Input should be 'error', 'left', 'right' or 'middle'.",
        ),
        (lambda: default_compute_score("gsm8k", 5, "1"), "solution_str is int 5, not a text."),
        (lambda: default_compute_score("gsm8k", "#### 1", None), "ground_truth is None ("),
        (
            lambda: get_reward_manager_cls("dapo")(None, 0, overlong_buffer_cfg={"enable": True, "len": 4}),
            "overlong_buffer_cfg.enable=true needs the longest response: max_resp_len=None.",
        ),
        (lambda: load_function_tools("/nowhere.py"), "function_tool_path='/nowhere.py': there is no file"),
    ],
)
def test_a_wrong_call_is_told_by_the_names_that_the_caller_wrote(call, said):
    with pytest.raises(VerlError) as error:
        call()
    assert said in str(error.value)
