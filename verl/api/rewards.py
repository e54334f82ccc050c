"""Reward functions given as objects: several with weights, of three calling forms, combined into one function.

The combined function is an object that the processes of rewards load, so this module imports neither torch nor data.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import math
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal, cast

from verl.base.types import JsonMapping, JsonObject
from verl.errors import ConfigError, RewardError

__tracebackhide__ = True
"""Messages about a reward function begin with its own lines."""

Function = Callable[..., object]
Form = Literal["sample", "texts", "completions", "batch"]

FORMS = (
    "A reward function is recognised by its parameters: solution_str (one response, returns a number or a dict with "
    "'score'), solution_strs (all responses of a step, returns a list of these), or completions (the same as in TRL). "
    "Further parameters are columns of the data by name, lists of them in the second and third form."
)
_RESPONSES: tuple[tuple[str, Form], ...] = (
    ("solution_str", "sample"),
    ("solution_strs", "texts"),
    ("completions", "completions"),
    ("data", "batch"),
)
SAMPLE_ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info", "prompt")
"""Arguments of a function for one response, beside the columns of the data."""
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos", "prompts")
"""Arguments of a function for all responses, in the same order."""
COMPLETION_ARGUMENTS = ("completions", "prompts")
"""Arguments of a function in the form of TRL, beside the columns of the data."""
_RESPONSE_ARGUMENTS = ("solution_str", "solution_strs", "completions", "prompts")
"""Arguments that are never a column of the data, whatever that has."""
_TRUTH_ARGUMENTS = ("ground_truth", "ground_truths")
"""Arguments that need a column with the ground truth; without it the error names the column."""
_RESERVED_NAMES = ("score", "reward_status", "turn_scores")
"""Names of columns that verl writes; a reward function or a further value of it is not called so."""


@dataclass(frozen=True)
class Reward:
    """A function with its name in metrics, its weight in the sum, and its form."""

    name: str
    function: Function
    weight: float
    form: Form


def named_rewards(functions: Sequence[Function], weights: Sequence[float] | None) -> list[Reward]:
    """Give each function a name of its own, its weight (1 by default) and its form.

    Raises:
        ConfigError: there is no function, one has none of the forms, or the weights are not as many numbers.
    """
    if not functions:
        raise ConfigError("reward=[]: there is no reward function. Give one, or several in a list.")
    for function in functions:
        if not callable(function):
            raise ConfigError(f"reward: {function!r:.100} is {type(function).__name__}, not a function. {FORMS}")
    if weights is not None and not isinstance(weights, Sequence):
        raise ConfigError(
            f"reward_weights={weights!r} is {type(weights).__name__}. Give a list, a number for each function."
        )
    weights = [1.0] * len(functions) if weights is None else list(weights)
    if len(weights) != len(functions):
        raise ConfigError(f"reward_weights has {len(weights)} numbers for {len(functions)} reward functions.")
    for weight in weights:
        if isinstance(weight, bool) or not isinstance(weight, (int, float)) or not math.isfinite(weight):
            raise ConfigError(f"reward_weights: {weight!r} is no finite number.")
    names: list[str] = []
    for position, function in enumerate(functions, 1):
        name = name_of(function)
        name = f"reward_{position}" if name in ("<lambda>", *_RESERVED_NAMES) else name
        names.append(name if name not in names else f"{name}_{position}")
    parts = zip(names, functions, weights, strict=True)
    rewards = [Reward(name, function, float(weight), form_of(function)) for name, function, weight in parts]
    if len(rewards) > 1 and any(reward.form == "batch" for reward in rewards):
        raise ConfigError(
            "a reward function with the parameter 'data' returns token scores, so it cannot be combined with others."
        )
    return rewards


def name_of(function: Function) -> str:
    """Return the name of a function, of what a partial calls, or of an object's class."""
    while isinstance(function, functools.partial):
        function = function.func
    return getattr(function, "__name__", type(function).__name__)


def form_of(function: Function) -> Form:
    """Determine the form of a function from its parameters.

    Raises:
        ConfigError: it has none of the forms.
    """
    try:
        signature = inspect.signature(function)
    except ValueError as error:  # some functions of C
        raise ConfigError(f"the parameters of the reward function {name_of(function)} are unknown. {FORMS}") from error
    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    named = [name for name, parameter in signature.parameters.items() if parameter.kind in by_name]
    for name, form in _RESPONSES:
        if name in named:
            return form
    alone = next((name for name in named if name in ("completion", "response", "output", "text")), None)
    remedy = f"Call its parameter {alone} solution_str, the text of one response. " if alone else ""
    raise ConfigError(f"the reward function {name_of(function)}{signature} takes no response by name. {remedy}{FORMS}")


def no_reward(solution_str: str) -> float:
    """Raise, as the reward function of a run whose environments give all rewards.

    Raises:
        RewardError: always.
    """
    raise RewardError("the environment gave no reward for this episode, and the call has no reward function.")


def check_columns(
    rewards: Sequence[Reward], columns: Collection[str], has_truth: bool = True, what: str = "data"
) -> None:
    """Check that every required parameter of the functions is a column or is given anyway.

    Args:
        rewards: the functions.
        columns: those of the data.
        has_truth: whether any row has a ground truth, which functions otherwise cannot ask for.
        what: the argument that holds the data, for messages.

    Raises:
        ConfigError: names the function, the parameter and the columns.
    """
    passed: Mapping[Form, Sequence[str]] = {
        "sample": SAMPLE_ARGUMENTS,
        "texts": BATCH_ARGUMENTS,
        "completions": COMPLETION_ARGUMENTS,
    }
    for reward in rewards:
        parameters = inspect.signature(reward.function).parameters.values()
        required = [
            p.name for p in parameters if p.default is p.empty and p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
        ]
        if reward.form == "batch":
            continue
        if not has_truth and (name := next((name for name in required if name in _TRUTH_ARGUMENTS), None)):
            raise ConfigError(
                f"the reward function {reward.name} needs {name}, and no row of {what} has a ground truth, in "
                f"reward_model or in a column ground_truth. Columns: {', '.join(sorted(columns))}. Name the column "
                "that has it as the parameter, or give the parameter a default."
            )
        if missing := [name for name in required if name not in columns and name not in passed[reward.form]]:
            raise ConfigError(
                f"the reward function {reward.name}{inspect.signature(reward.function)} needs {', '.join(missing)}, "
                f"and {what} has no such column. Its columns: {', '.join(sorted(columns))}. A function of this form "
                f"also receives {', '.join(passed[reward.form])}. Rename the parameter or the column, or give the "
                "parameter a default."
            )


def combine(
    rewards: Sequence[Reward], columns: Collection[str], prompt_key: str = "prompt", text_prompts: bool = True
) -> Function:
    """Return one reward function for all; it is async if any of them is and all take single responses.

    Args:
        rewards: the functions.
        columns: those of the data, which functions may name.
        prompt_key: the column of the prompt.
        text_prompts: whether the prompts of the data are texts, so that completions are texts too, as in TRL.
    """
    if rewards[0].form == "batch":
        return rewards[0].function
    kind = SampleRewards
    if any(reward.form != "sample" for reward in rewards):
        kind = BatchRewards
    elif any(map(_is_async, rewards)):
        kind = AsyncSampleRewards
    return kind(rewards, [name for name in columns if name != prompt_key], prompt_key, text_prompts)


def _is_async(reward: Reward) -> bool:
    function = reward.function
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(getattr(function, "__call__", None))  # noqa: B004


class _Rewards:
    """Arguments of several functions, and the sum of their scores.

    Its signature names the columns that the functions take; the run passes those. What a single function requires
    has no default, so that the run refuses rows without it; of several, each may judge some of the rows.
    """

    arguments: tuple[str, ...] = ()
    """Names of the arguments beside the columns; the first is required."""

    def __init__(self, rewards: Sequence[Reward], columns: Sequence[str], prompt_key: str, text_prompts: bool) -> None:
        self.rewards = list(rewards)
        self.prompt_key = prompt_key
        self.text_prompts = text_prompts
        self.is_only = len(self.rewards) == 1
        self.__name__ = "+".join(reward.name for reward in self.rewards)
        functions = [inspect.signature(reward.function).parameters for reward in self.rewards]
        takes_any = any(p.kind is p.VAR_KEYWORD for parameters in functions for p in parameters.values())
        named = {name for parameters in functions for name in parameters}
        row_columns = [name for name in columns if (takes_any or name in named) and name not in _RESPONSE_ARGUMENTS]
        first, *other_arguments = self.arguments
        required = {p.name for parameters in functions for p in parameters.values() if p.default is p.empty}
        self.never_left_out = dict.fromkeys(
            row_columns if takes_any else [name for name in row_columns if name in required]
        )
        names = dict.fromkeys([*other_arguments, "prompt", prompt_key, *row_columns])
        parameters = [inspect.Parameter(first, inspect.Parameter.KEYWORD_ONLY)]
        parameters += [
            inspect.Parameter(
                name,
                inspect.Parameter.KEYWORD_ONLY,
                default=inspect.Parameter.empty if self.is_only and name in required else None,
            )
            for name in names
        ]
        self.__signature__ = inspect.Signature(parameters)

    def prompt_of(self, row: JsonMapping) -> JsonObject:
        """Return the prompt of a row, a text or messages, under both names that functions may have for it."""
        prompt = row.get("prompt") or row.get(self.prompt_key)
        if self.text_prompts and prompt and not isinstance(prompt, str):
            prompt = prompt[-1]["content"]
        return {self.prompt_key: prompt, "prompt": prompt}

    def total(self, scores: Sequence[Any]) -> Any:
        """Return the weighted sum of the functions' scores of one response, and each score by name.

        A function that returns None does not judge this response.
        """
        result: JsonObject = {}
        values: list[float] = []
        for reward, score in zip(self.rewards, scores, strict=True):
            value = score
            if isinstance(score, Mapping):
                if self.is_only and reward.weight == 1.0:
                    return dict(score)
                if "score" not in score:
                    raise RewardError(f"{reward.name} returned a dict without 'score'; it has: {', '.join(score)}.")
                value = score["score"]
                result |= {f"{reward.name}/{name}": more for name, more in score.items() if name not in _RESERVED_NAMES}
            if value is None:
                continue
            if isinstance(value, bool) or hasattr(value, "item"):  # numbers of numpy and torch
                with suppress(TypeError, ValueError, RuntimeError):  # of an array with several: reported below
                    value = float(value)
            if not isinstance(value, (int, float)):
                raise RewardError(
                    f"{reward.name} returned {type(value).__name__} {value!r:.100}, not a number, nor a dict whose "
                    "'score' is one."
                )
            values.append(reward.weight * value)
            if not self.is_only:
                result[reward.name] = float(value)
        if not values:
            raise RewardError(f"no reward function judged the response: {self.__name__} returned None.")
        return {"score": math.fsum(values), **result}


class SampleRewards(_Rewards):
    """Functions that get one response each."""

    arguments = ("solution_str", "data_source", "ground_truth", "extra_info")

    def __call__(self, **row: object) -> object:
        """Score one response, with what the row has."""
        arguments = self.never_left_out | row | self.prompt_of(row)
        return self.total([call(reward.function, arguments) for reward in self.rewards])


class AsyncSampleRewards(SampleRewards):
    """Functions that get one response each, some of which are async."""

    async def __call__(self, **row: object) -> object:
        """Score one response, with what the row has."""
        arguments = self.never_left_out | row | self.prompt_of(row)
        scores = []
        for reward in self.rewards:
            score = call(reward.function, arguments)
            scores.append(await score if inspect.isawaitable(score) else score)
        return self.total(scores)


class BatchRewards(_Rewards):
    """Functions of which one or more get all responses of a step; the others are called for each response."""

    arguments = ("solution_strs", "data_sources", "ground_truths", "extra_infos")

    def __call__(self, **lists: Any) -> list[object]:
        """Score all responses, with what the rows have in lists."""
        texts = lists["solution_strs"]
        samples = [{name: values[row_index] for name, values in lists.items()} for row_index in range(len(texts))]
        prompts = [self.prompt_of(row) for row in samples]
        columns = lists | {name: [prompt[name] for prompt in prompts] for name in (self.prompt_key, "prompt")}
        columns["prompts"] = columns["prompt"]
        answers = texts if self.text_prompts else [[{"role": "assistant", "content": text}] for text in texts]
        trl_arguments = {name: values for name, values in columns.items() if name not in (*self.arguments, "prompt")}
        arguments: Mapping[Form, JsonObject] = {
            "texts": columns,
            "completions": trl_arguments | {"completions": answers},
        }
        one_of: dict[str, str] = dict(zip(BATCH_ARGUMENTS, SAMPLE_ARGUMENTS, strict=True))
        rows = [
            {one_of.get(name, name): values[row_index] for name, values in columns.items()}
            for row_index in range(len(texts))
        ]
        by_function: list[list[object]] = []
        for reward in self.rewards:
            if reward.form == "sample":
                results = [call(reward.function, row) for row in rows]
                by_function.append(
                    asyncio.run(_awaited(cast(list[Awaitable[object]], results))) if _is_async(reward) else results
                )
                continue
            result: Any = call(reward.function, arguments[reward.form])
            result = asyncio.run(_awaited([result]))[0] if inspect.isawaitable(result) else result
            result = result.tolist() if hasattr(result, "tolist") else result
            if not isinstance(result, (list, tuple)) or len(result) != len(texts):
                returned = f"{len(result)} scores" if isinstance(result, (list, tuple)) else type(result).__name__
                raise RewardError(
                    f"{reward.name} returned {returned} for {len(texts)} responses; expected a list of {len(texts)}."
                )
            by_function.append(list(result))
        return [self.total_or_unusable(scores) for scores in zip(*by_function, strict=True)]

    def total_or_unusable(self, scores: Sequence[object]) -> object:
        """Add up as :meth:`total`; if a score is no number, return it, so that only this response fails."""
        try:
            return self.total(scores)
        except RewardError:
            unusable = next((score for score in scores if not isinstance(score, (int, float, type(None)))), None)
            return unusable if unusable is None or isinstance(unusable, (str, dict)) else repr(unusable)


async def _awaited(results: Sequence[Awaitable[object]]) -> list[object]:
    return list(await asyncio.gather(*results))


def call(function: Function, arguments: Mapping[str, object]) -> object:
    """Call a function with the arguments that its signature names."""
    parameters = inspect.signature(function).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return function(**arguments)
    return function(**{name: value for name, value in arguments.items() if name in parameters})
