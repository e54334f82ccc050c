import random
from pathlib import Path

import pandas as pd
import pytest
from transformers import AutoTokenizer

from examples.quickstart.settings import command
from examples.quickstart_agent import make_task, task
from examples.quickstart_agent.quickstart_agent import conversation_lines
from examples.quickstart_agent.reward import compute_score
from examples.quickstart_agent.settings import rl_settings, sft_settings
from tests.forks import run
from verl.agents.parsers import get_tool_parser
from verl.datasets.chat import as_messages
from verl.tools.utils.tool_registry import initialize_tools
from verl.trainer.config import PPOConfig, SFTConfig
from verl.trainer.config.command_line import compose
from verl.trainer.config.load import load_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("task")
    script = ROOT / "examples" / "quickstart_agent" / "make_task.py"
    run([script, f"--output_dir={folder}", "--sft_size=300", "--train_size=40"]).check_returncode()
    return folder


def test_held_out_questions_are_never_trained_on_and_no_two_rows_share_a_table(made):
    test, train = (pd.read_parquet(made / f"rl_{split}.parquet") for split in ("test", "train"))
    held_out = {prompt[0]["content"] for prompt in test["prompt"]}
    assert len(held_out) == 500
    asked = {prompt[0]["content"] for prompt in train["prompt"]}
    shown = {messages[0]["content"] for messages in pd.read_parquet(made / "sft_train.parquet").messages}
    assert not held_out & (asked | shown)
    tables = [
        info["tools_kwargs"][task.TOOL]["create_kwargs"]["table"] for rows in (test, train) for info in rows.extra_info
    ]
    assert len(set(tables)) == 540


def test_demonstrations_in_tokens_and_back(made):
    """Each turn is written by known tokens, reads as the call that was meant, and three of ten find the answer."""
    tokenizer = AutoTokenizer.from_pretrained(made / "model")
    [tool] = initialize_tools(str(made / "tools.yaml"))
    parser = get_tool_parser("hermes", tokenizer)
    right = 0
    chance = random.Random(0)
    question = task.Question("ada", "friend", "doctor")
    for number in range(300):
        messages = as_messages(make_task.demonstration(question, number, chance), "a demonstration")
        text = tokenizer.apply_chat_template(messages, tokenize=False)
        ids = tokenizer(text)["input_ids"]
        if "Error" not in text:
            assert tokenizer.decode(ids) == text
            assert tokenizer.unk_token_id not in ids
        said = [part.split("<tool_response>")[0] for part in text.split("<assistant>")[1:]]
        turns = [parser.parse_text(turn.removesuffix("<eos>")) for turn in said]
        assert not any(turn.malformed for turn in turns)
        assert all(call.name == tool.name for turn in turns for call in turn.calls)
        right += compute_score("look_up", text.removesuffix("<eos>"), task.answer(question, number), {}) == 1.0
    # 3 of 10 teachers are right; the others are so by chance, 1 of 39: 300 (0.3 + 0.7 / 39) = 95, within 4 * 8.1.
    assert 63 <= right <= 127


def test_only_a_last_turn_that_is_right_scores():
    assert compute_score("", "zoe</tool_response><answer>zoe</answer>", "zoe", {}) == 1.0
    assert compute_score("", "<answer>zoe</answer>", "ada", {}) == 0.0
    assert compute_score("", "<answer>zoe</answer><answer>ada</answer>", "ada", {}) == 0.0
    assert compute_score("", "<answer>ada</answer> or so", "ada", {}) == 0.0
    assert compute_score("", "ada", "ada", {}) == 0.0


def test_the_settings_are_accepted(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    sft = command("verl.trainer.sft_trainer", sft_settings(made, tmp_path / "sft", seed=1))[3:]
    assert load_config(compose(sft, "sft_trainer"), SFTConfig).trainer.seed == 1
    rl = command("verl.trainer.main_ppo", rl_settings(made, made / "model", tmp_path / "rl", seed=1))[3:]
    assert load_config(compose(rl), PPOConfig).actor_rollout_ref.rollout.multi_turn.format == "hermes"


def test_a_conversation_is_shown_turn_by_turn():
    record = {"output": "<tool_call>a</tool_call><tool_response>ben</tool_response><answer>ben</answer>", "score": 0.0}
    assert conversation_lines(record | {"gts": "zoe"}) == [
        "model  <tool_call>a</tool_call>",
        "tool   ben",
        "model  <answer>ben</answer>",
        "wrong, it is zoe",
    ]
