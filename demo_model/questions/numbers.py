"""Arithmetic, comparing, sorting and unit conversion, all within bounded ranges."""

from __future__ import annotations

import random

from demo_model.questions.sample import Kind, Sample, fact, phrase, rule

ADD = (
    "What is {a} + {b}?",
    "{a} + {b}",
    "{a}+{b}",
    "What is {a}+{b}?",
    "{a} + {b} = ?",
    "Add {a} and {b}.",
    "What is {a} plus {b}?",
    "Calculate {a} + {b}.",
    "What is the sum of {a} and {b}?",
)
SUBTRACT = (
    "What is {a} - {b}?",
    "{a} - {b}",
    "{a}-{b}",
    "What is {a}-{b}?",
    "{a} - {b} = ?",
    "Subtract {b} from {a}.",
    "What is {a} minus {b}?",
    "Calculate {a} - {b}.",
)
MULTIPLY = (
    "What is {a} x {b}?",
    "{a} x {b}",
    "{a}*{b}",
    "What is {a}*{b}?",
    "{a} * {b} = ?",
    "Multiply {a} by {b}.",
    "What is {a} times {b}?",
    "Calculate {a} * {b}.",
    "What is the product of {a} and {b}?",
)
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
NAMES = ("Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Lena", "Max")
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


def _sum_of(kind: str, low: int, high: int, rng: random.Random) -> Sample:
    """a + b. The key is unordered, so that a held-out sum is not trained on as b + a."""
    a, b = rng.randint(low, high), rng.randint(low, high)
    return rule(kind, sorted((a, b)), phrase(rng, ADD, a=a, b=b), f"{_places(a, b)}.")


def addition(rng: random.Random) -> Sample:
    """Sums of numbers up to 99."""
    return _sum_of("addition", 1, 99, rng)


def addition_3_digits(rng: random.Random) -> Sample:
    """Sums of two numbers of three digits."""
    return _sum_of("addition_3_digits", 100, 999, rng)


def subtraction(rng: random.Random) -> Sample:
    """Differences of numbers up to 99, never negative."""
    b, a = sorted((rng.randint(1, 99), rng.randint(1, 99)))
    return rule("subtraction", (a, b), phrase(rng, SUBTRACT, a=a, b=b), f"{_difference(a, b)}.")


def times_table(rng: random.Random) -> Sample:
    """Products up to 12 x 12, which are memorized as facts, so the split is by wording."""
    a, b = rng.randint(2, 12), rng.randint(2, 12)
    return fact("times_table", phrase(rng, MULTIPLY, a=a, b=b), f"{a} x {b} = {a * b}.")


def multiplication_steps(rng: random.Random) -> Sample:
    """Two digits times one digit, worked out through the tens and the ones."""
    tens, ones, b = rng.randint(1, 9) * 10, rng.randint(1, 9), rng.randint(2, 9)
    a = tens + ones
    steps = f"{tens} x {b} + {ones} x {b} = {tens * b} + {ones * b} = {a * b}."
    return rule("multiplication_steps", (a, b), phrase(rng, MULTIPLY, a=a, b=b), f"{a} x {b} = {steps}")


def hard_multiplication(rng: random.Random) -> Sample:
    """Three digits times two or three digits, in one step: expected to be wrong, with low confidence."""
    a, b = rng.randint(101, 999), rng.randint(21, 999)
    question = phrase(rng, MULTIPLY, a=a, b=b)
    return rule("hard_multiplication", sorted((a, b)), question, f"{a} x {b} = {a * b}.")


def word_problem(rng: random.Random) -> Sample:
    """A gain or a loss, as a word problem."""
    name, thing = rng.choice(NAMES), rng.choice(THINGS)
    a, b = rng.randint(5, 60), rng.randint(2, 40)
    if rng.random() < 0.5:
        story, working, total = rng.choice(("gets {b} more", "buys {b} more", "finds {b} more")), _places, a + b
    else:
        a += b
        story, working, total = rng.choice(("gives away {b}", "loses {b}", "sells {b}")), _difference, a - b
    question = f"{name} has {a} {thing} and {story.format(b=b)}. How many {thing} does {name} have now?"
    answer = f"{working(a, b)}. {name} has {total} {thing} now."
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
    "addition": Kind(addition, 8, late=9),
    "addition_3_digits": Kind(addition_3_digits, 5, late=6),
    "subtraction": Kind(subtraction, 7, late=8),
    "times_table": Kind(times_table, 4),
    "multiplication_steps": Kind(multiplication_steps, 4, late=5),
    "word_problem": Kind(word_problem, 4, late=3),
    "comparison": Kind(comparison, 4, late=5),
    "sorting": Kind(sorting, 4, late=5),
    "conversion": Kind(conversion, 3),
    "parity": Kind(parity, 1.5, late=1),
    "hard_multiplication": Kind(hard_multiplication, 1, hard=True),
}
