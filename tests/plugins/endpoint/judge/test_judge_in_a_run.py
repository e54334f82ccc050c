"""A judge in whole runs: rewards are its own answers, computed while it is awake."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.support.tiny_run import make_tiny_run, overrides
from verl.testing.models import tiny_model_dir
from verl.trainer.config.command_line import compose
from verl.trainer.main_ppo import run_ppo

ASKS = """
import httpx2

def prompt_of(text):
    return [{"role": "system", "content": "grade"}, {"role": "user", "content": text}]

async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    body = {"model": "any", "messages": prompt_of(solution_str), "temperature": 0, "max_tokens": 6}
    async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
        reply = await client.post(f"http://{reward_router_address}/v1/chat/completions", json=body)
    assert reply.status_code == 200, reply.text
    text = reply.json()["choices"][0]["message"]["content"]
    return {"score": sum(map(ord, text)) / 1000, "reply": text}
"""


def settings(folder: Path, reward: str) -> dict[str, Any]:
    (folder / "reward.py").write_text(reward)
    return {
        "reward_model__enable": "true",
        "reward_model__model__path": tiny_model_dir(folder / "judge", family="llama", seed=7),
        "reward_model__rollout__name": "native",
        "reward_model__rollout__dtype": "float32",
        "reward_model__rollout__prompt_length": 2000,
        "reward_model__rollout__response_length": 16,
        "reward_model__rollout__max_num_seqs": 4,
        "custom_reward_function__path": folder / "reward.py",
        "trainer__rollout_data_dir": folder / "dumps",
    }


def dumped(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for file in sorted(folder.glob("*.jsonl")) for line in file.read_text().splitlines()]


def answers_of(judge: Path, texts: list[str]) -> list[str]:
    """What Transformers' own loop draws with the judge."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(judge), AutoTokenizer.from_pretrained(judge)
    found = []
    for text in texts:
        messages = [{"role": "system", "content": "grade"}, {"role": "user", "content": text}]
        prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt")["input_ids"]
        drawn = model.generate(prompt, do_sample=False, max_new_tokens=6, pad_token_id=0)
        found.append(tokenizer.decode(drawn[0, prompt.shape[1] :], skip_special_tokens=True))
    return found


def test_the_rewards_are_the_judges_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    paths = make_tiny_run(tmp_path)
    log = tmp_path / "metrics.jsonl"
    monkeypatch.setenv("VERL_FILE_LOGGER_PATH", str(log))
    run_ppo(compose(overrides(paths, tmp_path, **settings(tmp_path, ASKS))))
    rows = dumped(tmp_path / "dumps")
    replies = answers_of(tmp_path / "judge", [row["output"] for row in rows])
    assert [row["reply"] for row in rows] == replies
    assert len(set(replies)) > 8
    assert [row["score"] for row in rows] == pytest.approx([sum(map(ord, reply)) / 1000 for reply in replies])
    steps = [json.loads(line)["data"] for line in log.read_text().splitlines()]
    # 2 steps of 4 prompts with 4 responses each, one call for each response
    assert [step["judge/calls"] for step in steps if "judge/calls" in step] == [16, 16]
    assert all(step["judge/failed_calls"] == 0 for step in steps if "judge/calls" in step)
