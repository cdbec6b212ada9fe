"""Tokens per second with drafts in a model of any shape, by how many of them are right; an engine without a mesh.

    python -m bench.drafts --shape qwen3.5-0.8b --quantize int8 --batch 1 4 8 --right 1 0.9 0.7 0

The weights are random, so nothing is predictable. The model answers once without drafts; then each draft is the
token of that answer, or another one. So the table shows what checking drafts costs, and what a drafter could gain that
is right so often and costs nothing. The program stops if the tokens with drafts are others. Medians of CPU time.
"""

import argparse
import random
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from bench.shapes import SHAPES, write_shape
from decode_worker.settings import DecodeSettings
from engine.engine import Engine
from engine.sequence import SequenceState
from engine.speculation.cost import CostFit, StepCost
from engine.speculation.drafters import Drafter, Drafts
from engine.speculation.speculator import Speculator
from mesh.domain.request import SamplingParams, SequenceSpec
from mesh.interrupts import run_program, showing
from tandem_cli.capacity.measurement import clock_for
from worker.load_engine import LoadedEngine, load_engine
from worker.runner_settings import EngineLimits

_PROMPT_TOKENS, _MAX_NEW_TOKENS = 32, 96
_MAX_DRAFTS = 8
_SEED = 5


class KnownAnswers(Drafter):
    """Drafts the tokens of these answers, by the request's number; the share `right` of them, others are wrong."""

    def __init__(self, answers: list[list[int]], right: float) -> None:
        self._answers = answers
        self._right = right
        self._random = random.Random(_SEED)

    def limits(self, sequences: Sequence[SequenceState], max_drafts: Sequence[int]) -> list[int]:
        return list(max_drafts)

    def draft(self, sequences: Sequence[SequenceState], lengths: Sequence[int]) -> list[Drafts]:
        return [self._of(sequence, length) for sequence, length in zip(sequences, lengths, strict=True)]

    def round_cost(self) -> StepCost:
        return StepCost()

    def forget(self, sequence: SequenceState) -> None:
        return

    def _of(self, sequence: SequenceState, length: int) -> Drafts:
        first = sequence.num_generated
        known = self._answers[int(sequence.spec.request_id)][first : first + length]
        return tuple(token + (self._random.random() >= self._right) for token in known)


class _Run(NamedTuple):
    answers: list[list[int]]
    tokens_per_s: float
    drafted: int
    accepted: int


def main() -> None:
    """Load the model, measure, and print the table."""
    options = _options()
    with tempfile.TemporaryDirectory() as folder:
        settings = DecodeSettings(
            model=str(write_shape(options.shape, Path(folder))),
            load_format="dummy",
            registry_address="none",
            quantize=options.quantize,
            num_threads=1,
            prefix_caching=False,
            speculative="ngram",
            max_model_len=1024,
        )
        limits = EngineLimits(settings.max_step_tokens, max(options.batch), 1 << 14, settings.speculation())
        loaded = load_engine(settings, limits)
    fit = CostFit()  # a worker learns the costs of its steps all the time that it serves
    title = f"{options.shape}, {options.quantize}; one core, tokens/s, medians of {options.repeats}"
    table = Table("sequences", "drafts right", "without", "with", "ratio", "accepted", title=title)
    with showing(table.rows, lambda: Console(width=100).print(table)):
        for num_sequences in options.batch:
            for right in options.right:
                cells = _cells(loaded, fit, num_sequences, right, options.repeats)
                table.add_row(str(num_sequences), f"{right:.0%}", *cells)
            table.add_section()


def _cells(loaded: LoadedEngine, fit: CostFit, num_sequences: int, right: float, repeats: int) -> tuple[str, ...]:
    plain = _answer(loaded, num_sequences, None)
    pairs = []
    for _ in range(repeats):
        drafted = _answer(loaded, num_sequences, Speculator(KnownAnswers(plain.answers, right), _MAX_DRAFTS, fit))
        if drafted.answers != plain.answers:
            raise RuntimeError("the tokens differ from those without drafts")
        pairs.append((_answer(loaded, num_sequences, None), drafted))
    without, speed = (statistics.median(run.tokens_per_s for run in runs) for runs in zip(*pairs, strict=True))
    ratio = statistics.median(drafted.tokens_per_s / without.tokens_per_s for without, drafted in pairs)
    last = pairs[-1][1]
    share = f"{last.accepted} of {last.drafted}"
    return f"{without:.0f}", f"{speed:.0f}", f"{ratio:.2f}", share


def _answer(loaded: LoadedEngine, num_sequences: int, speculator: Speculator | None) -> _Run:
    """Answer as many prompts in one batch. The time includes the prompts."""
    engine, clock, rng = (
        Engine(loaded.scheduler, loaded.runner, speculator=speculator),
        clock_for(1),
        random.Random(_SEED),
    )
    before = loaded.scheduler.load()
    for number in range(num_sequences):
        prompt = tuple(rng.randrange(3, 4000) for _ in range(_PROMPT_TOKENS))
        sampling = SamplingParams(max_new_tokens=_MAX_NEW_TOKENS, temperature=0.0)
        spec = SequenceSpec(str(number), 0, prompt, len(prompt), sampling, frozenset())
        loaded.scheduler.add(SequenceState(spec))
    answers: list[list[int]] = [[] for _ in range(num_sequences)]
    began = clock()
    while loaded.scheduler.has_work:
        for output in engine.step().outputs:
            answers[int(output.request_id)] += [token.id for token in output.tokens]
    speed = sum(map(len, answers)) / (clock() - began)
    after = loaded.scheduler.load()
    drafted, accepted = after.drafted_tokens - before.drafted_tokens, after.accepted_tokens - before.accepted_tokens
    return _Run(answers, speed, drafted, accepted)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.drafts", description=__doc__.split("\n\n")[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="135m")
    parser.add_argument("--quantize", default="int8")
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8])
    parser.add_argument("--right", type=float, nargs="+", default=[1.0, 0.9, 0.7, 0.0], help="shares of right drafts")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    run_program(main)
