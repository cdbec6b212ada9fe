"""What one engine step computes, and what comes out of it."""

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Protocol

from engine.sequence import Sequence
from mesh.domain.tokens import PromptLogprob, SampledToken


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """Compute `num_tokens` tokens of `sequence`, from position `start` on (its num_computed_tokens).

    The last of them are `drafts`: guesses at what follows the sequence's own tokens. The step samples after each, and
    what it samples holds as far as the guesses before it were right (Leviathan et al. 2023).
    """

    sequence: Sequence
    start: int
    num_tokens: int
    drafts: tuple[int, ...] = ()

    @property
    def end(self) -> int:
        """First position that is not computed in this step."""
        return self.start + self.num_tokens

    @property
    def samples(self) -> bool:
        """True if the step reaches the sequence's last token, so that a new one is sampled."""
        return self.end - len(self.drafts) == self.sequence.num_tokens

    def token_ids(self) -> list[int]:
        """Ids of the tokens to compute."""
        return self.sequence.token_ids[self.start : self.end] + list(self.drafts)


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """One step's work. Sequences that compute a single token come first. `copies` are blocks, from and to, to be copied
    before anything is computed."""

    items: tuple[ScheduledSequence, ...]
    copies: tuple[tuple[int, int], ...] = ()

    @property
    def num_tokens(self) -> int:
        """Tokens computed in this step."""
        return sum(item.num_tokens for item in self.items)

    @property
    def num_decodes(self) -> int:
        """Leading items with exactly one token."""
        return next((i for i, item in enumerate(self.items) if item.num_tokens > 1), len(self.items))


@dataclass(frozen=True, slots=True)
class RunnerOutput:
    """What a step produced for one item of the batch.

    `tokens` are there iff the item samples: one, and one more for each draft that was right. `prompt_logprobs` (only if
    the request asked) holds one entry for each prompt token at positions `start + 1 .. end` that exists; the first
    prompt token has none. With a `failure` the sequence cannot go on, and its tokens mean nothing.
    """

    tokens: tuple[SampledToken, ...] = ()
    prompt_logprobs: tuple[PromptLogprob, ...] = ()
    failure: str = ""


LayerHook = Callable[[ScheduledBatch, int, int], None]
"""Called as `hook(batch, first_layer, num_layers)` once the step's KV of those layers is in the cache."""


class Runner(Protocol):
    """Executes batches. Plug point: ModelRunner, and fakes in tests."""

    def prepare_thread(self) -> None:
        """Called once, before anything else, by the thread that will call `run`."""
        ...

    def prepare(self, sequence: Sequence) -> "Future[None] | None":
        """Have ready, on a thread of the runner's own, what the sequence needs beside the model; None if there is
        nothing. Fails with InvalidRequest. Called by any thread, before the sequence comes to the scheduler."""
        ...

    def use_cores(self, lent: tuple[int, ...]) -> None:
        """Called before each `run`, by the same thread: cores that this step may use beside the worker's own. They may
        change from step to step; threads that are to compute on them start in mesh.cores.threads_born_on."""
        ...

    def run(self, batch: ScheduledBatch, on_layers: LayerHook | None = None) -> list[RunnerOutput]:
        """Compute one step; one output per item, in order. Does not change the sequences. Called by one thread."""
        ...

    def forget(self, sequence: Sequence) -> None:
        """Drop whatever is kept for `sequence`; unknown ones are ignored."""
        ...
