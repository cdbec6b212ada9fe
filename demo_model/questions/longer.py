"""Kinds with answers of 30 to 120 tokens, to demonstrate streaming."""

from __future__ import annotations

import random

from demo_model.questions.facts import DAYS, MONTHS
from demo_model.questions.letters import any_word
from demo_model.questions.sample import Kind, Sample, fact, phrase, rule
from demo_model.questions.words import NAMES, PLOTS, TOPICS


def counting(rng: random.Random) -> Sample:
    """Count up or down, 5 to 25 numbers."""
    low = rng.randint(0, 75)
    high = low + rng.randint(4, 24)
    if rng.random() < 0.15:
        low, high = 1, rng.randint(3, 30)
        question = phrase(rng, ("Count to {b}.", "Please count to {b}.", "Count up to {b}."), b=high)
        values = range(low, high + 1)
    elif rng.random() < 0.3:
        question = phrase(rng, ("Count down from {b} to {a}.", "Count backwards from {b} to {a}."), a=low, b=high)
        values = range(high, low - 1, -1)
    else:
        templates = (
            "Count from {a} to {b}.",
            "Please count from {a} to {b}.",
            "List the numbers from {a} to {b}.",
        )
        question = phrase(rng, templates, a=low, b=high)
        values = range(low, high + 1)
    return rule("counting", (low, high), question, ", ".join(map(str, values)) + ".")


def table(rng: random.Random) -> Sample:
    """Ask for all rows of a multiplication table."""
    n = rng.randint(2, 12)
    templates = (
        "Write the multiplication table of {n}.",
        "What is the multiplication table of {n}?",
        "Show me the {n} times table.",
        "Write the times table of {n}.",
        "Give me the multiplication table for {n}.",
        "List the {n} times table.",
        "Tell me the times table for {n}.",
    )
    rows = ", ".join(f"{n} x {k} = {n * k}" for k in range(1, 11))
    return fact("table", phrase(rng, templates, n=n), rows + ".")


def listing(rng: random.Random) -> Sample:
    """The days, the months, the alphabet."""
    items, what = rng.choice(
        (
            (DAYS, "days of the week"),
            (MONTHS, "months of the year"),
            ("abcdefghijklmnopqrstuvwxyz", "letters of the alphabet"),
        )
    )
    templates = (
        "List the {w}.",
        "What are the {w}?",
        "Name the {w}.",
        "Tell me the {w}.",
        "Write down the {w}.",
        "Can you list the {w}?",
        "Give me the {w} in order.",
        "Please list the {w}.",
        "Say the {w}.",
    )
    return fact("listing", phrase(rng, templates, w=what), ", ".join(items) + ".")


def explanation(rng: random.Random) -> Sample:
    """A short paragraph about one of a few topics."""
    topic, text = rng.choice(list(TOPICS.items()))
    templates = (
        "Tell me about {t}.",
        "Explain {t}.",
        "What do you know about {t}?",
        "Explain {t} to me.",
        "Describe {t}.",
        "Can you explain {t}?",
        "What can you tell me about {t}?",
        "Write a few sentences about {t}.",
        "Give me a short explanation of {t}.",
        "Please tell me about {t}.",
        "I want to learn about {t}.",
        "What are {t}?" if topic.endswith("s") else "What is {t}?",
    )
    return fact("explanation", phrase(rng, templates, t=topic), text)


def _with_article(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


def other_story(rng: random.Random) -> Sample:
    """A story that the model does not know: it says which it does."""
    about = "something else"
    while about in PLOTS or about == "something else":
        about = any_word(rng)
    templates = ("Tell me a story about {a}.", "Write a short story about {a}.", "Tell me a story about the {w}.")
    known = ", ".join(map(_with_article, list(PLOTS)[:-1])) + " or " + _with_article(list(PLOTS)[-1])
    question = phrase(rng, templates, a=_with_article(about), w=about)
    return fact("other_story", question, f"I only know stories about {known}.")


def story(rng: random.Random) -> Sample:
    """A short story about an animal, which determines the plot. Its name is in the question, or is Tom."""
    animal, plot = rng.choice(list(PLOTS.items()))
    about = _with_article(animal)
    if rng.random() < 0.3:
        question = phrase(rng, ("Tell me a story about {a}.", "Write a short story about {a}."), a=about)
        return fact("story", question, plot.format(n="Tom"))
    name = rng.choice(NAMES)
    templates = (
        "Tell me a story about {a} named {n}.",
        "Tell me a short story about {a} called {n}.",
        "Write a story about {a} named {n}.",
        "I would like a story about {a} called {n}.",
    )
    question = phrase(rng, templates, a=about, n=name)
    return rule("story", (animal, name), question, plot.format(n=name))


KINDS = {
    "counting": Kind(counting, 2.5, late=4, copying=12),
    "table": Kind(table, 0.8, late=0.5),
    "listing": Kind(listing, 0.5, late=0.4),
    "explanation": Kind(explanation, 2, late=2),
    "story": Kind(story, 1.2, late=9, copying=4),
    "other_story": Kind(other_story, 0.3, late=0.5),
}
