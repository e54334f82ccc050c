"""The task of the quickstart for agents: questions whose answers stand in a secret table, two look-ups away.

``doctor of friend of ada`` asks for the doctor of ada's friend. Every row of the data has a table of its own, which the
model never sees: it has to ask who ada's friend is, and then for the doctor of that person. Nothing in the question
tells the answer, so without the tool a model can but guess one of 39 people.
"""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass

PEOPLE = (
    *("ada", "alba", "ben", "carl", "cleo", "dan", "dora", "emil", "eva", "finn", "gina", "gus", "hana", "hugo"),
    *("ian", "ivy", "jon", "judy", "karl", "kim", "leo", "lucy", "max", "mia", "ned", "nora", "ola", "otto"),
    *("pia", "quin", "rosa", "sam", "tess", "theo", "uli", "vera", "walt", "xena", "yuri", "zoe"),
)
RELATIONS = ("friend", "teacher", "sister", "doctor", "tailor")
TOOL = "look_up"
UNKNOWN = "nothing"
"""What the tool says of a person or a relation that there is not."""


@dataclass(frozen=True)
class Question:
    """``second of first of person``."""

    person: str
    first: str
    second: str

    @property
    def text(self) -> str:
        """As the model is asked."""
        return f"{self.second} of {self.first} of {self.person}"


def all_questions() -> list[Question]:
    """Every question that can be asked."""
    return [Question(*parts) for parts in itertools.product(PEOPLE, RELATIONS, RELATIONS)]


def look_up(table: int, person: str, relation: str) -> str:
    """One cell of a table.

    Args:
        table: the secret number from which all cells of the table follow.
        person: a name.
        relation: the column.
    """
    if person not in PEOPLE or relation not in RELATIONS:
        return UNKNOWN
    others = [other for other in PEOPLE if other != person]
    return random.Random(f"{table} {person} {relation}").choice(others)


def answer(question: Question, table: int) -> str:
    """What the table answers."""
    return look_up(table, look_up(table, question.person, question.first), question.second)
