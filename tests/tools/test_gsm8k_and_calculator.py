"""The answer tool of GSM8K, and the calculator."""

from __future__ import annotations

import asyncio

import pytest

from verl.tools.calculator_tool import CalculatorError, CalculatorTool, compute, show
from verl.tools.gsm8k_tool import Gsm8kTool


def test_answers_to_gsm8k():
    tool = Gsm8kTool({})

    async def trajectory():
        first, _ = await tool.create(create_kwargs={"ground_truth": "18"})
        other, _ = await tool.create("other", ground_truth="7")
        tried = [await tool.execute(first, {"answer": answer}) for answer in ("17", "18", "#### 18", "19")]
        rewards = [reward for _, reward, _ in tried]
        ends = [await tool.calc_reward(first), await tool.calc_reward(other)]
        await tool.release(first)
        await tool.release(other)
        return tried, rewards, ends

    tried, rewards, ends = asyncio.run(trajectory())
    # Wrong, better, no better than before, worse.
    assert rewards == [-0.05, 0.0, -0.05, -0.05]
    assert ends == [0.0, 0.0]
    assert [response.text for response, _, _ in tried[:2]] == [
        "The answer was read as '17'; its reward is 0.0.",
        "The answer was read as '18'; its reward is 1.0.",
    ]
    assert tool._instance_dict == {}
    with pytest.raises(ValueError, match=r"extra_info.tools_kwargs.calc_gsm8k_reward.create_kwargs.ground_truth"):
        asyncio.run(tool.create())


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("(3 + 4) * 2 ** 5 / sqrt(16)", "56"),  # 7 * 32 / 4
        ("2^10 - 24", "1000"),
        ("0.1 + 0.2", "0.3"),
        ("7 // 2 - -7 % 4", "2"),  # 3 - 1
        ("round(2.71828, 2) × 10", "27.2"),
        ("max(1, 2.5, gcd(12, 18))", "6"),
        ("1e300", "1e+300"),
        ("10 ** 400 // 10 ** 399", "10"),
    ],
)
def test_the_calculator_computes(expression: str, shown: str):
    assert show(compute(expression)) == shown


@pytest.mark.parametrize(
    ("expression", "problem"),
    [
        ("1 / 0", "division by zero"),
        ("9 ** 9 ** 9", "more than 1000 digits"),
        ("2 ** 10 ** 999", "too large"),
        ("round(5, -10 ** 9) + 1 +", "no arithmetic expression"),
        ("__import__('os').system('true')", "is no arithmetic"),
        ("(1).__class__", "is no arithmetic"),
        ("'a' * 10 ** 9", "is no arithmetic"),
        ("True + 1", "is no arithmetic"),
        ("(-8) ** 0.5", "no finite real number"),
        ("sqrt(-1)", "expected a nonnegative input|math domain error"),
        ("1e308 * 10", "no finite real number"),
        ("1 +" * 400 + " 1", "1202 characters; 1000 are allowed"),
        ("(" * 400 + "1" + ")" * 400, "no arithmetic expression"),
        ("sqrt(1, 2)", "exactly one argument"),
        ("", "no arithmetic expression"),
    ],
)
def test_the_calculator_refuses(expression: str, problem: str):
    with pytest.raises(CalculatorError, match=problem.replace("(", r"\(")):
        compute(expression)


def test_the_calculator_as_a_tool():
    tool = CalculatorTool({})
    response, reward, metrics = asyncio.run(tool.execute("1", {"expression": "6 * 7"}))
    assert (response.text, reward, metrics) == ("42", 0.0, {"calculator_error": 0.0})
    response, _, metrics = asyncio.run(tool.execute("1", {"expression": "round(5, -10 ** 9)"}))
    assert (response.text, metrics) == ("0", {"calculator_error": 0.0})
    response, _, metrics = asyncio.run(tool.execute("1", {"expression": "1 / 0"}))
    assert (response.text, metrics) == ("Error: division by zero", {"calculator_error": 1.0})
