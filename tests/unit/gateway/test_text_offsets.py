"""Where the tokens of a completion begin in its text, and the order of their alternatives."""

import pytest

from gateway.openai.completion_members import CompletionLogprobs
from gateway.openai.requests import CompletionBody
from tandem import Token, TopToken


@pytest.mark.parametrize(
    ("pieces", "offsets"),
    [
        ([b"a", b"bc", b"", b"d"], [0, 1, 3, 3]),
        ([b"\xc3", b"\xb1", b"x"], [0, 0, 1]),
        ([b"\xf0\x9f", b"\x98", b"\x80", b" x"], [0, 0, 0, 1]),
        ([b"a\xc3", b"\xb1b", b"c"], [0, 1, 3]),
        ([b"\xef", b"\xbf", b"\xbd", b"x"], [0, 0, 0, 1]),  # U+FFFD itself
        # Characters that are begun and never completed
        ([b"M", b"\xc2", b" char", b" x"], [0, 1, 2, 7]),
        ([b"\xf0\x9f", b"", b"a", b"b"], [0, 0, 1, 2]),
        ([b"\xc3", b"\xc3", b"\xb1", b"x"], [0, 1, 1, 2]),
        ([b"\xe0", b"\xff", b"x"], [0, 1, 2]),
        ([b"\xff", b"\xfe", b"x"], [0, 1, 2]),
    ],
)
def test_tokens_begin_where_their_text_does(pieces: list[bytes], offsets: list[int]) -> None:
    tokens = [Token(number, "", -1.0, own_bytes=piece) for number, piece in enumerate(pieces)]
    body = CompletionBody(prompt="x", logprobs=1)
    assert CompletionLogprobs(body).of(tokens)["text_offset"] == offsets
    logprobs = CompletionLogprobs(body)
    assert [logprobs.of([token])["text_offset"] for token in tokens] == [[offset] for offset in offsets]


def test_alternatives_come_likeliest_first_behind_the_sampled_token() -> None:
    """Clients show them as they come. The likelier of two tokens with one text counts."""
    top = tuple(TopToken(number, text, -0.5 - number) for number, text in enumerate(("a", "b", "a", "c")))
    logprobs = CompletionLogprobs(CompletionBody(prompt="x", logprobs=4))
    [alternatives] = logprobs.of([Token(9, "z", -7.0, top=top)])["top_logprobs"]
    assert list(alternatives.items()) == [("z", -7.0), ("a", -0.5), ("b", -1.5), ("c", -3.5)]
