"""Questions about the letters of a word: hard for a tokenizer, easy to check."""

from __future__ import annotations

import random

from demo_model.questions.sample import Kind, Sample, phrase, rule
from demo_model.questions.words import COMMON_WORDS

_SYLLABLES = tuple(consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou")
QUOTES = ("{}", "'{}'", '"{}"', "the word {}", 'the word "{}"')


def any_word(rng: random.Random) -> str:
    """A common English word, or a made-up one so that words never run out."""
    if rng.random() < 0.6:
        return rng.choice(COMMON_WORDS)
    word = "".join(rng.choice(_SYLLABLES) for _ in range(rng.randint(1, 3)))
    return word + rng.choice(("", "", "n", "r", "s", "l"))


def _letter_question(rng: random.Random, templates: tuple[str, ...]) -> tuple[str, str]:
    """A word, and a question about it."""
    word = any_word(rng)
    return word, phrase(rng, templates, w=rng.choice(QUOTES).format(word))


def spelling(rng: random.Random) -> Sample:
    """The letters of a word in order."""
    templates = ("Spell {w}.", "Spell {w} letter by letter.", "How do you spell {w}?", "Please spell {w}.")
    word, question = _letter_question(rng, templates)
    return rule("spelling", word, question, "-".join(word) + ".")


def reversing(rng: random.Random) -> Sample:
    """The letters of a word in reverse order, after spelling it."""
    templates = ("Reverse {w}.", "Spell {w} backwards.", "What is {w} backwards?", "Write {w} in reverse.")
    word, question = _letter_question(rng, templates)
    return rule("reversing", word, question, "-".join(word) + ", backwards: " + "-".join(reversed(word)) + ".")


def counting_letters(rng: random.Random) -> Sample:
    """A word's length, after spelling it."""
    templates = (
        "How many letters are in {w}?",
        "How many letters does {w} have?",
        "Count the letters in {w}.",
        "How long is {w}?",
    )
    word, question = _letter_question(rng, templates)
    return rule("counting_letters", word, question, "-".join(word) + f": {len(word)} letters.")


def end_letter(rng: random.Random) -> Sample:
    """The first or the last letter of a word, after spelling it."""
    which = rng.choice(("first", "last"))
    templates = (
        f"What is the {which} letter of {{w}}?",
        f"Which letter comes {which} in {{w}}?",
        f"Tell me the {which} letter of {{w}}.",
    )
    word, question = _letter_question(rng, templates)
    letter = word[0] if which == "first" else word[-1]
    return rule("end_letter", word, question, f"{'-'.join(word)}: the {which} letter is {letter}.")


KINDS = {
    "spelling": Kind(spelling, 5, late=5, copying=4),
    "reversing": Kind(reversing, 5, late=18, copying=10),
    "counting_letters": Kind(counting_letters, 4, late=5),
    "end_letter": Kind(end_letter, 2, late=7),
}
