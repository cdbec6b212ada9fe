"""The bundled models' questions: what is held out can be known from what was trained on, and its answers are right."""

import random
import re
from collections import defaultdict

import pytest

from demo_model.questions import draw

FACTS = ("small_talk", "capital", "opposite", "plural", "nature", "explanation", "listing", "table")
DRAWS = 4000
FEWEST_WORDINGS = 3


@pytest.mark.parametrize("kind", FACTS)
def test_a_held_out_fact_is_trained_in_several_other_wordings(kind: str) -> None:
    rng = random.Random(1)
    wordings: defaultdict[str, set[str]] = defaultdict(set)
    for _ in range(DRAWS * 3):
        [(question, answer)] = draw(kind, rng, held_out=False).turns
        wordings[answer].add(question)
    held_out = dict(draw(kind, rng, held_out=True).turns[0] for _ in range(DRAWS // 10))
    assert not set(held_out) & set().union(*wordings.values())
    rare = {question: answer for question, answer in held_out.items() if len(wordings[answer]) < FEWEST_WORDINGS}
    assert not rare


def _drawn(kind: str) -> list[tuple[str, str]]:
    rng = random.Random(2)
    return [draw(kind, rng, held_out=False).turns[-1] for _ in range(300)]


def test_an_entry_is_repeated_before_its_code_is_said() -> None:
    for question, answer in _drawn("lookup"):
        match = re.fullmatch(r"The list says (\w+) (\d+), so the code for (\w+) is (\d+)\.", answer)
        assert match is not None
        assert match.group(1, 2) == match.group(3, 4)
        assert f" {match[1]} {match[2]}" in question


def test_an_end_letter_is_said_after_the_word_is_spelled() -> None:
    for question, answer in _drawn("end_letter"):
        match = re.fullmatch(r"([a-z-]+): the (first|last) letter is ([a-z])\.", answer)
        assert match is not None
        letters = match[1].split("-")
        assert "".join(letters) in question
        assert match[3] == letters[0 if match[2] == "first" else -1]


def test_a_word_problem_says_what_is_left() -> None:
    for question, answer in _drawn("word_problem"):
        start, change = map(int, re.findall(r"\d+", question))
        is_loss = any(verb in question for verb in ("gives away", "loses", "sells"))
        match = re.search(r"= (\d+) \w+ now\.$", answer)
        assert match is not None
        assert int(match[1]) == (start - change if is_loss else start + change)
