"""Candidates: a precision, a kind of speculation and a set of workers, which together are flags of `tandem up`."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from engine.quantizer import SCHEMES
from engine.settings import DTYPES, QUANTIZATIONS
from mesh.domain.errors import ConfigurationError

BASE = "base"
COMPUTED = tuple(name for name in QUANTIZATIONS if name != "none")
"""Precisions that workers make of any checkpoint when they load it."""
STORED = tuple(SCHEMES)
"""Precisions that `tandem quantize` makes."""
_DTYPES = tuple(name for name in DTYPES if name != "auto")
PRECISIONS = (BASE, *COMPUTED, *STORED, *_DTYPES)
SPECULATIONS = ("none", "ngram", "draft")
_LAYOUT_KEYS = ("prefill", "decode", "tensor_parallel")


@dataclass(frozen=True, slots=True)
class Layout:
    """Workers of a mesh. Without prefill workers, decode workers compute prompts too."""

    prefill: int
    decode: int
    tensor_parallel: int = 1

    @property
    def name(self) -> str:
        ranks = f" x {self.tensor_parallel} ranks" if self.tensor_parallel > 1 else ""
        if self.prefill:
            return f"{self.prefill} prefill + {self.decode} decode{ranks}"
        return f"{self.decode} colocated{ranks}"

    @property
    def num_workers(self) -> int:
        return self.prefill + self.decode

    @property
    def num_processes(self) -> int:
        """Processes that compute."""
        return self.num_workers * self.tensor_parallel

    def settings(self) -> dict[str, str]:
        """As settings of `tandem up`, by name."""
        workers = {"prefill": str(self.prefill)} if self.prefill else {"colocated": "true"}
        ranks = {"tensor_parallel": str(self.tensor_parallel)} if self.tensor_parallel > 1 else {}
        return {**workers, "decode": str(self.decode), **ranks}

    @classmethod
    def parse(cls, entry: object) -> "Layout":
        """From a table of a recipe. Raises ConfigurationError."""
        if not isinstance(entry, dict) or not entry.keys() <= set(_LAYOUT_KEYS) or "decode" not in entry:
            raise ConfigurationError(f"workers need decode, and may have prefill and tensor_parallel; got {entry!r}")
        counts: dict[str, Any] = {"prefill": 0, **entry}
        for name, count in counts.items():
            if not isinstance(count, int) or isinstance(count, bool) or count < (name != "prefill"):
                raise ConfigurationError(f"workers: {name} must be a whole number, got {count!r}")
        return cls(**counts)


USUAL = Layout(1, 1)
"""The workers of `tandem up` without options."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to serve the model."""

    precision: str
    speculation: str
    layout: Layout

    @property
    def name(self) -> str:
        """Unique; the state file and the report use it."""
        drafts = "" if self.speculation == "none" else f", {self.speculation}"
        return f"{self.precision}{drafts}, {self.layout.name}"

    @property
    def complexity(self) -> tuple[int, int, int, int]:
        """Candidates that are equally fast and take as much are ordered by it: the simpler one has less to go wrong."""
        precision = 0 if self.precision == BASE else 2 if self.precision in STORED else 1
        speculation = SPECULATIONS.index(self.speculation)
        return precision, speculation, self.layout.num_workers, self.layout.tensor_parallel

    @property
    def twin(self) -> "Candidate":
        """The same candidate without speculation, whose answers must be equal."""
        return Candidate(self.precision, "none", self.layout)

    def settings(self, draft_model: str) -> dict[str, str]:
        """As settings of `tandem up`, by name, without the model."""
        arithmetic = {"quantize": self.precision} if self.precision in COMPUTED else {}
        if self.precision in _DTYPES:
            arithmetic = {"dtype": self.precision}
        drafts = {} if self.speculation == "none" else {"speculative": self.speculation}
        if self.speculation == "draft":
            drafts["draft_model"] = draft_model
        return {**arithmetic, **drafts, **self.layout.settings()}


def flags_of(settings: dict[str, str]) -> list[str]:
    """Settings as flags of `tandem up`."""
    return [f"--{name.replace('_', '-')}={value}" for name, value in settings.items()]


def combine(precisions: Sequence[str], speculations: Sequence[str], layouts: Sequence[Layout]) -> list[Candidate]:
    """All candidates, and those that they are compared with: the base without speculation, and each one's twin. The
    candidates of a precision follow each other, the first without speculation.
    """
    precisions = list(dict.fromkeys((BASE, *precisions)))
    kinds = sorted({"none", *speculations}, key=SPECULATIONS.index)
    combined = [Candidate(precision, kind, layout) for precision in precisions for kind in kinds for layout in layouts]
    first = Candidate(BASE, "none", layouts[0])
    return sorted(combined, key=lambda candidate: candidate != first)


def usual_layouts(num_cores: int, num_numa_nodes: int) -> list[Layout]:
    """Layouts worth trying: separated, colocated on all cores, several colocated workers. Ranks of one worker pay
    between NUMA nodes only.
    """
    layouts = [USUAL, Layout(0, 1)]
    layouts += [Layout(0, count) for count in (2, 4, 8) if count <= num_cores]
    if num_cores >= 4:
        layouts += [Layout(1, 2), Layout(1, 3)]
    if num_numa_nodes > 1:
        layouts.append(Layout(0, 1, num_numa_nodes))
    return layouts
