"""Successive halving over candidates that are not served: rounds, judging, failures, going on after an interrupt."""

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from io import StringIO
from math import exp
from pathlib import Path
from random import Random
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress as RichProgress

from checkpoint.watched_files import WatchedFiles
from mesh.domain.errors import ConfigurationError
from tandem_cli.load_test.figures import RunFailed
from tandem_cli.optimization.candidates import BASE, USUAL, Candidate, Layout, combine
from tandem_cli.optimization.choice import OTHER_LOAD, CandidateResult, PrecisionQuality, choose
from tandem_cli.optimization.progress import ShownProgress, TimeLeft, show_time
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.optimization.search import (
    FINALISTS,
    MAX_REPEATS,
    MAX_ROUNDS,
    ROUNDS_S,
    Search,
    State,
    needs_all_answers,
    requests_of,
)
from tandem_cli.optimization.serving import Answer, Served

ABOUT = {"data": "d", "model": "m"}
NUM_QUESTIONS = 200
NUM_JUDGED = 30
RATE = 16.0
CANDIDATES = combine(["int8", "int4"], ["ngram"], [USUAL, Layout(0, 1), Layout(0, 2)])


class Watcher:
    def begins(self, candidate: Candidate, round_number: int, plan: Sequence[int]) -> None:
        is_first = candidate == CANDIDATES[0] and round_number == 0
        assert plan[0] == requests_of(NUM_QUESTIONS, 0.0 if is_first else RATE, round_number)

    def ended(self, result: CandidateResult) -> None: ...

    def left_out(self, round_number: int) -> None: ...

    def skipped(self, candidate: Candidate, reason: str) -> None: ...


@dataclass
class Mesh:
    """Serves no model: the speed of a candidate is what `speeds` says of its name. `served` records the requests."""

    state: State
    speeds: dict[str, float] = field(default_factory=dict)
    losses: dict[str, float] = field(default_factory=dict)
    broken: tuple[str, ...] = ()
    changing: tuple[str, ...] = ()
    interrupt_after: int = 10**9
    noise: float = 0.0
    """Standard deviation of the logarithm of a measured speed. The machine as a whole changes as much every 8 runs."""
    others: float = 0.0
    """Probability that other processes use 20 to 60 % of the cores for a while, of which they tell."""
    tells: bool = True
    other_load: float = 0.0
    random: Random = field(default_factory=lambda: Random(0))
    machine: float = 0.0
    files: WatchedFiles = field(default_factory=lambda: WatchedFiles({}))
    served: list[tuple[str, int]] = field(default_factory=list)
    judged: list[str] = field(default_factory=list)

    def measure(self, candidate: Candidate, num_timed: int) -> Served:
        if len(self.served) == self.interrupt_after:
            raise KeyboardInterrupt
        if candidate.name in self.broken:
            raise RunFailed("it does not start")
        self.served.append((candidate.name, num_timed))
        if len(self.served) % 8 == 0:
            self.machine = self.random.gauss(0, self.noise)
        if self.others and self.random.random() < 0.4:
            self.other_load = self.random.uniform(0.2, 0.6) if self.random.random() < self.others else 0.0
        speed = self.speeds.get(candidate.name, 100.0) * exp(self.machine + self.random.gauss(0, self.noise))
        speed *= 1 - self.other_load
        figures = {"output_tokens_per_s": speed, "num_ok": float(num_timed), "requests_per_s": RATE}
        figures |= {OTHER_LOAD: self.other_load if self.tells else 0.0}
        count = max(num_timed, NUM_JUDGED if needs_all_answers(self.state, candidate) else 0)
        ids = [9] if candidate.name in self.changing else [1, 2]
        return Served(figures, [Answer("yes", ids) for _ in range(count)])

    def assess(self, precision: str, base: Sequence[Answer], answers: Sequence[Answer]) -> PrecisionQuality:
        assert min(len(base), len(answers)) >= NUM_JUDGED
        self.judged.append(precision)
        return PrecisionQuality(score=1 - self.losses.get(precision, 0.0), base_score=1.0)

    def search(self) -> Search:
        return Search(CANDIDATES, Recipe(), NUM_QUESTIONS, self.measure, self.assess, self.state, Watcher(), self.files)


@pytest.fixture
def state(tmp_path: Path) -> State:
    return State.open(tmp_path / "out" / "state.json", ABOUT, CANDIDATES)


def test_rounds_grow_while_candidates_become_fewer(state: State) -> None:
    names = [candidate.name for candidate in CANDIDATES]
    mesh = Mesh(state, {name: 100 * 1.2**index for index, name in enumerate(names)})
    final = mesh.search().run()
    by_requests = {number: [name for name, count in mesh.served if count == number] for number in (16, 32, 64, 160)}
    assert by_requests[16] == names[:1], "its speed is not known yet"
    assert by_requests[32] == [candidate.name for candidate in CANDIDATES[1:] if candidate.speculation == "none"]
    better = [names[number] for number in (0, 3, 7, 8, 10, 11, 12, 13, 14, 15, 16, 17)]
    assert by_requests[64] == better[::-1], "the better half and the base, with speculation and without"
    finalists = [names[0], *names[-FINALISTS:]]
    assert by_requests[160] == finalists + finalists[::-1], "to and fro, so that a change of the machine meets all"
    assert [result.candidate.name for result in final] == finalists
    assert mesh.judged == [BASE, "int8", "int4"], "once for each precision"


def test_a_round_that_nobody_would_drop_out_of_is_left_out_and_the_console_says_so(state: State) -> None:
    mesh, screen = Mesh(state), StringIO()
    search = mesh.search()
    search.candidates = CANDIDATES[:2]
    with RichProgress(console=Console(file=screen)) as bar:
        search.watcher = ShownProgress(bar)
        search.run()
    words = [line.split(":")[0] for line in screen.getvalue().splitlines() if line.startswith("round")]
    assert list(dict.fromkeys(words))[:4] == ["round 1", "round 2", "round 3", "round 4"]
    assert "round 2: left out: so few candidates all go on to round 3" in screen.getvalue()


def test_all_finalists_are_measured_twice(state: State) -> None:
    """The base may be one of the best, and is no reason to drop another one."""
    mesh = Mesh(state, {CANDIDATES[0].name: 1000.0})
    final = mesh.search().run()
    names = [name for name, count in mesh.served if count == 160]
    finalists = [result.candidate.name for result in final]
    assert names == finalists + finalists[::-1]
    assert len(final) == FINALISTS


@pytest.mark.parametrize(
    ("noise", "simple", "num_same"),
    [(0.01, 0.92, 60), (0.03, 0.85, 60), (0.06, 0.85, 58), (0.03, 0.98, 54)],
    ids=["8 % apart", "15 % apart", "15 % apart on a busy machine", "equal"],
)
def test_noise_does_not_change_the_choice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, noise: float, simple: float, num_same: int
) -> None:
    """Two candidates of which the simpler one is slower. If it is slower by more than 5 %, the other one is chosen."""
    monkeypatch.setattr(State, "save", lambda self: None)
    fast_name, simple_name = "int4, 2 colocated", "int8, 1 colocated"
    speeds = {fast_name: 200.0, simple_name: 200.0 * simple}
    chosen: Counter[str] = Counter()
    for seed in range(60):
        state = State.open(tmp_path / str(seed) / "state.json", ABOUT, CANDIDATES)
        search = Mesh(state, speeds, noise=noise, random=Random(seed)).search()
        choice = choose(search.run())
        assert choice is not None
        chosen[choice.result.candidate.name] += 1
    assert chosen[simple_name if simple >= 0.95 else fast_name] >= num_same, chosen


def test_other_processes_do_not_change_the_choice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They disturb three measurements in ten. Whoever does not look at them chooses otherwise every third time."""
    monkeypatch.setattr(State, "save", lambda self: None)
    by_precision = {"base": 180.0, "int8": 220.0, "int4": 250.0}
    by_layout = {USUAL.name: 0.75, Layout(0, 1).name: 0.85, Layout(0, 2).name: 1.0}
    speeds = {
        each.name: by_precision[each.precision]
        * by_layout[each.layout.name]
        * (1.0 if each.speculation == "none" else 0.9)
        for each in CANDIDATES
    }
    num_right = {}
    for tells in (True, False):
        chosen: Counter[str] = Counter()
        for seed in range(40):
            state = State.open(tmp_path / f"{seed}-{tells}" / "state.json", ABOUT, CANDIDATES)
            mesh = Mesh(state, speeds, noise=0.02, others=0.3, tells=tells, random=Random(seed))
            choice = choose(mesh.search().run())
            assert choice is not None
            chosen[choice.result.candidate.name] += 1
        num_right[tells] = chosen["int4, 2 colocated"]
    assert num_right[True] >= 37, num_right
    assert num_right[False] <= 32, num_right


def test_a_disturbed_measurement_is_repeated(state: State) -> None:
    """As often as a round has repeats; the less disturbed one counts."""
    mesh, loads = Mesh(state), iter([0.5, 0.3, 0.2, 0.6, *[0.5] * 40])
    measure = mesh.measure

    def disturbed(candidate: Candidate, num_timed: int) -> Served:
        served = measure(candidate, num_timed)
        served.figures[OTHER_LOAD] = next(loads, 0.0)
        return served

    search = mesh.search()
    search.measure = disturbed
    search.run()
    first = [name for name, _ in mesh.served[: 9 + MAX_REPEATS]]
    names = [candidate.name for candidate in CANDIDATES if candidate.speculation == "none"]
    assert first == [name for number, name in enumerate(names) for _ in range(2 if number < MAX_REPEATS else 1)]
    assert [state.results[name].rounds[0][OTHER_LOAD] for name in names[:3]] == [0.3, 0.2, 0.5]


def test_a_repeat_that_fails_leaves_what_was_measured(state: State) -> None:
    mesh, tried = Mesh(state), set[tuple[str, int]]()
    measure = mesh.measure

    def failing(candidate: Candidate, num_timed: int) -> Served:
        if (candidate.name, num_timed) in tried and num_timed < 160:
            raise RunFailed("no memory is left")
        tried.add((candidate.name, num_timed))
        served = measure(candidate, num_timed)
        served.figures[OTHER_LOAD] = 0.5
        return served

    search = mesh.search()
    search.measure = failing
    search.run()
    assert not any(result.failure for result in state.results.values())


def test_who_may_or_may_not_be_as_fast_is_measured_again(state: State) -> None:
    fast_name, other = "int4, 2 colocated", "int8, 1 colocated"
    mesh = Mesh(state, {fast_name: 200.0, other: 190.0}, noise=0.02)
    final = mesh.search().run()
    longest = [name for name, count in mesh.served if count == 160]
    first, repeated = longest[: 2 * len(final)], longest[2 * len(final) :]
    assert {fast_name, other} <= set(first)
    times = Counter(repeated)
    most = MAX_ROUNDS - len(ROUNDS_S)
    assert times.pop(fast_name) == times.pop(other) == most, "which side of 5 % 0.95 is on is never certain"
    assert all(count < most for count in times.values())
    again = Mesh(State.open(state.path, ABOUT, CANDIDATES), noise=0.02)
    again.search().run()
    assert again.served == []


def test_few_candidates_need_no_round_to_drop_out_of(tmp_path: Path) -> None:
    few = combine(["int8"], ["none"], [USUAL])
    state = State.open(tmp_path / "out" / "state.json", ABOUT, few)
    mesh = Mesh(state)
    search = mesh.search()
    search.candidates = few
    search.run()
    assert [count for _, count in mesh.served] == [16, 32, 160, 160, 160, 160]


def test_a_precision_that_loses_too_much_is_tried_once(state: State) -> None:
    mesh = Mesh(state, losses={"int4": 0.02})
    search = mesh.search()
    search.run()
    int4 = [name for name, _ in mesh.served if name.startswith("int4")]
    assert int4 == ["int4, 1 prefill + 1 decode"]
    assert len(search.skipped) == 2
    assert set(search.skipped.values()) == {"loses 2.0% of the quality, over 1.0%"}


def test_a_candidate_that_does_not_start_is_out(state: State) -> None:
    mesh = Mesh(state, broken=("int8, 1 colocated",))
    final = mesh.search().run()
    assert state.results["int8, 1 colocated"].failure == "it does not start"
    assert "int8, 1 colocated" not in [result.candidate.name for result in final]


def test_without_the_base_there_is_nothing_to_compare_with(state: State) -> None:
    with pytest.raises(RunFailed, match="it does not start"):
        Mesh(state, broken=(CANDIDATES[0].name,)).search().run()
    assert not state.results[CANDIDATES[0].name].failure, "it is tried again next time"


def test_speculation_that_changes_answers_is_out(state: State) -> None:
    name = "base, ngram, 1 prefill + 1 decode"
    mesh = Mesh(state, {name: 1000.0}, changing=(name,))
    final = mesh.search().run()
    assert state.results[name].num_changed == NUM_JUDGED
    assert name not in [result.candidate.name for result in final]


@pytest.mark.parametrize("interrupt_after", [0, 1, 5, 13, 20])
def test_an_interrupted_search_goes_on(tmp_path: Path, interrupt_after: int) -> None:
    speeds = {candidate.name: 100.0 + index for index, candidate in enumerate(CANDIDATES)}
    whole = Mesh(State.open(tmp_path / "whole" / "state.json", ABOUT, CANDIDATES), speeds)
    expected = whole.search().run()

    path = tmp_path / "parts" / "state.json"
    first = Mesh(State.open(path, ABOUT, CANDIDATES), speeds, interrupt_after=interrupt_after)
    with pytest.raises(KeyboardInterrupt):
        first.search().run()
    second = Mesh(State.open(path, ABOUT, CANDIDATES), speeds)
    results = second.search().run()
    assert first.served + second.served == whole.served, "nothing is measured twice"
    assert first.judged + second.judged == whole.judged
    assert results == expected


def test_a_finished_search_measures_nothing(state: State) -> None:
    Mesh(state).search().run()
    again = Mesh(State.open(state.path, ABOUT, CANDIDATES))
    again.search().run()
    assert (again.served, again.judged) == ([], [])


def test_what_failed_is_tried_again_by_the_next_run_once(state: State) -> None:
    name = "int8, 1 colocated"
    Mesh(state, broken=(name,)).search().run()
    again = Mesh(State.open(state.path, ABOUT, CANDIDATES), {name: 1000.0})
    final = again.search().run()
    assert {served for served, _ in again.served} == {name, "int8, ngram, 1 colocated"}, "and its twin with speculation"
    assert name in [result.candidate.name for result in final]


def test_a_judge_that_fails_does_not_cost_the_measurement(state: State) -> None:
    class Failing(Mesh):
        def assess(self, precision: str, base: Sequence[Answer], answers: Sequence[Answer]) -> PrecisionQuality:
            raise ConfigurationError("judge failed")

    with pytest.raises(ConfigurationError, match="judge failed"):
        Failing(state).search().run()
    again = Mesh(State.open(state.path, ABOUT, CANDIDATES))
    again.search().run()
    assert again.judged[0] == BASE
    assert again.served[0][0] == CANDIDATES[1].name


def test_a_folder_of_another_run_is_refused(state: State, tmp_path: Path) -> None:
    state.save()
    with pytest.raises(ConfigurationError, match="holds a run with another data: choose another folder"):
        State.open(state.path, {**ABOUT, "data": "other"}, CANDIDATES)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.tex").write_text("")
    with pytest.raises(ConfigurationError, match="full is not empty"):
        State.open(tmp_path / "full" / "state.json", ABOUT, CANDIDATES)


def test_a_damaged_file_is_named_with_what_to_do(state: State) -> None:
    state.save()
    whole = json.loads(state.path.read_text())
    damaged = [json.dumps(whole | {key: 7}) for key in ("about", "results", "quality")]
    for content in ("", "{", "[]", "\xff", *damaged, _without(whole, "about"), _without(whole, "answers")):
        state.path.write_bytes(content.encode("latin-1"))
        with pytest.raises(ConfigurationError) as refusal:
            State.open(state.path, ABOUT, CANDIDATES)
        said = f"{state.path} is damaged, so its run cannot continue: choose another folder for --out, or remove"
        assert str(refusal.value) == f"{said} {state.path.parent}", content


def _without(content: dict[str, Any], key: str) -> str:
    return json.dumps({name: value for name, value in content.items() if name != key})


def test_few_questions_are_asked_again() -> None:
    assert [requests_of(200, 16.0, number) for number in range(len(ROUNDS_S))] == [32, 64, 160, 160]
    assert [requests_of(100, 16.0, number) for number in range(len(ROUNDS_S))] == [32, 64, 100, 100]
    assert [requests_of(3, 16.0, number) for number in range(len(ROUNDS_S))] == [32, 32, 32, 32]
    assert [requests_of(200, 0.1, number) for number in range(len(ROUNDS_S))] == [16, 16, 16, 16]


def test_the_time_that_is_left() -> None:
    left = TimeLeft()
    assert left.of([16]) is None
    left.add(7.0, {"num_ok": 16.0, "requests_per_s": 8.0})
    assert left.of([16, 32]) == pytest.approx(2 * 5.0 + 48 / 8)
    assert (show_time(16.2), show_time(200)) == ("16 s", "3 min")


@pytest.mark.parametrize("when", ["served", "not served", "judged"])
def test_a_model_that_changes_ends_the_search(state: State, tmp_path: Path, when: str) -> None:
    """Nothing is kept of what was measured meanwhile; with the file as it was, the search goes on."""
    weights, before = tmp_path / "model.safetensors", tmp_path / "before"
    weights.write_text("weights")
    mesh = Mesh(state, files=WatchedFiles.of([weights]))
    measure, assess = mesh.measure, mesh.assess

    def change() -> None:
        weights.rename(before)
        weights.write_text("others")

    def measure_and_change(candidate: Candidate, num_timed: int) -> Served:
        served = measure(candidate, num_timed)
        if when != "judged" and len(mesh.served) == 3:
            change()
            if when == "not served":
                raise RunFailed("its weights are broken")
        return served

    def assess_and_change(precision: str, base: Sequence[Answer], answers: Sequence[Answer]) -> PrecisionQuality:
        quality = assess(precision, base, answers)
        if when == "judged":
            change()
        return quality

    search = replace(mesh.search(), measure=measure_and_change, assess=assess_and_change)
    with pytest.raises(ConfigurationError, match=f"^{weights} has changed since the run began, so nothing is chosen"):
        search.run()
    kept = State.open(state.path, ABOUT, CANDIDATES)
    assert sum(len(result.rounds) for result in kept.results.values()) == (1 if when == "judged" else 2)
    assert set(kept.quality) == (set() if when == "judged" else {BASE})
    before.replace(weights)
    again = Mesh(kept, files=mesh.files)
    again.search().run()
    assert len(again.served) == len(reference(state)) - (1 if when == "judged" else 2)


def reference(state: State) -> list[tuple[str, int]]:
    """What a search serves that nothing ends."""
    mesh = Mesh(State(state.path.with_name("other.json"), ABOUT))
    mesh.search().run()
    return mesh.served
