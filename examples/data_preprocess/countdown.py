"""Countdown: reach a target with given numbers and + - * /, as prompts for RL. The problems are made here.

    python examples/data_preprocess/countdown.py --train_size 20000 --test_size 500 --num_count 3 --max_number 99

Every problem can be solved: its target is the value of a random expression over its numbers. No
problem (numbers in any order, and target) is in both splits, or twice in one.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":  # the clone's root instead of this folder, whose math.py would hide Python's own
    sys.path[0] = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))

import random
from fractions import Fraction

from examples.data_preprocess._common import Row, parser, rl_row, run, save
from verl.errors import DataError

DATA_SOURCE = "countdown"
OPERATIONS = "+-*/"
TEMPLATE = (
    "Using the numbers {numbers}, write an expression that equals {target}. You can use + - * / and parentheses, "
    "and each number exactly once. Give the expression in <answer> </answer> tags, "
    "for example <answer>(1 + 2) * 3</answer>."
)

MAX_REPEATS = 10_000
"""Draws in a row without a new problem, after which there are taken to be no more."""

Problem = tuple[tuple[int, ...], int]


def combine(values: list[tuple[Fraction, str]], operations: str, rng: random.Random) -> tuple[Fraction, str] | None:
    """Join values by random operations in a random tree; None where that divides by zero.

    Args:
        values: each with the text of the expression that it is the value of.
        operations: those to choose from, of ``+-*/``.
        rng: source of chance.
    """
    values = list(values)
    while len(values) > 1:
        (a, left), (b, right) = (values.pop(rng.randrange(len(values))) for _ in range(2))
        operation = rng.choice(operations)
        if operation == "/" and b == 0:
            return None
        value = {"+": a + b, "-": a - b, "*": a * b, "/": a / b if b else a}[operation]
        values.append((value, f"({left} {operation} {right})"))
    return values[0]


def make_problem(
    rng: random.Random, num_count: int, max_number: int, max_target: int, operations: str
) -> tuple[Problem, str]:
    """One solvable problem, and a solution of it."""
    while True:
        numbers = [rng.randint(1, max_number) for _ in range(num_count)]
        solved = combine([(Fraction(number), str(number)) for number in numbers], operations, rng)
        if solved is None:
            continue
        value, solution = solved
        if value.denominator == 1 and 0 < value <= max_target:
            return (tuple(numbers), int(value)), solution[1:-1] if num_count > 1 else solution


def make_problems(
    count: int, seed: int, num_count: int, max_number: int, max_target: int, operations: str
) -> list[tuple[Problem, str]]:
    """``count`` problems, no two of the same numbers and target.

    Raises:
        DataError: so many do not turn up; there may not be so many.
    """
    rng = random.Random(seed)
    found: dict[Problem, tuple[Problem, str]] = {}
    repeats = 0
    while len(found) < count:
        (numbers, target), solution = make_problem(rng, num_count, max_number, max_target, operations)
        key = (tuple(sorted(numbers)), target)
        repeats = repeats + 1 if key in found else 0
        if repeats > MAX_REPEATS:
            raise DataError(
                f"only {len(found)} different problems of {num_count} numbers up to {max_number} and targets up to "
                f"{max_target} turned up, and {count} are asked for. Lower --train_size or --test_size, or raise "
                "--num_count, --max_number or --max_target."
            )
        found.setdefault(key, ((numbers, target), solution))
    return list(found.values())


def make_row(problem: Problem, solution: str, split: str, index: int) -> Row:
    """A problem as `RLHFDataset` and the scorer read it; ``extra_info.answer`` is a solution."""
    numbers, target = problem
    question = TEMPLATE.format(numbers=list(numbers), target=target)
    truth = {"target": target, "numbers": list(numbers)}
    return rl_row(DATA_SOURCE, question, "math", truth, split, index, question=question, answer=solution)


def main() -> None:
    """Make, split, write."""
    arguments = parser("Make Countdown prompts for RL.", "~/data/countdown")
    arguments.set_defaults(train_size=20000, test_size=500)
    arguments.add_argument("--num_count", type=int, default=3, help="numbers in a problem")
    arguments.add_argument("--max_number", type=int, default=99, help="largest number")
    arguments.add_argument("--max_target", type=int, default=100, help="largest target")
    arguments.add_argument("--operations", default=OPERATIONS, help="operations that targets are made by")
    args = arguments.parse_args()
    if min(args.train_size, args.test_size, args.num_count, args.max_number, args.max_target) < 1:
        raise DataError("sizes, --num_count, --max_number and --max_target must be at least 1.")
    if not args.operations or set(args.operations) - set(OPERATIONS):
        raise DataError(f"--operations={args.operations!r} must be some of {OPERATIONS}.")
    total = args.train_size + args.test_size
    problems = make_problems(total, args.seed, args.num_count, args.max_number, args.max_target, args.operations)
    splits = {"train": problems[: args.train_size], "test": problems[args.train_size :]}
    rows = {split: [make_row(*made, split, index) for index, made in enumerate(part)] for split, part in splits.items()}
    save(rows, args.local_save_dir)


if __name__ == "__main__":
    run(main)
