"""Chained requests: where the seams between rounds lie."""

from tandem._continuation import whole_characters
from tandem.models import Token


def tokens(*texts: str) -> list[Token]:
    return [Token(number, text) for number, text in enumerate(texts)]


def test_whole_text_is_kept() -> None:
    assert whole_characters(tokens("a", "", "b")) == tuple(tokens("a", "", "b"))
    assert whole_characters([]) == ()


def test_a_cut_character_is_left_with_all_its_tokens() -> None:
    assert whole_characters(tokens("a", "", "\ufffd")) == tuple(tokens("a"))


def test_special_tokens_have_no_text_and_are_no_part_of_a_character() -> None:
    special = Token(9, "", special=True)
    assert whole_characters([special, Token(1, "\ufffd")]) == (special,)
