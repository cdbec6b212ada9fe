"""A request while it runs: its tokens, its blocks, how far its KV has come.

    WAITING ──────────────▶ RUNNING ──▶ FINISHED
    WAITING_FOR_KV ──commit──▶ RUNNING          (decode worker: blocks reserved, KV on its way)
    RUNNING ──first token──▶ HELD ──▶ FINISHED  (prefill worker: blocks stay until the KV is handed over)
    WAITING ──────fork───────▶ RUNNING          (another choice of a prompt whose KV is there)

There is no prefill phase and no decode phase: a sequence has tokens, and KV is computed for a growing prefix of them.
"""

from copy import copy
from dataclasses import dataclass, field
from enum import Enum, auto

from mesh.domain.prefix import BlockHash
from mesh.domain.request import Request
from mesh.domain.tokens import PromptLogprob

SequenceKey = tuple[str, int]


class SequenceStatus(Enum):
    """Where a sequence is in its life."""

    WAITING = auto()
    WAITING_FOR_KV = auto()
    RUNNING = auto()
    HELD = auto()
    FINISHED = auto()


@dataclass(eq=False, slots=True)
class Sequence:
    """Mutable token state of one attempt of a request.

    KV of positions `[0, num_computed_tokens)` is in the cache, in the blocks of `block_table`. `block_hashes` are the
    chained hashes of the leading full blocks that prefix caching has seen. With `hand_over`, another worker goes on
    after the first token sampled here. The last `num_guessed` tokens are guesses, see `guessing`. `forks` wait for this
    sequence's prompt. `copy_from` is a block that is held until it has been copied into this sequence's own last one.
    """

    request: Request
    hand_over: bool = False
    token_ids: list[int] = field(init=False)
    status: SequenceStatus = SequenceStatus.WAITING
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_hashes: list[BlockHash] = field(default_factory=list)
    prompt_logprobs: list[PromptLogprob] = field(default_factory=list)
    num_guessed: int = 0
    forks: "list[Sequence]" = field(default_factory=list)
    copy_from: int | None = None

    def __post_init__(self) -> None:
        self.token_ids = list(self.request.token_ids)

    def guessing(self, drafts: tuple[int, ...]) -> "Sequence":
        """What the sequence will be if these tokens come next: to choose the token after them. Not to be scheduled."""
        guess = copy(self)
        guess.token_ids = [*self.token_ids, *drafts]
        guess.num_guessed = len(drafts)
        return guess

    @property
    def key(self) -> SequenceKey:
        """Identity within an engine: request id and attempt."""
        return self.request.request_id, self.request.attempt

    @property
    def held_blocks(self) -> list[int]:
        """All blocks it counts as a holder of."""
        return self.block_table if self.copy_from is None else [*self.block_table, self.copy_from]

    @property
    def is_over(self) -> bool:
        """True if nothing more is computed for it here."""
        return self.status in (SequenceStatus.HELD, SequenceStatus.FINISHED)

    @property
    def num_tokens(self) -> int:
        """Tokens known so far, prompt and generated."""
        return len(self.token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the client's prompt."""
        return self.request.num_prompt_tokens

    @property
    def num_generated(self) -> int:
        """Tokens generated so far, over all attempts."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens whose KV is still to be computed; 1 while decoding."""
        return self.num_tokens - self.num_computed_tokens
