"""The rules by which a candidate is chosen: limits, order, Pareto front. Pure.

Speeds are compared round by round, because a machine that is slower for a while slows both. The median of the rounds
counts, so one bad round decides nothing. Rounds that other processes disturbed count only where too few others are
left. `undecided` says whose rounds do not tell yet if they are within EQUAL of the fastest.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import exp, inf, log, sqrt
from statistics import mean, median, stdev

from tandem_cli.optimization.candidates import Candidate
from tandem_cli.optimization.recipe import Recipe

Figures = Mapping[str, float]
SPEED = "output_tokens_per_s"
TTFT, GAP = "ttft_p99_ms", "gap_p99_ms"
OTHER_LOAD = "other_load"
"""The share of the cores that other processes used meanwhile."""
MAX_OTHER_LOAD = 0.1
"""With more, a measurement is disturbed."""
_MIN_QUIET = 2
_MOST_CORRECTED = 0.75
EQUAL = 0.05
"""Speeds that differ by less count as equal."""
_ROUNDING = 1e-9
_SAME_LENGTH = 0.9
_STUDENT_T = (inf, inf, 12.71, 4.30, 3.18, 2.78, 2.57)
"""95 % quantiles, by the number of rounds."""


@dataclass(frozen=True, slots=True)
class PrecisionQuality:
    """Compares a precision with the base. `score`: mean of the user's judge. None: not measured. `loss`, which
    `max_quality_loss` limits, is a share: of the base's score, or by how much perplexity is higher.
    """

    top1_agreement: float | None = None
    mean_kl: float | None = None
    perplexity: float | None = None
    base_perplexity: float | None = None
    score: float | None = None
    base_score: float | None = None

    @property
    def loss(self) -> float | None:
        if self.score is not None and self.base_score is not None:
            return max(0.0, self.base_score - self.score) / self.base_score if self.base_score else 0.0
        if self.perplexity is not None and self.base_perplexity is not None:
            return max(0.0, self.perplexity / self.base_perplexity - 1)
        return None


@dataclass(slots=True)
class CandidateResult:
    """The state of a candidate: the figures of its rounds by their numbers, and why it failed. `num_changed`: answers
    that differ from those of the precision's first candidate.
    """

    candidate: Candidate
    rounds: dict[int, dict[str, float]] = field(default_factory=dict)
    failure: str = ""
    num_changed: int = 0

    @property
    def longest(self) -> list[int]:
        """The numbers of the rounds with the most requests, a few of which may have failed."""
        max_ok = max((figures["num_ok"] for figures in self.rounds.values()), default=0)
        return [number for number, figures in self.rounds.items() if figures["num_ok"] >= _SAME_LENGTH * max_ok]

    @property
    def figures(self) -> dict[str, float]:
        """Medians over the rounds with the most requests."""
        longest = [self.rounds[number] for number in self.longest]
        names = longest[0].keys() if longest else ()
        return {name: median(figures[name] for figures in longest) for name in names}

    @property
    def hoped_speed(self) -> float:
        """Speed in the longest rounds as if all cores had been free. It may be too high, because others also use time
        that the candidate leaves; so nothing is chosen by it, but what is slow by it is not worth a longer round.
        """
        longest = [self.rounds[number] for number in self.longest]
        return median(each[SPEED] / (1 - min(each.get(OTHER_LOAD, 0.0), _MOST_CORRECTED)) for each in longest)

    def speedup(self, base: "CandidateResult") -> float:
        """Speed as a multiple of the base's: the median over the rounds that both had."""
        return median(self.speedups(base))

    def speedups(self, base: "CandidateResult", before: float = inf) -> list[float]:
        """Speed as a multiple of the base's, in each of the longest rounds that both had, and that came before; if some
        of these were quiet for both, in those only.
        """
        numbers = [number for number in self.longest if number in base.rounds and number < before]
        quiet = [number for number in numbers if not any(map(is_disturbed, (self.rounds[number], base.rounds[number])))]
        numbers = quiet if len(quiet) >= _MIN_QUIET else numbers
        return [self.rounds[number][SPEED] / base.rounds[number][SPEED] for number in numbers]


def is_disturbed(figures: Figures) -> bool:
    """True if other processes used so much of the machine that the figures tell little."""
    return figures.get(OTHER_LOAD, 0.0) > MAX_OTHER_LOAD


def over_limits(figures: Figures, recipe: Recipe) -> dict[str, float]:
    """The limits on latency that are not met, and how many times as long the candidate takes."""
    limits = {TTFT: recipe.slo_ttft, GAP: recipe.slo_itl}
    return {
        name: figures.get(name, 0.0) / limit
        for name, limit in limits.items()
        if limit is not None and figures.get(name, 0.0) > limit
    }


def order(result: CandidateResult, recipe: Recipe) -> tuple[float, float]:
    """Sorts results, best first: by the distance to the limits, then by the speed that may be hoped for."""
    return max(over_limits(result.figures, recipe).values(), default=1.0), -result.hoped_speed


def why_not(result: CandidateResult, quality: PrecisionQuality | None, recipe: Recipe) -> str | None:
    """The reason why a measured candidate cannot be chosen, or None."""
    if result.failure:
        return result.failure
    if result.candidate.speculation != "none" and result.num_changed:
        return f"speculation changed {result.num_changed} answers"
    if quality is None or quality.loss is None:
        return "its quality is not known"
    if quality.loss > recipe.max_quality_loss + _ROUNDING:
        return f"loses {quality.loss:.1%} of the quality, over {recipe.max_quality_loss:.1%}"
    over = over_limits(result.figures, recipe)
    names = {TTFT: "TTFT p99", GAP: "gap p99"}
    return "; ".join(f"{names[name]} is {ratio:.2f} x its limit" for name, ratio in over.items()) or None


@dataclass(frozen=True, slots=True)
class Choice:
    """`equal` are names of candidates that were faster by less than EQUAL, and take more."""

    result: CandidateResult
    equal: tuple[str, ...]


def choose(results: Sequence[CandidateResult]) -> Choice | None:
    """The fastest of results that can be chosen; of those that are equally fast the one that `thriftiest` puts first.
    None without any.
    """
    if not results:
        return None
    first = fastest(results)
    equal = [result for result in results if result is first or result.speedup(first) >= 1 - EQUAL]
    chosen = thriftiest(equal)[0]
    faster = (result for result in equal if result is not chosen and result.speedup(chosen) > 1)
    return Choice(chosen, tuple(result.candidate.name for result in faster))


def fastest(results: Sequence[CandidateResult], before: float = inf) -> CandidateResult:
    """The result that is faster than most others in the rounds that it shares with them, and that came before."""

    def rank(result: CandidateResult) -> tuple[int, float]:
        rivals = (rival for rival in results if rival is not result)
        return sum(median(result.speedups(rival, before)) > 1 for rival in rivals), result.figures[SPEED]

    return max(results, key=rank)


def thriftiest(results: Sequence[CandidateResult]) -> list[CandidateResult]:
    """Sort equally fast results, best first: by fewer processes; by less memory, if it differs by more than EQUAL; by
    what has less to go wrong.
    """
    left, ordered = list(results), []
    while left:
        fewest = min(result.candidate.layout.num_processes for result in left)
        few = [result for result in left if result.candidate.layout.num_processes == fewest]
        least = min(result.figures.get("memory_bytes", 0.0) for result in few)
        small = [result for result in few if result.figures.get("memory_bytes", 0.0) <= least * (1 + EQUAL)]
        ordered.append(min(small, key=lambda result: (result.candidate.complexity, result.candidate.name)))
        left.remove(ordered[-1])
    return ordered


def undecided(results: Sequence[CandidateResult], before: int) -> list[CandidateResult]:
    """The fastest result, and those that may be within EQUAL of it by the rounds before this one. Empty if that is open
    for none. `results` can be chosen. Ratios of speeds are taken as log-normal (Student's t).
    """
    if len(results) < 2:
        return []
    first = fastest(results, before)
    others = [result for result in results if result is not first and _is_open(result.speedups(first, before))]
    return [first, *others] if others else []


def _is_open(ratios: Sequence[float]) -> bool:
    logs = [log(ratio) for ratio in ratios]
    if len(logs) < 2:
        return True
    margin = _STUDENT_T[min(len(logs), len(_STUDENT_T) - 1)] * stdev(logs) / sqrt(len(logs))
    return exp(mean(logs) - margin) < 1 - EQUAL < exp(mean(logs) + margin)


def survivors(results: Sequence[CandidateResult], recipe: Recipe, count: int) -> list[CandidateResult]:
    """The best `count` results. Among those about as fast as the last of them, the thriftiest are kept."""
    ranked = sorted(results, key=lambda result: order(result, recipe))
    if len(ranked) <= count:
        return ranked
    distance, speed = order(ranked[count - 1], recipe)
    keys = {id(result): order(result, recipe) for result in ranked}
    near = [
        result for result in ranked if keys[id(result)][0] == distance and abs(keys[id(result)][1] / speed - 1) < EQUAL
    ]
    ahead = [result for result in ranked[:count] if result not in near]
    kept = [*ahead, *thriftiest(near)[: count - len(ahead)]]
    return sorted(kept, key=lambda result: order(result, recipe))


def pareto(points: Sequence[Sequence[float]]) -> list[bool]:
    """Whether each point is on the front: no other is as small in every coordinate and smaller in one."""

    def is_beaten(point: Sequence[float]) -> bool:
        return any(
            all(a <= b for a, b in zip(rival, point, strict=True)) and tuple(rival) != tuple(point) for rival in points
        )

    return [not is_beaten(point) for point in points]


def coordinates(result: CandidateResult, quality: PrecisionQuality | None) -> tuple[float, ...]:
    """The coordinates of the Pareto front, the smaller the better: speed, TTFT, memory, loss of quality."""
    figures = result.figures
    loss = 1.0 if quality is None or quality.loss is None else quality.loss
    return -figures[SPEED], figures.get(TTFT, 0.0), figures.get("memory_bytes", 0.0), loss
