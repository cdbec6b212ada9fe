"""Questions with checkable answers, and the split into training and held-out questions."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

HELD_OUT_PERCENT = 10

Mix = Literal["early", "late", "copying"]


@dataclass(frozen=True)
class Sample:
    """One checkable question.

    `turns` holds (question, answer) pairs; only the last pair is scored. `key` decides the split.
    """

    kind: str
    key: str
    turns: tuple[tuple[str, str], ...]
    system: str | None = None


@dataclass(frozen=True)
class Kind:
    """A generator of samples, with its shares of the training text in each mix.

    `late` is the share in the later phases, by default the same; kinds that are learnt quickly get less. `copying` is
    the share where copying from the prompt is learnt, by default a fifth of `late`.
    `hard` marks kinds the model is expected to get wrong: they show what low confidence looks like.
    """

    make: Callable[[random.Random], Sample]
    weight: float
    hard: bool = False
    late: float | None = None
    copying: float | None = None

    def share(self, mix: Mix) -> float:
        """Relative frequency in `mix`."""
        late = self.weight if self.late is None else self.late
        if mix == "copying":
            return late / 5 if self.copying is None else self.copying
        return late if mix == "late" else self.weight


def is_held_out(key: str) -> bool:
    """Whether `key` falls in the held-out share; depends on the key's text alone."""
    digest = hashlib.sha256(key.encode()).digest()
    return int.from_bytes(digest[:4], "big") % 100 < HELD_OUT_PERCENT


def rule(kind: str, operands: object, question: str, answer: str) -> Sample:
    """A sample split by its operands: a held-out problem was never trained on in any wording."""
    return Sample(kind, f"{kind} {operands}", ((question, answer),))


def fact(kind: str, question: str, answer: str) -> Sample:
    """A sample split by its wording: the fact itself may be known from other wordings."""
    return Sample(kind, f"{kind} {question}", ((question, answer),))


def phrase(rng: random.Random, templates: Sequence[str], **slots: object) -> str:
    """A random template, with its slots filled in."""
    return rng.choice(templates).format(**slots)
