"""Reasoning and answer, however the text is cut into pieces."""

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.openai.messages import ReasoningReader, build_message, make_deltas

CASES = [
    (False, "<think>\nLet me see.\n</think>\n\nIt is 5.", ("Let me see.", "It is 5.")),
    (False, "<think>a < b </thin k></think>c", ("a < b </thin k>", "c")),
    (False, "<think>\n\n</think>\n\nHi", (None, "Hi")),
    (False, "Hi <think>there</think>", (None, "Hi <think>there</think>")),
    (False, "  Hi ", (None, "  Hi ")),
    (False, "<thin", (None, "<thin")),
    (False, "", (None, "")),
    (False, "<think>still at it ", ("still at it", None)),
    (False, "<think>", (None, "")),
    (False, "<think><think>x", ("<think>x", None)),
    (False, "<think> <think", ("<think", None)),
    (True, "Let me see.\n</think>\n\n 5 \n", ("Let me see.", "5 \n")),
    (True, "<think>\nLet me see.</think>5", ("Let me see.", "5")),
    (True, "<think><think>x</think>5", ("<think>x", "5")),
    (True, "  <thi", ("<thi", None)),
    (True, "cut </thi", ("cut </thi", None)),
]


def read(begins_within: bool, pieces: list[str]) -> tuple[str | None, str | None]:
    deltas = make_deltas(None, ReasoningReader(begins_within=begins_within))
    message = build_message([*(delta for piece in pieces for delta in deltas.push(piece)), *deltas.finish()])
    return message.get("reasoning_content"), message["content"]


@pytest.mark.parametrize(("begins_within", "text", "expected"), CASES)
@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_reasoning(begins_within: bool, text: str, expected: tuple[str | None, str | None], size: int) -> None:
    assert read(begins_within, [text[at : at + size] for at in range(0, len(text), size)]) == expected


PIECES = st.lists(st.sampled_from(["<think>", "</think>", "<", "</", "think", ">", " ", "\n", "x", "yz"]), max_size=14)


def split(begins_within: bool, text: str) -> tuple[str | None, str | None]:
    """What the reader finds in a whole text."""
    first = text.lstrip()
    if not begins_within and not first.startswith("<think>"):
        return None, text
    reasoning, _, content = first.removeprefix("<think>").partition("</think>")
    return reasoning.strip() or None, content.lstrip() or (None if reasoning.strip() else "")


@given(pieces=PIECES, begins_within=st.booleans())
@example(pieces=["<think>", "<", "think", ">"], begins_within=False)
@example(pieces=["<think>", "<", "think", ">"], begins_within=True)
@example(pieces=["<think>", "<", "</think>", "think", ">"], begins_within=False)
def test_chunking_does_not_change_the_result_and_no_text_is_lost(pieces: list[str], begins_within: bool) -> None:
    text = "".join(pieces)
    assert read(begins_within, [text]) == read(begins_within, pieces) == split(begins_within, text)
