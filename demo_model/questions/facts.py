"""Facts that the model memorizes: calendar, capitals, opposites, plurals, greetings."""

from __future__ import annotations

import random

from demo_model.questions.sample import Kind, Sample, fact, phrase
from demo_model.questions.words import ANTONYMS, CAPITALS, COLOURS, PLURALS, SOUNDS

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)

WHO = "I am the small demonstration model bundled with Tandem."
ABILITIES = (
    "I can add, subtract and multiply small numbers, spell words, convert units, name capitals and "
    "opposites, remember your name, explain how Tandem works, and tell short stories."
)
SMALL_TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (
        (
            "Hello",
            "Hello!",
            "Hi",
            "Hi!",
            "Hey",
            "Hey there!",
            "Hello there!",
            "Good morning!",
            "Good evening!",
            "Hi there",
            "Greetings!",
            "Good afternoon!",
            "Hello Tandem",
            "Hi, are you there?",
            "Good day",
        ),
        "Hello! How can I help you?",
    ),
    (
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Introduce yourself.",
            "Tell me about yourself.",
            "Which model are you?",
            "Are you a language model?",
            "Who am I talking to?",
            "What model is this?",
        ),
        WHO + " I answer simple questions, and I am often wrong about anything else.",
    ),
    (
        (
            "What can you do?",
            "How can you help me?",
            "Help",
            "What do you know?",
            "What can I ask you?",
            "Give me some examples of what you can do.",
            "What are you good at?",
            "What should I ask?",
        ),
        ABILITIES,
    ),
    (
        ("Test", "Testing", "Just a test", "This is a test.", "Test 1 2 3", "Is this working?", "Does it work?"),
        "It works. Ask me a simple question, such as 17 + 25.",
    ),
    (
        ("OK", "Okay", "Good", "Great!", "Nice!", "Well done!", "Cool", "That is right.", "Very good!", "Wow"),
        "I am glad. What else would you like to know?",
    ),
    (
        (
            "Thanks",
            "Thank you!",
            "Thanks!",
            "Thank you very much.",
            "Thanks a lot!",
            "Thank you, that helps.",
        ),
        "You are welcome!",
    ),
    (
        ("Bye", "Goodbye!", "Bye!", "See you later.", "Good night!", "Goodbye", "See you!"),
        "Goodbye! Have a nice day.",
    ),
    (
        ("How are you?", "How are you today?", "How do you do?", "Are you well?", "How is it going?"),
        "I am well, thank you. What would you like to know?",
    ),
    (
        ("Who made you?", "Who trained you?", "Where do you come from?", "How were you trained?"),
        "I was trained from scratch by a short script that comes with Tandem.",
    ),
)


# What people put around small talk, so that none is known in one wording only. {p} is what is said, {l} the same
# inside a sentence, {s} without its closing mark {m}.
SAID = ("{p}", "{p}", "Well, {l}", "Oh, {l}", "Ah, {l}", "Right, {l}", "{s}, Tandem{m}", "{s}, my friend{m}")
ASKED = ("{p}", "{p}", "So, {l}", "Well, {l}", "Hello, {l}", "Tell me, {l}", "{s}, Tandem{m}", "Hi! {p}")


def small_talk(rng: random.Random) -> Sample:
    """Greetings, thanks, and the identity of the model."""
    questions, answer = rng.choice(SMALL_TALK)
    said = rng.choice(questions)
    text = said.rstrip("?.!")
    inside = said if said[:2].isupper() else said[0].lower() + said[1:]
    frames = ASKED if said[-1] == "?" else SAID
    return fact("small_talk", phrase(rng, frames, p=said, l=inside, s=text, m=said[len(text) :]), answer)


def capital(rng: random.Random) -> Sample:
    """Country to capital, and back."""
    country, city = rng.choice(list(CAPITALS.items()))
    templates = (
        "What is the capital of {c}?",
        "What is the capital city of {c}?",
        "Which city is the capital of {c}?",
        "Name the capital of {c}.",
        "Tell me the capital of {c}.",
        "Do you know the capital of {c}?",
    )
    back = (
        "{t} is the capital of which country?",
        "Which country has the capital {t}?",
        "What country is {t} the capital of?",
        "{t} is the capital of?",
        "Of which country is {t} the capital?",
        "Name the country whose capital is {t}.",
    )
    question = phrase(rng, back if rng.random() < 0.35 else templates, c=country, t=city)
    return fact("capital", question, f"The capital of {country} is {city}.")


def opposite(rng: random.Random) -> Sample:
    """Ask for the opposite of an adjective."""
    word, answer = rng.choice(list(ANTONYMS.items()))
    templates = (
        "What is the opposite of {w}?",
        "What is the opposite of '{w}'?",
        'Give me the opposite of "{w}".',
        "Which word means the opposite of {w}?",
        "Name an antonym of {w}.",
        "The opposite of {w} is?",
        "Tell me the opposite of {w}.",
        "Do you know the opposite of {w}?",
    )
    return fact("opposite", phrase(rng, templates, w=word), f"The opposite of {word} is {answer}.")


def plural(rng: random.Random) -> Sample:
    """Ask for a regular or irregular plural of a noun."""
    word, answer = rng.choice(list(PLURALS.items()))
    templates = (
        "What is the plural of {w}?",
        "What is the plural of '{w}'?",
        'Give me the plural of "{w}".',
        "How do you write the plural of {w}?",
        "Plural of {w}?",
        "One {w}, two what?",
        "Tell me the plural of {w}.",
        "Do you know the plural of {w}?",
    )
    return fact("plural", phrase(rng, templates, w=word), f"The plural of {word} is {answer}.")


def calendar(rng: random.Random) -> Sample:
    """The day or month before or after another, some steps away."""
    names, unit = (DAYS, "day") if rng.random() < 0.6 else (MONTHS, "month")
    start, step = rng.randrange(len(names)), rng.choice((-1, 1))
    side = "after" if step > 0 else "before"
    templates = [
        "Which {u} comes {s} {n}?",
        "What {u} is {s} {n}?",
        "Which {u} is right {s} {n}?",
        "Name the {u} {s} {n}.",
        "What {u} comes {s} {n}?",
    ]
    count = 1
    if unit == "day" and rng.random() < 0.5:
        count = rng.randint(2, 6)
        templates = [
            "Which {u} is {k} days {s} {n}?",
            "What {u} is {k} days {s} {n}?",
            "What {u} comes {k} days {s} {n}?",
            "Name the {u} {k} days {s} {n}.",
        ]
    question = phrase(rng, templates, u=unit, s=side, n=names[start], k=count)
    answer = names[(start + step * count) % len(names)]
    away = f"{count} days {side}" if count > 1 else f"The {unit} {side}"
    return fact("calendar", question, f"{away} {names[start]} is {answer}.")


def nature(rng: random.Random) -> Sample:
    """The sound of an animal, or the colour of a thing."""
    if rng.random() < 0.5:
        animal, sound = rng.choice(list(SOUNDS.items()))
        templates = (
            "What does a {a} say?",
            "What sound does a {a} make?",
            "Which sound does a {a} make?",
            "How does a {a} sound?",
            "What noise does a {a} make?",
            "Tell me what a {a} says.",
            "Tell me the sound of a {a}.",
            "Do you know the sound of a {a}?",
        )
        return fact("nature", phrase(rng, templates, a=animal), f"A {animal} says {sound}.")
    thing, colour = rng.choice(list(COLOURS.items()))
    verb = "are" if thing.endswith("s") and thing != "grass" else "is"
    templates = (
        "What colour {v} {t}?",
        "Which colour {v} {t}?",
        "Tell me what colour {t} {v}.",
        "Name the colour of {t}.",
        "What is the colour of {t}?",
        "Tell me the colour of {t}.",
        "Do you know the colour of {t}?",
        "Do you know what colour {t} {v}?",
    )
    return fact("nature", phrase(rng, templates, v=verb, t=thing), f"{thing.capitalize()} {verb} {colour}.")


KINDS = {
    "small_talk": Kind(small_talk, 1.5, late=4),
    "capital": Kind(capital, 3, late=6),
    "opposite": Kind(opposite, 2, late=3),
    "plural": Kind(plural, 2, late=3),
    "calendar": Kind(calendar, 3, late=8),
    "nature": Kind(nature, 1, late=3),
}
