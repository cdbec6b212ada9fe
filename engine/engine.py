"""Engine joins scheduler, runner and speculator; `Engine.step` is one step, whose life `engine/__init__.py` draws."""

import time
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import NamedTuple

from engine.batch import ScheduledBatch
from engine.cores import ComputeCores
from engine.prompt_pace import PromptPace
from engine.runner import FinishBatch, LayerHook, Runner
from engine.scheduler import Scheduler
from engine.sequence import SequenceState, SequenceStatus
from engine.settings import SchedulerConfig
from engine.speculation.speculator import Speculator
from mesh.domain.errors import MeshError
from mesh.domain.kv import Span
from mesh.domain.tokens import SequenceOutput


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of one step: tokens, and sequences that ended without one."""

    outputs: list[SequenceOutput]
    preempted: list[SequenceState]
    num_seqs: int = 0
    """Number of sequences in the step."""
    num_tokens: int = 0
    """Number of tokens that the step computed."""
    failed: list[tuple[SequenceState, MeshError]] = field(default_factory=list)
    """Sequences that cannot continue, each with its error."""

    @property
    def is_idle(self) -> bool:
        """True if the step computed no tokens."""
        return self.num_seqs == 0


class _Step(NamedTuple):
    """A batch in flight: as it was scheduled, and as it is computed, with drafts; and what waits for its end."""

    scheduled: ScheduledBatch
    batch: ScheduledBatch
    finish: FinishBatch
    begun_s: float


class Engine:
    """Joins scheduler, runner and speculator. Not thread-safe: EngineLoop runs it in a thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        *,
        on_layers: LayerHook | None = None,
        cores: ComputeCores | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.num_step_tokens = 0
        """Tokens of the steps in flight, or of the last ones. Any thread may read it."""
        self._runner = runner
        self._on_layers = on_layers
        self._cores = cores or ComputeCores()
        self._speculator = speculator
        self._pace = PromptPace(scheduler.config.max_step_stretch)
        self._in_flight: deque[_Step] = deque()  # oldest first
        self._finished_s = 0.0
        self._borrows = runner.borrows_cores or (speculator is not None and speculator.drafter.borrows_cores)

    def step(self) -> StepResult:
        """Schedule and begin as many batches as may be in flight, then finish the oldest: update the scheduler with its
        outputs.
        """
        while (batch := self.scheduler.schedule(self._pace.max_prompt_tokens())).items:
            self._begin(batch)
        outputs: list[SequenceOutput] = []
        batch = ScheduledBatch(())
        if self._in_flight:
            batch, outputs = self._finish_oldest()
        else:
            self._cores.set_idle()
        for item in batch.items:
            if item.sequence.is_over:
                self._forget(item.sequence)
        preempted = self.scheduler.take_preempted()
        for sequence in preempted:
            self._forget(sequence)
        return StepResult(
            outputs,
            preempted,
            num_seqs=len(batch.items),
            num_tokens=batch.num_tokens,
            failed=self.scheduler.take_failed(),
        )

    def _begin(self, scheduled: ScheduledBatch) -> None:
        begun_s, batch = time.monotonic(), scheduled
        self.num_step_tokens = batch.num_tokens + sum(step.batch.num_tokens for step in self._in_flight)
        has_prompt = scheduled.num_prompt_tokens > 0
        lent = self._cores.begin_step(borrow=self._borrows, has_prompt=has_prompt)
        self._runner.use_cores(lent)
        if self._speculator is not None:
            self._speculator.drafter.use_cores(lent)
            batch = self._speculator.extend(scheduled, self.scheduler)
            self.num_step_tokens += batch.num_tokens - scheduled.num_tokens
        on_layers = self._between_layers if lent and (has_prompt or self._on_layers) else self._on_layers
        self._in_flight.append(_Step(scheduled, batch, self._runner.begin(batch, on_layers), begun_s))

    def _finish_oldest(self) -> tuple[ScheduledBatch, list[SequenceOutput]]:
        self.num_step_tokens = sum(step.batch.num_tokens for step in self._in_flight)
        step = self._in_flight.popleft()
        outputs = step.finish()
        self._cores.end_step()
        # With several batches in flight, a stream waits from the end of one to the end of the next.
        begun_s, self._finished_s = max(step.begun_s, self._finished_s), time.monotonic()
        scheduled = step.scheduled
        self._pace.observe(scheduled.num_decoding, scheduled.num_prompt_tokens, self._finished_s - begun_s)
        if self._speculator is not None:
            self._speculator.learn(step.batch, outputs)
        return step.batch, self.scheduler.update(step.batch, outputs)

    def _between_layers(self, batch: ScheduledBatch, layers: Span) -> None:
        """Layer hook on lent cores: announce the layers, then return the cores if the partner needs them."""
        if self._on_layers is not None:
            self._on_layers(batch, layers)
        if self._cores.must_yield():
            self._runner.use_cores(())
            self._cores.end_step()

    def begin_role(self, config: SchedulerConfig, on_layers: LayerHook | None) -> None:
        """Plan by other limits from now on, and call another layer hook. Raises ValueError while sequences are here."""
        self.scheduler.begin_role(config)
        self._on_layers = on_layers
        self._pace = PromptPace(config.max_step_stretch)

    def close(self) -> None:
        if self.scheduler.tables.evicted is not None:
            self.scheduler.tables.evicted.close()
        self._runner.close()

    def prepare(self, choices: Sequence[SequenceState]) -> "list[Future[None]]":
        """Futures of `Runner.prepare`, for the runner and for its drafter."""
        drafter = [] if self._speculator is None else self._speculator.drafter.prepare(choices)
        return [*self._runner.prepare(choices), *drafter]

    def abort(self, sequence: SequenceState) -> None:
        """End a sequence in the scheduler and in the runner; idempotent. `Scheduler.remove` is one part of it.

        The runner forgets a sequence of a batch in flight when that batch is finished.

        A transfer that failed may have left NaN in the blocks of a sequence that waits for its KV, so they are cleared
        before they are freed.
        """
        if sequence.status is SequenceStatus.WAITING_FOR_KV:
            self._runner.clear_blocks(self.scheduler.tables.unverified(sequence))
        self.scheduler.remove(sequence)
        if not self.scheduler.is_computing(sequence):
            self._forget(sequence)

    def _forget(self, sequence: SequenceState) -> None:
        self._runner.forget(sequence)
        if self._speculator is not None:
            self._speculator.forget(sequence)
