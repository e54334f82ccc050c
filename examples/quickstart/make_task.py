"""Everything the quickstart trains on, made in a second: a tokenizer, a tiny random Qwen3, and Countdown data.

A problem gives a target and three numbers: ``make 16 from 7 12 3`` is answered by
``<answer>7 + 12 - 3</answer>``. Every number up to 120 is one token, as in the tokenizers of
many large models, so the model can learn sums rather than digits.

The problems of supervised training, of RL and of the test do not overlap (numbers in any order,
and target).
"""

from __future__ import annotations

import argparse
import ast
import itertools
import random
import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from examples.data_preprocess._common import rl_row
from examples.data_preprocess.countdown import Problem, make_problems

PAD, EOS, USER, ASSISTANT = "<pad>", "<eos>", "<user>", "<assistant>"
WORDS = [PAD, EOS, USER, ASSISTANT, "<unk>", "<answer>", "</answer>", "make", "from", "+", "-", "*", "/", "(", ")"]
LARGEST_NUMBER = 120
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] }}<eos>{% else %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word, sign and whole number of the task."""
    vocabulary = {token: i for i, token in enumerate(WORDS + [str(n) for n in range(LARGEST_NUMBER + 1)])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.WhitespaceSplit(),
            pre_tokenizers.Split(Regex(r"</?[a-z]+>|\d+|[a-z]+|[-+*/()]"), behavior="isolated"),
        ]
    )
    tokenizer.add_special_tokens([PAD, EOS, USER, ASSISTANT])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token=PAD, eos_token=EOS, unk_token="<unk>", chat_template=CHAT_TEMPLATE
    )


def make_model(tokenizer: PreTrainedTokenizerFast, seed: int, hidden: int, layers: int) -> Qwen3ForCausalLM:
    """A Qwen3 shape with random weights."""
    torch.manual_seed(seed)
    config = Qwen3Config(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=128,
        tie_word_embeddings=True,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
    )
    return Qwen3ForCausalLM(config)


def question(problem: Problem) -> str:
    """The text of a problem."""
    numbers, target = problem
    return f"make {target} from {' '.join(map(str, numbers))}"


def plain(expression: str) -> str:
    """The expression with only the parentheses that it needs."""
    return ast.unparse(ast.parse(expression, mode="eval"))


def rl_rows(problems: list[tuple[Problem, str]], split: str) -> list[dict]:
    """Rows that ``RLHFDataset`` and the countdown scorer read."""
    return [
        rl_row(
            "countdown", question(p), "math", {"target": p[1], "numbers": list(p[0])}, split, i, answer=plain(solution)
        )
        for i, (p, solution) in enumerate(problems)
    ]


def answers(problem: Problem) -> list[str]:
    """Every right answer without parentheses that begins with an added number.

    >>> answers(((7, 12, 3), 16))
    ['7 + 12 - 3', '7 - 3 + 12', '12 + 7 - 3', '12 - 3 + 7']
    """
    numbers, target = problem
    found = []
    for order in itertools.permutations(numbers):
        for signs in itertools.product((1, -1), repeat=len(numbers) - 1):
            rest = list(zip(signs, order[1:], strict=True))
            if order[0] + sum(sign * number for sign, number in rest) == target:
                text = "".join(f" {'+' if sign > 0 else '-'} {number}" for sign, number in rest)
                found.append(f"{order[0]}{text}")
    return list(dict.fromkeys(found))


def sft_rows(problems: list[Problem], rng: random.Random, teachers: int) -> list[dict]:
    """Conversations that end with a right answer; each problem is answered by several teachers, each in its way."""
    return [
        {
            "messages": [
                {"role": "user", "content": question(problem)},
                {"role": "assistant", "content": f"<answer>{rng.choice(answers(problem))}</answer>"},
            ]
        }
        for problem in problems
        for _ in range(teachers)
    ]


def main() -> None:
    """Write model/, sft_train.parquet, rl_train.parquet and rl_test.parquet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of the problems and the weights")
    parser.add_argument("--sft_size", type=int, default=10000)
    parser.add_argument("--teachers", type=int, default=3, help="answers to each supervised problem")
    parser.add_argument("--train_size", type=int, default=8000)
    parser.add_argument("--test_size", type=int, default=500)
    parser.add_argument("--num_count", type=int, default=3, help="numbers in a problem")
    parser.add_argument("--max_number", type=int, default=30)
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    args = parser.parse_args()
    sizes = (args.test_size, args.sft_size, args.train_size)
    problems = make_problems(sum(sizes), args.seed, args.num_count, args.max_number, LARGEST_NUMBER, "+-")
    # The generator finds common problems first; shuffled, the three parts are alike.
    rng = random.Random(args.seed)
    rng.shuffle(problems)
    test, sft, train = (problems[sum(sizes[:i]) : sum(sizes[: i + 1])] for i in range(3))
    tables = {
        "sft_train": sft_rows([problem for problem, _ in sft], rng, args.teachers),
        "rl_train": rl_rows(train, "train"),
        "rl_test": rl_rows(test, "test"),
    }
    tokenizer = make_tokenizer()
    write_task(args.output_dir, tables, make_model(tokenizer, args.seed, args.hidden_size, args.layers), tokenizer)


def write_task(
    folder: Path, tables: dict[str, list[dict]], model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast
) -> None:
    """Write a parquet file for each table, and ``model/``; print their sizes."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, rows in tables.items():
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{name}.parquet")
    for part in (model, tokenizer):
        part.save_pretrained(folder / "model")
    parameters = sum(p.numel() for p in model.parameters())
    sizes = ", ".join(f"{name} {len(rows)}" for name, rows in tables.items())
    print(f"{parameters / 1e6:.2f} M parameters, vocabulary {len(tokenizer)}; rows: {sizes}")


if __name__ == "__main__":
    main()
