"""Successive halving: all candidates get a short round, the better half a longer one, and so on.

    round 0      all candidates without speculation. The first of each precision answers all questions that are judged;
                 a precision that loses too much is not tried further
    round 1      the better half, with twice as many requests; and the same with speculation. Left out
                 if these are so few that nobody would drop out
    round 2, 3   the best of these, each twice, with five times as many requests
    up to 7      as round 3, while it is open which of them are within 5 % of the fastest: that one and those

The base is in every round but the last ones, and its speed decides the number of requests. Every second round goes
through its candidates backwards, so that a machine that becomes slower favours none. A measurement that other processes
disturb is repeated once, but only some in each of the first four rounds. Each measurement is saved at
once, so an interrupted search goes on where it was.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from checkpoint.config_json import read_bytes, require_searchable
from checkpoint.watched_files import WatchedFiles
from mesh.atomic_file import write_atomically
from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json
from tandem_cli.load_test.figures import RunFailed
from tandem_cli.optimization.candidates import BASE, Candidate
from tandem_cli.optimization.choice import (
    OTHER_LOAD,
    CandidateResult,
    PrecisionQuality,
    is_disturbed,
    survivors,
    undecided,
    why_not,
)
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.optimization.serving import Answer, Served

ROUNDS_S = (2.0, 4.0, 10.0, 10.0)
"""Seconds that the base takes for the requests of each round."""
FINALISTS = 4
MAX_ROUNDS = 8
_MIN_REQUESTS = 16
MAX_REPEATS = 4
"""Measurements of a round that are repeated because they were disturbed."""
_VERSION = 1

Measure = Callable[[Candidate, int], Served]
"""Serves a candidate, and sends it this number of timed requests. Returns the answers to all questions."""
Assess = Callable[[str, Sequence[Answer], Sequence[Answer]], PrecisionQuality]
"""Compares a precision with the base by the answers of the base and its own."""


class Watcher(Protocol):
    """Receives the events of a search."""

    def begins(self, candidate: Candidate, round_number: int, plan: Sequence[int]) -> None:
        """Called before a measurement. `plan`: requests of the measurements that will follow, as far as is known."""
        ...

    def ended(self, result: CandidateResult) -> None:
        """Called when a measurement has ended or failed."""
        ...

    def left_out(self, round_number: int) -> None:
        """Called instead of a round that would drop no candidate."""
        ...

    def skipped(self, candidate: Candidate, reason: str) -> None:
        """Called for a candidate that is not tried any more."""
        ...


@dataclass(slots=True)
class State:
    """The results so far, which `save` keeps in a file. Runs with different `about` cannot be compared."""

    path: Path
    about: dict[str, Any]
    results: dict[str, CandidateResult] = field(default_factory=dict)
    quality: dict[str, PrecisionQuality] = field(default_factory=dict)
    answers: dict[str, list[Answer]] = field(default_factory=dict)
    """By precision: the answers of the candidate that was served first."""
    published: list[str] = field(default_factory=list)
    """Names of files in OUT that belong to the choice."""

    @classmethod
    def open(cls, path: Path, about: dict[str, Any], candidates: Sequence[Candidate]) -> "State":
        """Read the file, if there is one. Candidates that failed then are tried again, because what failed them may be
        over. Raises ConfigurationError if the folder is of another run, or the file is damaged.
        """
        state = cls(path, about)
        require_searchable(path.parent)
        if not path.exists():
            if path.parent.is_dir() and any(path.parent.iterdir()):
                raise ConfigurationError(f"{path.parent} is not empty: choose another folder for --out")
            return state
        try:
            state._take(parse_json(read_bytes(path)), candidates)
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise ConfigurationError(
                f"{path} is damaged, so its run cannot continue: choose another folder for --out, or remove "
                f"{path.parent}"
            ) from error
        return state

    def _take(self, content: dict[str, Any], candidates: Sequence[Candidate]) -> None:
        about, earlier = self.about, dict(content["about"])
        if content.get("version") != _VERSION or earlier != about:
            names = sorted(about.keys() | earlier.keys())
            changed = [name for name in names if earlier.get(name) != about.get(name)]
            raise ConfigurationError(
                f"{self.path.parent} holds a run with another {' and '.join(changed) or 'version'}: choose another "
                "folder for --out, or remove that one"
            )
        by_name = {candidate.name: candidate for candidate in candidates}
        for name, entry in content["results"].items():
            if name in by_name:
                rounds = {int(number): figures for number, figures in entry["rounds"].items()}
                self.results[name] = CandidateResult(by_name[name], rounds, num_changed=entry["num_changed"])
        self.quality = {name: PrecisionQuality(**entry) for name, entry in content["quality"].items()}
        self.answers = {name: [Answer(**entry) for entry in entries] for name, entries in content["answers"].items()}
        self.published = content["published"]

    def save(self) -> None:
        """Write the file; it is never half written."""
        content = {
            "version": _VERSION,
            "about": self.about,
            "results": {name: _to_json(result) for name, result in self.results.items()},
            "quality": {name: asdict(quality) for name, quality in self.quality.items()},
            "answers": {name: list(map(asdict, answers)) for name, answers in self.answers.items()},
            "published": self.published,
        }
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(content).encode())


def _to_json(result: CandidateResult) -> dict[str, Any]:
    return {"rounds": result.rounds, "failure": result.failure, "num_changed": result.num_changed}


def requests_of(num_questions: int, requests_per_s: float, round_number: int) -> int:
    """Timed requests of a round. Each question is asked once, because workers know the beginning of a prompt that they
    have seen; but few questions are asked again.
    """
    max_requests = max(num_questions, 2 * _MIN_REQUESTS)
    return max(_MIN_REQUESTS, min(max_requests, round(requests_per_s * ROUNDS_S[min(round_number, len(ROUNDS_S) - 1)])))


@dataclass(slots=True)
class Search:
    """One search. `candidates` begin with the base."""

    candidates: Sequence[Candidate]
    recipe: Recipe
    num_questions: int
    measure: Measure
    assess: Assess
    state: State
    watcher: Watcher
    files: WatchedFiles
    """The model's. A measurement does not count if they have changed since the run began."""
    num_repeats: int = 0
    """Measurements of this round that were repeated."""
    skipped: dict[Candidate, str] = field(default_factory=dict)
    """Candidates that were not tried, because of their precision, with the reasons."""

    def run(self) -> list[CandidateResult]:
        """Measure. Returns the results of the finalists. Raises RunFailed if the base cannot be served."""
        pool = [candidate for candidate in self.candidates if candidate.speculation == "none"]
        for round_number in range(len(ROUNDS_S)):
            if round_number == 1 and len(pool) <= FINALISTS:
                self.watcher.left_out(round_number)
                continue
            results = self._round(pool, round_number)
            able = [result for result in results if not self._is_out(result)]
            if round_number + 1 == len(ROUNDS_S):
                self._repeat(results)
                return results
            best = survivors(able, self.recipe, self._num_kept(len(able), round_number))
            if round_number == 0:
                pool = [candidate for candidate in self.candidates if self._is_kept(candidate.twin, best)]
            else:
                pool = [candidate for candidate in pool if self._is_kept(candidate, best)]
        raise AssertionError("the last round returns")

    def _repeat(self, finalists: Sequence[CandidateResult]) -> None:
        """Measure those again that may or may not be as fast as the fastest."""
        for round_number in range(len(ROUNDS_S), MAX_ROUNDS):
            able = [result for result in finalists if self.why_not(result) is None]
            self._round([result.candidate for result in undecided(able, round_number)], round_number)

    def why_not(self, result: CandidateResult) -> str | None:
        """The reason why a measured candidate cannot be chosen, or None."""
        return why_not(result, self.state.quality.get(result.candidate.precision), self.recipe)

    @staticmethod
    def _num_kept(count: int, round_number: int) -> int:
        """The number of `count` candidates that go on to the next round."""
        if round_number == 0:
            return min(count, max(FINALISTS, (count + 1) // 2))
        return min(FINALISTS, count) if round_number == 1 else count

    def _num_requests(self, round_number: int) -> int:
        """The first run of the base, whose speed is not known yet, has the least."""
        base = self.state.results.get(self.candidates[0].name)
        rate = base.rounds[0]["requests_per_s"] if base is not None and base.rounds else 0.0
        return requests_of(self.num_questions, rate, round_number)

    def _is_kept(self, candidate: Candidate, best: Sequence[CandidateResult]) -> bool:
        return candidate == self.candidates[0] or any(result.candidate == candidate for result in best)

    def _is_out(self, result: CandidateResult) -> bool:
        """True for what no longer round can make eligible: only latency differs from round to round."""
        return why_not(result, self.state.quality.get(result.candidate.precision), self._without_slo) is not None

    @property
    def _without_slo(self) -> Recipe:
        return replace(self.recipe, slo_ttft=None, slo_itl=None)

    def _round(self, pool: Sequence[Candidate], round_number: int) -> list[CandidateResult]:
        results = []
        self.num_repeats = 0 if round_number < len(ROUNDS_S) else MAX_REPEATS
        for index, candidate in enumerate(pool if round_number % 2 == 0 else pool[::-1]):
            result = self.state.results.get(candidate.name) or CandidateResult(candidate)
            if not result.rounds and not result.failure and (reason := self._why_skipped(result)) is not None:
                self.skipped[candidate] = reason
                self.watcher.skipped(candidate, reason)
                continue
            self.state.results[candidate.name] = result
            if not result.failure and round_number not in result.rounds:
                self.watcher.begins(candidate, round_number, self._plan(len(pool) - index, round_number))
                self._measure(result, round_number)
                self.watcher.ended(result)
            self._judge(candidate.precision)
            results.append(result)
        return results if round_number % 2 == 0 else results[::-1]

    def _why_skipped(self, result: CandidateResult) -> str | None:
        """The reason why a candidate of a precision that was judged is not tried, or None."""
        quality = self.state.quality.get(result.candidate.precision)
        return None if quality is None else why_not(result, quality, self._without_slo)

    def _measure(self, result: CandidateResult, round_number: int) -> None:
        candidate, state = result.candidate, self.state
        try:
            served = self._least_disturbed(candidate, self._num_requests(round_number))
        except (RunFailed, ConfigurationError) as error:
            self._require_same_model()
            if candidate == self.candidates[0]:
                raise
            result.failure = str(error)
            state.save()
            return
        self._require_same_model()
        result.rounds[round_number] = served.figures
        first = state.answers.setdefault(candidate.precision, served.answers)
        pairs = zip(served.answers, first, strict=False)
        changed = sum(mine.token_ids != theirs.token_ids for mine, theirs in pairs if mine.token_ids)
        result.num_changed = max(result.num_changed, changed)
        state.save()

    def _least_disturbed(self, candidate: Candidate, num_requests: int) -> Served:
        served = self.measure(candidate, num_requests)
        if not is_disturbed(served.figures) or self.num_repeats == MAX_REPEATS:
            return served
        self.num_repeats += 1
        try:
            again = self.measure(candidate, num_requests)
        except RunFailed:  # what disturbs may be what fails it
            return served
        return min(served, again, key=lambda each: each.figures[OTHER_LOAD])

    def _judge(self, precision: str) -> None:
        """Judge a precision once it has answered. If that fails, the measurement is kept."""
        answers, qualities = self.state.answers, self.state.quality
        if precision in answers and precision not in qualities:
            quality = self.assess(precision, answers[BASE], answers[precision])
            self._require_same_model()
            qualities[precision] = quality
            self.state.save()

    def _require_same_model(self) -> None:
        """Raise ConfigurationError if a file of the model has changed: figures of two models cannot be compared."""
        if (path := self.files.first_changed()) is not None:
            raise ConfigurationError(
                f"{path} has changed since the run began, so nothing is chosen: with the file as it was, the same "
                "command goes on; for the model as it is now, choose another folder for --out"
            )

    def _plan(self, num_left: int, round_number: int) -> list[int]:
        """Requests of the measurements to come, if no candidate drops out but by halving."""
        plan, kinds = (
            [self._num_requests(round_number)] * num_left,
            {candidate.speculation for candidate in self.candidates},
        )
        pool = sum(candidate.speculation == "none" for candidate in self.candidates) - len(self.skipped)
        for later in range(1, len(ROUNDS_S)):
            pool = self._num_kept(pool, later - 1) * (len(kinds) if later == 1 else 1)
            if later > round_number and (later != 1 or pool > FINALISTS):
                plan += [self._num_requests(later)] * pool
        return plan


def needs_all_answers(state: State, candidate: Candidate) -> bool:
    """True for the first candidate of a precision."""
    return candidate.precision not in state.answers
