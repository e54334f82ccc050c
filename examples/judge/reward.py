"""A reward function that asks the judge of the run: the generative reward model of reward_model.rollout."""

import re

import httpx2

QUESTION = "Question: {question}\nAnswer: {answer}\nIs the answer right? End with 'Score: N', N from 0 to 10."


async def compute_score(data_source, solution_str, ground_truth, extra_info, reward_router_address):
    question = extra_info["raw_prompt"][-1]["content"]
    request = {
        "model": "judge",
        "messages": [{"role": "user", "content": QUESTION.format(question=question, answer=solution_str)}],
        "temperature": 0,
        "max_tokens": 256,
    }
    async with httpx2.AsyncClient(timeout=60, trust_env=False) as client:
        reply = await client.post(f"http://{reward_router_address}/v1/chat/completions", json=request)
    reply.raise_for_status()
    text = reply.json()["choices"][0]["message"]["content"]
    score = re.findall(r"Score: (\d+)", text)
    return {"score": min(int(score[-1]), 10) / 10 if score else 0.0, "judge_reply": text}
