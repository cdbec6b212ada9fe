"""Measures candidates for real: makes their checkpoints, compiles what they need, serves and loads them, and judges
their answers.
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from engine.compiled_code import compile_code
from engine.load_runner import load_model_runner
from engine.quantizer.quality import Quality
from mesh.domain.errors import ConfigurationError
from tandem_cli.optimization.candidates import BASE, STORED, USUAL, Candidate, flags_of
from tandem_cli.optimization.checkpoints import Checkpoints
from tandem_cli.optimization.choice import PrecisionQuality
from tandem_cli.optimization.progress import ShownProgress
from tandem_cli.optimization.pruning import Demand
from tandem_cli.optimization.quality import Judged, compare, runner_settings
from tandem_cli.optimization.questions import Judge, Question
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.optimization.search import State, needs_all_answers
from tandem_cli.optimization.serving import Answer, Served, serve
from tandem_cli.optimization.subject import Subject

_NUM_BLOCKS = 4


@dataclass(slots=True)
class CandidateTrial:
    """`measure` and `assess` of a search. The first `num_judged` questions are judged."""

    num_judged: int
    subject: Subject
    recipe: Recipe
    questions: Sequence[Question]
    demand: Demand
    checkpoints: Checkpoints
    judge: Judge | None
    state: State
    progress: ShownProgress
    compiled: set[str] = field(default_factory=set)

    def folder(self, precision: str) -> Path:
        """The model's folder in that precision, which is made if necessary. Raises ConfigurationError."""
        if precision not in STORED:
            return self.subject.folder
        return self.checkpoints.make(precision, lambda share: self.progress.doing(f"making {precision}", share))

    def measure(self, candidate: Candidate, num_timed: int) -> Served:
        """Raises RunFailed and ConfigurationError."""
        folder = self.folder(candidate.precision)
        self._compile(candidate, folder)
        num_jobs = max(num_timed, self.num_judged if needs_all_answers(self.state, candidate) else 0)
        jobs = [question.job for question in self.questions[:num_jobs]]
        flags = [str(folder), *flags_of(candidate.settings(self.recipe.draft_model))]
        self.progress.doing(f"starting {candidate.name}", 0.0)
        num_requests, num_done = max(len(jobs), num_timed), 0

        def on_done() -> None:
            nonlocal num_done
            num_done += 1
            self.progress.doing(candidate.name, num_done / num_requests)

        return asyncio.run(serve(flags, jobs, num_timed, self.recipe.concurrency, on_done))

    def assess(self, precision: str, base_answers: Sequence[Answer], answers: Sequence[Answer]) -> PrecisionQuality:
        """Raises ConfigurationError."""
        self.progress.doing(f"judging {precision}", 0.0)
        score, base_score = self._score(answers), self._score(base_answers)
        quality = self._distributions(precision, base_answers)
        if quality is None:
            return PrecisionQuality(score=score, base_score=base_score)
        return PrecisionQuality(
            quality.top1_agreement, quality.mean_kl, quality.perplexity, quality.base_perplexity, score, base_score
        )

    def _compile(self, candidate: Candidate, folder: Path) -> None:
        """Compile before the mesh starts, so that `load_s` is that of any later start."""
        if candidate.precision in self.compiled:
            return
        self.progress.doing(f"compiling for {candidate.precision}", 0.0)
        settings = runner_settings(folder, candidate.settings(""), num_blocks=_NUM_BLOCKS)
        compile_code(settings, load_model_runner)
        self.compiled.add(candidate.precision)

    def _score(self, answers: Sequence[Answer]) -> float | None:
        if self.judge is None:
            return None
        pairs = zip(self.questions[: self.num_judged], answers, strict=False)
        scores = [self.judge(question.line, answer.text) for question, answer in pairs]
        return sum(scores) / len(scores)

    def _distributions(self, precision: str, base_answers: Sequence[Answer]) -> Quality | None:
        """The precision beside the base; None if both do not fit into memory at once."""
        candidate = Candidate(precision, "none", USUAL)
        if precision != BASE and not self.subject.fits_twice(candidate, self.demand):
            return None
        judged = self._judged(base_answers)
        base = runner_settings(self.subject.folder, {})
        return compare(base, runner_settings(self.folder(precision), candidate.settings("")), judged)

    def _judged(self, base_answers: Sequence[Answer]) -> list[Judged]:
        """The questions with their references; with the base's own answers if there are no references at all."""
        prompts, references = self.subject.prompts[: self.num_judged], self.subject.references[: self.num_judged]
        answers = references if any(references) else [answer.token_ids for answer in base_answers]
        pairs = zip(prompts, answers, strict=False)
        judged = [Judged((*prompt, *answer), len(prompt)) for prompt, answer in pairs if answer]
        if not judged:
            raise ConfigurationError("the base answered nothing to any question, so there is nothing to judge by")
        return judged
