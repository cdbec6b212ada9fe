"""Settings of speculative decoding. Imports no torch."""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Speculation:
    """`kind` is none, ngram, or draft, which needs a `draft_model`; `max_drafts` limits the drafts of a sequence in a
    step.
    """

    kind: str = "none"
    max_drafts: int = 0
    draft_model: Path | None = None


NO_SPECULATION = Speculation()
