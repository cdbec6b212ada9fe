"""Chained requests: where the seams between rounds lie."""

from tandem import GenerateArguments
from tandem._continuation import _round, complete_characters
from tandem._retries import Deadline
from tandem.models import Token


def tokens(*texts: str) -> list[Token]:
    return [Token(number, text) for number, text in enumerate(texts)]


def test_whole_text_is_kept() -> None:
    assert complete_characters(tokens("a", "", "b")) == tuple(tokens("a", "", "b"))
    assert complete_characters([]) == ()


def test_a_cut_character_is_left_with_all_its_tokens() -> None:
    assert complete_characters(tokens("a", "", "\ufffd")) == tuple(tokens("a"))


def test_special_tokens_have_no_text_and_are_no_part_of_a_character() -> None:
    special = Token(9, "", special=True)
    assert complete_characters([special, Token(1, "\ufffd")]) == (special,)


def test_only_the_first_round_has_a_target_for_its_first_token() -> None:
    """A refusal between rounds would throw away what is there already."""
    arguments = GenerateArguments(prompt="x", ttft_target=1.0, priority="batch")
    first, second = (_round(arguments, [1], n, None, Deadline.after(10)) for n in (0, 5))
    assert (first["ttft_target"], second["ttft_target"]) == (1.0, None)
    assert first["priority"] == second["priority"] == "batch"
