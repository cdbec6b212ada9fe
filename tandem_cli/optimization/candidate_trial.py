"""Measures candidates for real: makes their checkpoints, compiles what they need, serves and loads them, and judges
their answers.

The quality of a precision is how far it is from the base: next-token distributions of both, as workers compute them, on
the user's questions and their references, or the base's own answers where there are none.
"""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from engine.compiled_code import compile_code
from engine.loading.load_runner import load_model_runner
from engine.loading.resolve import kv_layout, resolve
from engine.model_runner import ModelRunner
from engine.quantizer.quality import Quality, QualityMeter
from engine.runner_settings import RunnerSettings
from engine.sequence import SequenceState
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import KVLayout
from mesh.domain.request import SamplingParams, SequenceSpec
from mesh.interrupts import run_async
from mesh.settings import as_flags
from tandem_cli.optimization.candidates import BASE, STORED, USUAL, Candidate, Demand
from tandem_cli.optimization.choice import PrecisionQuality
from tandem_cli.optimization.progress import ShownProgress
from tandem_cli.optimization.questions import Judge, Question
from tandem_cli.optimization.recipe import Recipe
from tandem_cli.optimization.search import State, needs_all_answers
from tandem_cli.optimization.serving import Answer, Served, serve
from tandem_cli.optimization.subject import Checkpoints, Subject

_PLACES_AT_ONCE = 128
_MAX_TOKENS = 1024
"""Tokens of a question and its answer; what is longer is cut."""
_MAX_PROMPTS = 64


@dataclass(frozen=True, slots=True)
class Judged:
    """A question and its answer as token ids; tokens from `first` on are the answer's."""

    token_ids: tuple[int, ...]
    first: int


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
        flags = [str(folder), *as_flags(**candidate.settings(self.recipe.draft_model))]
        self.progress.doing(f"starting {candidate.name}", 0.0)
        num_requests, num_done = max(len(jobs), num_timed), 0

        def on_done() -> None:
            nonlocal num_done
            num_done += 1
            self.progress.doing(candidate.name, num_done / num_requests)

        return run_async(serve(flags, jobs, num_timed, self.recipe.concurrency, on_done))

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
        settings = runner_settings(folder, candidate.settings(""))
        compile_code(settings, load_model_runner)
        self.compiled.add(candidate.precision)

    def _score(self, answers: Sequence[Answer]) -> float | None:
        if self.judge is None:
            return None
        pairs = zip(self.questions[: self.num_judged], answers, strict=False)
        scores = [self.judge(question.line, answer.text) for question, answer in pairs]
        return sum(scores) / len(scores)

    def _distributions(self, precision: str, base_answers: Sequence[Answer]) -> Quality | None:
        """Compare the precision with the base; None if both do not fit into memory at once."""
        candidate = Candidate(precision, "none", USUAL)
        if precision != BASE and not self.subject.fits_twice(candidate, self.demand):
            return None
        judged = self._judged(base_answers)
        base = runner_settings(self.subject.folder, {})
        return compare_distributions(base, runner_settings(self.folder(precision), candidate.settings("")), judged)

    def _judged(self, base_answers: Sequence[Answer]) -> list[Judged]:
        """The questions with their references; with the base's own answers if there are no references at all."""
        prompts, references = self.subject.prompts[: self.num_judged], self.subject.references[: self.num_judged]
        answers = references if any(references) else [answer.token_ids for answer in base_answers]
        pairs = zip(prompts, answers, strict=False)
        judged = [Judged((*prompt, *answer), len(prompt)) for prompt, answer in pairs if answer]
        if not judged:
            raise ConfigurationError("the base answered nothing to any question, so there is nothing to judge by")
        return judged


def compare_distributions(base: RunnerSettings, other: RunnerSettings, judged: Sequence[Judged]) -> Quality:
    """Load both models, and compare them on the first prompts. Raises ConfigurationError."""
    chosen = [cut for cut in map(_cut, judged[:_MAX_PROMPTS]) if len(cut.token_ids) > cut.first]
    longest = max(len(sample.token_ids) for sample in chosen)
    models = [_load_model(settings, longest) for settings in dict.fromkeys((base, other))]
    runners = models if len(models) == 2 else models * 2
    meter = QualityMeter()
    for sample in chosen:
        prompts = [_sequence(sample.token_ids, runner.kv_cache.layout) for runner in runners]
        for start in range(sample.first - 1, len(sample.token_ids) - 1, _PLACES_AT_ONCE):
            rows = range(start, min(start + _PLACES_AT_ONCE, len(sample.token_ids) - 1))
            following = torch.tensor(sample.token_ids[rows.start + 1 : rows.stop + 1])
            base_logits, other_logits = (
                runner.prompt_logits(prompt, rows).cpu().clone()
                for runner, prompt in zip(runners, prompts, strict=True)
            )
            meter.add(following, base_logits, other_logits)
    del models, runners
    gc.collect()  # two models, before meshes are started
    return meter.quality(len(chosen))


def runner_settings(model_dir: Path, settings: dict[str, str]) -> RunnerSettings:
    """The settings of a runner with the arithmetic of a candidate, whose settings are those of `tandem up`."""
    dtype, quantize = settings.get("dtype", "auto"), settings.get("quantize", "none")
    return RunnerSettings(model_dir, "auto", dtype=dtype, quantize=quantize)


def _cut(judged: Judged) -> Judged:
    """Keep the answer, and as much before it as fits."""
    answer = judged.token_ids[judged.first :][: _MAX_TOKENS // 2]
    prompt = judged.token_ids[: judged.first][-(_MAX_TOKENS - len(answer)) :]
    return Judged((*prompt, *answer), len(prompt))


def _load_model(settings: RunnerSettings, num_tokens: int) -> ModelRunner:
    resolved, config = resolve(settings)
    return load_model_runner(replace(settings, num_blocks=kv_layout(config, resolved).num_entries_for(num_tokens)))


def _sequence(token_ids: tuple[int, ...], layout: KVLayout) -> SequenceState:
    sampling = SamplingParams(max_new_tokens=1, seed=0)
    sequence = SequenceState(SequenceSpec("quality", 0, token_ids, len(token_ids), sampling))
    sequence.block_table = list(range(layout.num_entries_for(len(token_ids))))
    return sequence
