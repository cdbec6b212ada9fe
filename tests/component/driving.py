"""Runs a ModelRunner by hand: the test decides each step's batch, blocks are scattered over the cache."""

import random
from dataclasses import dataclass, field

from engine.batch import ScheduledBatch, ScheduledSequence
from engine.model_runner import ModelRunner
from engine.runner import FinishBatch, RunnerOutput
from engine.sequence import SequenceState
from mesh.domain.kv import Span
from mesh.domain.request import SequenceSpec
from mesh.domain.tokens import PromptLogprob, SampledToken

_PREPARE_S = 60.0


@dataclass(eq=False)
class Run:
    """A sequence and what came out of it so far."""

    sequence: SequenceState
    tokens: list[SampledToken] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)

    @property
    def token_ids(self) -> list[int]:
        return [token.id for token in self.tokens]


class Driver:
    """Hands out blocks in random order and keeps sequences up to date, as the scheduler would."""

    def __init__(self, runner: ModelRunner, seed: int = 0) -> None:
        self.runner = runner
        self._free = random.Random(seed).sample(range(runner.kv_cache.num_blocks), runner.kv_cache.num_blocks)
        self.announced: list[tuple[int, int]] = []
        self._left: set[tuple[SequenceState, int]] = set()

    def add(self, spec: SequenceSpec) -> Run:
        run = Run(SequenceState(spec))
        for preparing in self.runner.prepare([run.sequence]):
            preparing.result(_PREPARE_S)
        return run

    def step(self, *work: tuple[Run, int]) -> list[RunnerOutput]:
        """Compute so many tokens of each run; single tokens must come first."""
        self.announced.clear()
        return self.begin(*work)()

    def begin(self, *work: tuple[Run, int]) -> FinishBatch:
        """As `step`, but only begin. Runs of a step in flight must not be in another."""
        for run, count in work:
            self.reserve(run.sequence, run.sequence.num_computed_tokens + count)
        items = [ScheduledSequence(run.sequence, run.sequence.num_computed_tokens, count) for run, count in work]
        finish = self.runner.begin(ScheduledBatch(tuple(items)), self.note_layers)

        def end() -> list[RunnerOutput]:
            outputs = finish()
            for (run, count), output in zip(work, outputs, strict=True):
                run.sequence.num_computed_tokens += count
                run.prompt_logprobs += output.prompt_logprobs
                run.tokens += output.tokens
                run.sequence.token_ids += [token.id for token in output.tokens]
                self.free_behind(run.sequence)
            return outputs

        return end

    def note_layers(self, batch: ScheduledBatch, layers: Span) -> None:
        """Called when the step has written the KV of these layers."""
        self.announced.append((layers.first, layers.count))

    def free_behind(self, sequence: SequenceState) -> None:
        """Give the blocks that have left their windows to other sequences."""
        groups = self.runner.kv_cache.layout.groups
        for group in range(groups.count):
            num_left = groups.first_visible(group, sequence.num_computed_tokens)
            for entry in range(group, num_left * groups.count, groups.count):
                if (sequence, entry) not in self._left:
                    self._left.add((sequence, entry))
                    self._free.append(sequence.block_table[entry])

    def finish(self, *runs: Run, chunk: int = 1000) -> None:
        """Step all runs together until each has its max_new_tokens."""
        while waiting := [run for run in runs if run.sequence.num_tokens < run.sequence.spec.max_total_tokens]:
            work = [(run, min(chunk, run.sequence.num_uncomputed_tokens)) for run in waiting]
            self.step(*sorted(work, key=lambda pair: pair[1] > 1))

    def reserve(self, sequence: SequenceState, num_tokens: int) -> None:
        while len(sequence.block_table) < self.runner.kv_cache.layout.num_entries_for(num_tokens):
            sequence.block_table.append(self._free.pop())
