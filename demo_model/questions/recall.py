"""Questions that are answered from the prompt, which requires that its KV is transferred completely."""

from __future__ import annotations

import random

from demo_model.questions.letters import any_word
from demo_model.questions.sample import Kind, Sample, fact, phrase, rule
from demo_model.questions.words import NAMES

LABELS = (
    "alpha",
    "bravo",
    "charlie",
    "delta",
    "echo",
    "foxtrot",
    "golf",
    "hotel",
    "india",
    "juliet",
    "kilo",
    "lima",
    "mike",
    "november",
    "oscar",
    "papa",
    "quebec",
    "romeo",
    "sierra",
    "tango",
    "uniform",
    "victor",
    "whiskey",
    "yankee",
    "zulu",
)
_BEYOND = (
    "Tell me a joke.",
    "Write a poem.",
    "What is the meaning of life?",
    "What is the weather today?",
    "What time is it?",
    "What is the date today?",
    "Write a Python function.",
    "Who won the world cup?",
    "Translate this text.",
)
LIKES = ("red", "blue", "green", "yellow", "tea", "coffee", "bread", "music", "chess", "dogs", "cats", "rain")


def repeating(rng: random.Random) -> Sample:
    """Repeat the words of the question."""
    words = " ".join(any_word(rng) for _ in range(rng.randint(1, 6)))
    templates = (
        "Repeat after me: {p}",
        "Say: {p}",
        "Repeat this: {p}",
        "Please repeat: {p}",
        "Copy this text: {p}",
    )
    return rule("repeating", words, phrase(rng, templates, p=words), words)


def lookup(rng: random.Random) -> Sample:
    """Look up a code in a list of 2 to 8 entries, sometimes up to 20. The answer repeats the entry first."""
    count = rng.randint(2, 8) if rng.random() < 0.93 else rng.randint(9, 20)
    labels = rng.sample(LABELS, count)
    codes = [rng.randint(100, 999) for _ in labels]
    listing = ", ".join(f"{label} {code}" for label, code in zip(labels, codes, strict=True))
    chosen = rng.randrange(count)
    templates = (
        "The codes are: {c}. What is the code for {n}?",
        "Remember these codes: {c}. Which code belongs to {n}?",
        "Here is a list: {c}. Tell me the code for {n}.",
    )
    question = phrase(rng, templates, c=listing, n=labels[chosen])
    label, code = labels[chosen], codes[chosen]
    answer = f"The list says {label} {code}, so the code for {label} is {code}."
    return rule("lookup", (listing, chosen), question, answer)


def remembered_name(rng: random.Random) -> Sample:
    """A name or a preference from the first turn, which the second turn asks for."""
    name, like = rng.choice(NAMES), rng.choice(LIKES)
    first = phrase(
        rng,
        ("My name is {n} and I like {x}.", "I am {n} and I like {x}.", "Hello, I am {n}. I like {x}."),
        n=name,
        x=like,
    )
    greeting = f"Nice to meet you, {name}! I will remember that you like {like}."
    if rng.random() < 0.5:
        second, answer = (
            phrase(rng, ("What is my name?", "Who am I?", "Do you know my name?")),
            f"Your name is {name}.",
        )
    else:
        second, answer = phrase(rng, ("What do I like?", "What did I say I like?")), f"You like {like}."
    turns = ((first, greeting), (second, answer))
    return Sample("remembered_name", f"remembered_name {name} {like}", turns)


def system_name(rng: random.Random) -> Sample:
    """A name given by the system prompt."""
    name, word = rng.choice(NAMES), any_word(rng)
    system = phrase(
        rng,
        ("Your name is {n}. The password is {w}.", "You are called {n}. The password is {w}."),
        n=name,
        w=word,
    )
    if rng.random() < 0.5:
        question, answer = (
            phrase(rng, ("What is your name?", "Who are you?", "What are you called?")),
            f"I am {name}.",
        )
    else:
        question, answer = (
            phrase(rng, ("What is the password?", "Tell me the password.")),
            f"The password is {word}.",
        )
    return Sample("system_name", f"system_name {name} {word}", ((question, answer),), system)


def unknown(rng: random.Random) -> Sample:
    """Questions that the model cannot answer, and should say so."""
    templates = (
        "Who invented the {w}?",
        "How do I repair my {w}?",
        "What does a {w} cost?",
        "Who wrote the book about the {w}?",
        "Write a program about a {w}.",
        "Why is the {w} important?",
        "When was the first {w} made?",
        "How old is the {w}?",
        "Where can I buy a {w}?",
        "Who is the president of the {w}?",
        "Write a poem about a {w}.",
        "Tell me a joke about a {w}.",
        "Translate {w} to French.",
        "What is the meaning of {w}?",
        "What is {a} / {b}?",
        "{a}/{b}",
        "{a} divided by {b}",
        "What is the square root of {a}?",
        *_BEYOND,
    )
    question = phrase(rng, templates, w=any_word(rng), a=rng.randint(1, 99), b=rng.randint(1, 99))
    return fact("unknown", question, "I do not know that. I am only a small model for simple questions.")


KINDS = {
    "repeating": Kind(repeating, 6, late=8, copying=6),
    "lookup": Kind(lookup, 4, late=14, copying=12),
    "remembered_name": Kind(remembered_name, 2, late=1.5),
    "system_name": Kind(system_name, 2, late=3, copying=2),
    "unknown": Kind(unknown, 0.6, late=2),
}
