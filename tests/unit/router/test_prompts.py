"""Prompts cut to their end, and words as the tokenizer may write them."""

from collections.abc import Iterator

import pytest

from router.prompts import EncodedPrompt, PromptEncoder
from router.served_model import ServedModel
from tests.fakes.router_model import write_checkpoint


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[PromptEncoder]:
    made = PromptEncoder(ServedModel.load("tiny", write_checkpoint(tmp_path_factory.mktemp("model"))))
    yield made
    made.close()


def test_the_end_of_a_prompt_has_no_known_text() -> None:
    prompt = EncodedPrompt((1, 2, 3), "abc")
    assert prompt.last(None) is prompt
    assert prompt.last(3) is prompt
    assert prompt.last(2) == EncodedPrompt((2, 3), None)


def test_words_are_ruled_out_with_and_without_a_space(encoder: PromptEncoder) -> None:
    def ids(text: str) -> tuple[int, ...]:
        return tuple(encoder._plain_ids(text))

    assert ids(" fox")[-len(ids("fox")) :] != ids("fox"), "the space is part of its token"
    assert set(encoder.spellings(["fox"])) == set(encoder.spellings([" fox"])) == {ids("fox"), ids(" fox")}
    assert ids(" 7") == (*ids(" "), *ids("7"))
    assert encoder.spellings(["7"]) == (ids("7"),), "which rules out a 7 behind a space, too"
    assert encoder.spellings(["7", "7"]) == (ids("7"),)
