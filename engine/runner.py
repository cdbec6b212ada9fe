"""Runner: the contract of what executes batches for the engine, and RunnerOutput, the result of a step."""

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.batch import HiddenStates, ScheduledBatch
from engine.sequence import SequenceState
from mesh.domain.errors import MeshError
from mesh.domain.kv import Span
from mesh.domain.tokens import PromptLogprob, SampledToken


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """The result of a step for one item of the batch.

    `tokens` is empty unless the item needs sampling; then it has one token, plus one for each draft that was right. It
    has none if the drafts have spoiled the step: the KV of the item is cleared, and is computed again without drafts.
    `prompt_logprobs`, only if requested, has one entry for each prompt token at positions `start + 1 .. end`; the first
    prompt token has none. With a `failure` the sequence ends and its tokens are invalid: InvalidRequest if the grammar
    of its structure fails, ModelFailed if the model computed NaN or infinity. `hidden`, only if a drafter reads it: the
    normed hidden states from which `tokens` were sampled, a row for each.
    """

    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    failure: MeshError | None = None
    hidden: HiddenStates | None = None


LayerHook = Callable[[ScheduledBatch, Span], None]
"""Called as `hook(batch, layers)` once the step has written the KV of those layers to the cache."""


FinishBatch = Callable[[], list[RunnerOutput]]
"""Waits for the end of a step; returns one output per item of its batch, in order."""


class Runner(Protocol):
    """Executes batches. Plug point: ModelRunner, and fakes in tests."""

    def prepare(self, choices: Sequence[SequenceState]) -> "Sequence[Future[None]]":
        """Start to prepare, on other threads, the compiled grammars and the adapter that the choices of a request need.

        The futures fail with InvalidRequest, with ModelFailed if an adapter cannot be read, or with WorkerBusy. Called
        by any thread, before the sequences are added to the scheduler.
        """
        ...

    @property
    def borrows_cores(self) -> bool:
        """True if steps are computed on cores that `use_cores` has lent."""
        ...

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """Set the cores that the next `begin` may use in addition to the worker's own. The engine's thread calls this
        before every `begin`.

        The cores may change from step to step. Threads that compute on them are started in
        `engine.cores.threads_born_on`.
        """
        ...

    def clear_blocks(self, block_ids: list[int]) -> None:
        """Fill blocks with zeros. They must have a single holder. Called by the same thread as `begin`."""
        ...

    def begin(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> FinishBatch:
        """Begin to compute a step. Steps in flight are finished in the order in which they began, by the same thread.
        Does not modify sequences.
        """
        ...

    def forget(self, sequence: SequenceState) -> None:
        """Drop all state of `sequence`; unknown sequences are ignored."""
        ...

    def close(self) -> None:
        """End the processes that compute for this runner. Called after the last step, on the thread that loaded it."""
        ...
