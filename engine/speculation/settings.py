"""What an operator asks for. Needs no torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Speculation:
    """How tokens are guessed ahead. `kind` is none, ngram, or draft, which needs a `draft_model`; `max_drafts` are the
    most guesses of a sequence in a step.
    """

    kind: str = "none"
    max_drafts: int = 0
    draft_model: Path | None = None


NO_SPECULATION = Speculation()
