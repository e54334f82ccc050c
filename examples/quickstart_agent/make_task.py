"""Everything that the quickstart for agents trains on: a tokenizer, a tiny random Qwen3, and questions.

Half of the questions are held out: neither the warm-up nor reinforcement learning asks one of them, and every row of
every file has a table of its own.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import sys
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # the clone's root

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from examples.data_preprocess._common import rl_row
from examples.quickstart.make_task import make_model, write_task
from examples.quickstart_agent import task
from examples.quickstart_agent.task import Question

PAD, EOS, USER, ASSISTANT, UNKNOWN = "<pad>", "<eos>", "<user>", "<assistant>", "<unk>"
SPECIAL = [PAD, EOS, USER, ASSISTANT, UNKNOWN]
TAGS = [f"<{slash}{tag}>" for tag in ("tool_call", "tool_response", "answer") for slash in ("", "/")]
JSON = ['{"name": "', '", "arguments": {"person": "', '", "relation": "', '"}}']
"""Each of these texts is one token, as parts of JSON often are in large vocabularies."""
WORDS = [" of ", task.TOOL, task.UNKNOWN, *task.PEOPLE, *task.RELATIONS]
CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{% if m['role'] == 'assistant' %}<assistant>{{ m['content'] or '' }}"
    "{% for call in m['tool_calls'] or [] %}{% set f = call['function'] %}<tool_call>"
    "{% set a = f['arguments'] %}"
    '{"name": "{{ f[\'name\'] }}", "arguments": {{ a if a is string else a | tojson }}}'
    "</tool_call>{% endfor %}<eos>"
    "{% elif m['role'] == 'tool' %}<tool_response>{{ m['content'] }}</tool_response>"
    "{% else %}<user>{{ m['content'] }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """One token for each word and tag of the task, and for each part of a call; a text is the join of its tokens."""
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *TAGS, *JSON, *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    pieces = "|".join([*map(re.escape, JSON), " of ", "[a-z_]+", "."])
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(pieces), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.add_special_tokens([PAD, EOS, USER, ASSISTANT, UNKNOWN])
    tokenizer.add_tokens([AddedToken(tag, normalized=False) for tag in TAGS])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=PAD,
        eos_token=EOS,
        unk_token=UNKNOWN,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
    )


Message = dict[str, Any]
TEACHERS = {"right": 3, "wrong person": 4, "first cell": 1, "no relation": 1, "guess": 1}
"""What the demonstrations of the warm-up do, and in which shares: three of ten are right. Where the others go wrong:
they look up the second relation for the person of the question, take the first cell for the answer, leave out an
argument and guess after the tool's error, or guess without the tool."""


def call(**arguments: str) -> Message:
    """A turn that calls the tool."""
    made = {"type": "function", "function": {"name": task.TOOL, "arguments": json.dumps(arguments)}}
    return {"role": "assistant", "content": "", "tool_calls": [made]}


def said(tool: str) -> Message:
    """What the tool said."""
    return {"role": "tool", "content": tool}


def demonstration(question: Question, table: int, chance: random.Random) -> list[Message]:
    """A conversation of a teacher who may be careless."""
    kind = chance.choices(list(TEACHERS), list(TEACHERS.values()))[0]
    guess = chance.choice(task.PEOPLE)
    between = task.look_up(table, question.person, question.first)
    first = [call(person=question.person, relation=question.first), said(between)]
    match kind:
        case "right" | "wrong person":
            person = between if kind == "right" else question.person
            found = task.look_up(table, person, question.second)
            turns = [*first, call(person=person, relation=question.second), said(found), answered(found)]
        case "first cell":
            turns = [*first, answered(between)]
        case "no relation":
            turns = [call(person=question.person), said("Error"), answered(guess)]
        case _:
            turns = [answered(guess)]
    return [{"role": "user", "content": question.text}, *turns]


def answered(person: str) -> Message:
    """The last turn."""
    return {"role": "assistant", "content": f"<answer>{person}</answer>"}


def rl_rows(questions: list[Question], tables: random.Random, split: str) -> list[dict[str, Any]]:
    """Rows for the agent loop ``tool_agent``: the tool alone is told the row's table."""
    rows = []
    for index, question in enumerate(questions):
        table = tables.getrandbits(32)
        row = rl_row(
            "look_up",
            question.text,
            "tools",
            task.answer(question, table),
            split,
            index,
            tools_kwargs={task.TOOL: {"create_kwargs": {"table": table}}},
        )
        rows.append(row | {"agent_name": "tool_agent"})
    return rows


def main() -> None:
    """Write model/, tools.yaml, sft_train.parquet, rl_train.parquet and rl_test.parquet."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output_dir", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=1, help="of the questions, the tables and the weights")
    parser.add_argument("--sft_size", type=int, default=8000)
    parser.add_argument("--train_size", type=int, default=2000)
    parser.add_argument("--test_size", type=int, default=500, help="questions held out, of 1,000")
    parser.add_argument("--hidden_size", type=int, default=128)
    parser.add_argument("--layers", type=int, default=2)
    args = parser.parse_args()
    chance = random.Random(args.seed)
    questions = task.all_questions()
    chance.shuffle(questions)
    test, train = questions[: args.test_size], questions[args.test_size :]
    asked = chance.choices(train, k=args.sft_size)
    tables = {
        "sft_train": [{"messages": demonstration(question, chance.getrandbits(32), chance)} for question in asked],
        "rl_train": rl_rows(chance.choices(train, k=args.train_size), chance, "train"),
        "rl_test": rl_rows(test, chance, "test"),
    }
    tokenizer = make_tokenizer()
    write_task(args.output_dir, tables, make_model(tokenizer, args.seed, args.hidden_size, args.layers), tokenizer)
    (args.output_dir / "tools.yaml").write_text("tools:\n  - class_name: examples.quickstart_agent.look_up.LookUp\n")


if __name__ == "__main__":
    main()
