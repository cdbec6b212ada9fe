"""Arithmetic, comparing, sorting and unit conversion, all within bounded ranges."""

from __future__ import annotations

import random

from demo_model.questions.sample import Kind, Sample, fact, phrase, rule
from demo_model.questions.words import NAMES

_TYPED = (
    "{a} {o} {b}",
    "{a}{o}{b}",
    "{a} {o} {b} =",
    "{a}{o}{b}=",
    "{a} {o} {b} = ?",
    "{a}{o}{b}=?",
    "{a} {o} {b}?",
    "What is {a} {o} {b}?",
    "What is {a}{o}{b}?",
    "What's {a} {o} {b}?",
    "How much is {a} {o} {b}?",
    "Calculate {a} {o} {b}.",
    "Can you calculate {a} {o} {b}?",
    "Please calculate {a} {o} {b}.",
)


def wordings(signs: str, word: str, *sentences: str) -> tuple[str, ...]:
    """Templates of a calculation with each of `signs`, with the operator's word, and as `sentences`."""
    typed = tuple(each.replace("{o}", sign) for sign in signs for each in _TYPED)
    spoken = ("What is {a} {o} {b}?", "What's {a} {o} {b}?", "How much is {a} {o} {b}?", "{a} {o} {b}")
    return (*typed, *(each.replace("{o}", word) for each in spoken), *sentences)


ADD = wordings("+", "plus", "Add {a} and {b}.", "What is the sum of {a} and {b}?")
SUBTRACT = wordings("-", "minus", "Subtract {b} from {a}.")
MULTIPLY = wordings(
    "x*×", "times", "Multiply {a} by {b}.", "Multiply {a} and {b}.", "What is the product of {a} and {b}?"
)
SMALL_SHARE = 0.35  # of the operands have one digit, as in most questions of people who try the model
UNITS = (
    ("minutes", "seconds", 60),
    ("hours", "minutes", 60),
    ("days", "hours", 24),
    ("weeks", "days", 7),
    ("years", "months", 12),
    ("kilometres", "metres", 1000),
    ("metres", "centimetres", 100),
    ("centimetres", "millimetres", 10),
    ("kilograms", "grams", 1000),
    ("litres", "millilitres", 1000),
)
THINGS = ("apples", "books", "coins", "pens", "stamps", "eggs", "cards", "flowers")


def _places(a: int, b: int) -> str:
    """a + b worked out place by place: "48 + 27 = 60 + 15 = 75"."""
    sums = [(a // unit % 10 + b // unit % 10) * unit for unit in (100, 10, 1) if max(a, b) >= unit]
    steps = f"{' + '.join(map(str, sums))} = " if len(sums) > 1 else ""
    return f"{a} + {b} = {steps}{a + b}"


def _difference(a: int, b: int) -> str:
    """a - b with the tens taken away first: "84 - 46 = 44 - 6 = 38"."""
    tens, ones = b // 10 * 10, b % 10
    steps = f"{a - tens} - {ones} = " if tens and ones else ""
    return f"{a} - {b} = {steps}{a - b}"


def _operand(rng: random.Random) -> int:
    return rng.randint(0, 9) if rng.random() < SMALL_SHARE else rng.randint(10, 99)


def sum_of(a: int, b: int, template: str) -> Sample:
    """a + b. The key is unordered, so that a held-out sum is not trained on as b + a. One digit and one digit are known
    by heart or not at all, so these are split by wording.
    """
    question, answer = template.format(a=a, b=b), f"{_places(a, b)}."
    if max(a, b) < 10:
        return fact("addition", question, answer)
    return rule("addition" if max(a, b) < 100 else "addition_3_digits", sorted((a, b)), question, answer)


def difference_of(a: int, b: int, template: str) -> Sample:
    """a - b, which is not negative. Split as sums are."""
    question, answer = template.format(a=a, b=b), f"{_difference(a, b)}."
    return fact("subtraction", question, answer) if a < 10 else rule("subtraction", (a, b), question, answer)


def product_of(a: int, b: int, template: str) -> Sample:
    """a x b of the times tables."""
    return fact("times_table", template.format(a=a, b=b), f"{a} x {b} = {a * b}.")


def addition(rng: random.Random) -> Sample:
    """Sums of numbers up to 99."""
    return sum_of(_operand(rng), _operand(rng), rng.choice(ADD))


def addition_3_digits(rng: random.Random) -> Sample:
    """Sums of two numbers of three digits, or of one with a smaller one."""
    a, b = rng.randint(100, 999), _operand(rng) if rng.random() < 0.3 else rng.randint(100, 999)
    a, b = rng.sample((a, b), 2)
    return sum_of(a, b, rng.choice(ADD))


def subtraction(rng: random.Random) -> Sample:
    """Differences of numbers up to 99, never negative."""
    b, a = sorted((_operand(rng), _operand(rng)))
    return difference_of(a, b, rng.choice(SUBTRACT))


def times_table(rng: random.Random) -> Sample:
    """Products up to 12 x 12, which are memorized as facts, so the split is by wording."""
    return product_of(rng.randint(0, 12), rng.randint(0, 12), rng.choice(MULTIPLY))


def multiplication_steps(rng: random.Random) -> Sample:
    """Two digits (above 12) times one digit, worked out through the tens and the ones, in either order."""
    a, b = rng.randint(13, 99), rng.randint(2, 9)
    tens, ones = a // 10 * 10, a % 10
    if rng.random() < 0.5:
        first, second, parts = a, b, f"{tens} x {b} + {ones} x {b}"
    else:
        first, second, parts = b, a, f"{b} x {tens} + {b} x {ones}"
    steps = f"{parts} = {tens * b} + {ones * b} = " if ones else ""
    question = phrase(rng, MULTIPLY, a=first, b=second)
    return rule("multiplication_steps", (a, b), question, f"{first} x {second} = {steps}{a * b}.")


def hard_multiplication(rng: random.Random) -> Sample:
    """Two or three digits times two or three digits, in one step: expected to be wrong, with low confidence."""
    a, b = rng.randint(13, 999), rng.randint(13, 999)
    question = phrase(rng, MULTIPLY, a=a, b=b)
    return rule("hard_multiplication", sorted((a, b)), question, f"{a} x {b} = {a * b}.")


def word_problem(rng: random.Random) -> Sample:
    """A gain or a loss, as a word problem. The answer says the sum as addition and subtraction do."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(5, 60), rng.randint(2, 40)
    if rng.random() < 0.5:
        story, working = rng.choice(("gets {b} more", "buys {b} more", "finds {b} more")), _places
    else:
        a += b
        story, working = rng.choice(("gives away {b}", "loses {b}", "sells {b}")), _difference
    question = f"{name} has {a} {thing} and {story.format(b=b)}. How many {thing} does {name} have now?"
    answer = f"{name} has {working(a, b)} {thing} now."
    return rule("word_problem", working(a, b), question, answer)


def comparison(rng: random.Random) -> Sample:
    """The larger or the smaller of two numbers."""
    a, b = rng.sample(range(1, 1000 if rng.random() < 0.25 else 100), 2)
    word = rng.choice(("larger", "smaller"))
    first, second = (max(a, b), min(a, b)) if word == "larger" else (min(a, b), max(a, b))
    templates = (
        "Which is {word}, {a} or {b}?",
        "Which number is {word}: {a} or {b}?",
        "What is {word}, {a} or {b}?",
        "{a} or {b}: which one is {word}?",
    )
    question = phrase(rng, templates, word=word, a=a, b=b)
    return rule("comparison", sorted((a, b)), question, f"{first} is {word} than {second}.")


def sorting(rng: random.Random) -> Sample:
    """Three to five numbers put in order."""
    values = rng.sample(range(1, 100), rng.randint(3, 5))
    templates = (
        "Sort these numbers: {values}.",
        "Sort {values} from smallest to largest.",
        "Put these numbers in order: {values}.",
        "Order {values} from small to large.",
    )
    question = phrase(rng, templates, values=", ".join(map(str, values)))
    return rule("sorting", values, question, ", ".join(map(str, sorted(values))) + ".")


def conversion(rng: random.Random) -> Sample:
    """Conversion of a whole number of units to a smaller unit."""
    big, small, factor = rng.choice(UNITS)
    count = rng.randint(2, 12 if factor in (60, 24, 7, 12) else 99)
    templates = (
        "How many {small} are in {n} {big}?",
        "How many {small} are there in {n} {big}?",
        "Convert {n} {big} to {small}.",
        "What is {n} {big} in {small}?",
        "{n} {big} in {small}",
    )
    question = phrase(rng, templates, small=small, big=big, n=count)
    return fact("conversion", question, f"{count} {big} are {count * factor} {small}.")


def parity(rng: random.Random) -> Sample:
    """Ask whether a number is even or odd."""
    n = rng.randint(1, 999)
    question = phrase(rng, ("Is {n} even or odd?", "Is {n} odd or even?", "Is the number {n} even or odd?"), n=n)
    return rule("parity", n, question, f"{n} is {'odd' if n % 2 else 'even'}.")


KINDS = {
    "addition": Kind(addition, 8, late=13, copying=6),
    "addition_3_digits": Kind(addition_3_digits, 5, late=8, copying=6),
    "subtraction": Kind(subtraction, 7, late=9, copying=5),
    "times_table": Kind(times_table, 4, late=8, copying=4),
    "multiplication_steps": Kind(multiplication_steps, 4, late=8),
    "word_problem": Kind(word_problem, 4, late=8, copying=4),
    "comparison": Kind(comparison, 4, late=10, copying=6),
    "sorting": Kind(sorting, 4, late=24, copying=16),
    "conversion": Kind(conversion, 3, late=2),
    "parity": Kind(parity, 1.5, late=1),
    "hard_multiplication": Kind(hard_multiplication, 1, hard=True, late=0.4),
}
