"""Which tokens may come next in sequences that must keep to a structure.

    begin(sequences) ─▶ a thread follows each grammar and makes masks, while the model computes the step
    apply(logits)    ─▶ waits for them; tokens that may not come get no probability

A grammar's state follows from the ids generated so far, so replays and other workers make the same masks. Compiling is
done before a sequence comes to the engine (`prepare`), on another thread, so that it delays no step.
"""

from collections.abc import Sequence as Rows
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from engine.sequence import Sequence, SequenceKey
from mesh.domain.errors import InvalidRequest
from mesh.domain.structure import Structure
from mesh.grammar import GrammarCompiler

Forbidden = NDArray[np.bool_]
"""[num_rows, vocab_size]: True where a token may not come."""


@dataclass(eq=False, slots=True)
class _Grammar:
    """Where one sequence is in its structure. Only the thread for masks looks inside; `failure` once it is done."""

    structure: Structure
    matcher: LLMatcher | None = None
    num_followed: int = 0
    failure: str = ""


@dataclass(frozen=True, slots=True)
class _Step:
    """A grammar, the tokens generated since the last time, and guesses that may come after them."""

    grammar: _Grammar
    new_tokens: list[int]
    guesses: list[int]


@dataclass(frozen=True, slots=True)
class _Pending:
    """Masks that are being made for these rows."""

    rows: list[int]
    forbidden: "Future[Forbidden]"


class TokenMasks:
    """Masks of one engine's sequences. Belongs to the engine's thread, but for `prepare`."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._grammars: dict[SequenceKey, _Grammar] = {}
        self._pending: _Pending | None = None
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def prepare(self, sequence: Sequence) -> "Future[None] | None":
        """Have the sequence's grammar compiled; fails with InvalidRequest. None if it has none."""
        structure = sequence.request.sampling.structure
        return None if structure is None else self._compiling.submit(self._compile, structure)

    def begin(self, sequences: Rows[Sequence]) -> None:
        """Start making the masks for the next token of each sequence: one row of logits each."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.structure is not None]
        if rows:
            steps = [self._step(sequences[row]) for row in rows]
            self._pending = _Pending(rows, self._masking.submit(self._make, steps))

    def apply(self, logits: Tensor, adjusted: Tensor) -> Tensor:
        """`adjusted` logits [num_seqs, vocab_size] without what may not come; itself if nothing is forbidden.

        A structure comes before all other wishes: where bias, minimum length and the like leave no token that may
        come, the model's own `logits` decide among those that may.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return adjusted
        forbidden = torch.from_numpy(pending.forbidden.result()).to(logits.device)
        rows = torch.tensor(pending.rows, device=logits.device)
        masked = adjusted[rows].masked_fill_(forbidden, float("-inf"))
        if adjusted is logits:
            adjusted = logits.clone()
        else:
            hopeless = masked.amax(1) == float("-inf")
            masked[hopeless] = logits[rows[hopeless]].masked_fill_(forbidden[hopeless], float("-inf"))
        adjusted[rows] = masked
        return adjusted

    def failure(self, sequence: Sequence) -> str:
        """Why the sequence cannot go on: its grammar became too much work; empty if it can."""
        grammar = self._grammars.get(sequence.key)
        return "" if grammar is None else grammar.failure

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for `sequence`."""
        self._grammars.pop(sequence.key, None)

    def _compile(self, structure: Structure) -> None:
        self._compiler.compile(structure)

    def _step(self, sequence: Sequence) -> _Step:
        structure = sequence.request.sampling.structure
        assert structure is not None
        grammar = self._grammars.setdefault(sequence.key, _Grammar(structure))
        held = sequence.num_tokens - sequence.num_guessed
        new_tokens = sequence.token_ids[sequence.num_prompt_tokens + grammar.num_followed : held]
        grammar.num_followed += len(new_tokens)
        return _Step(grammar, new_tokens, sequence.token_ids[held:])

    def _make(self, steps: list[_Step]) -> Forbidden:
        forbidden = np.zeros((len(steps), self._vocab_size), np.bool_)  # nothing, where there is no mask
        for row, step in enumerate(steps):
            bits = self._follow(step) if not step.grammar.failure else None
            if bits is None:
                continue
            allowed = np.unpackbits(np.frombuffer(bits, np.uint8), count=self._vocab_size, bitorder="little")
            np.equal(allowed, 0, out=forbidden[row])
        return forbidden

    def _follow(self, step: _Step) -> bytes | None:
        """The mask after the tokens, one bit for each token of the vocabulary. None if there is no such mask: after
        guesses that do not fit, which are wrong; else that is the sequence's failure.
        """
        grammar = step.grammar
        try:
            matcher = grammar.matcher = grammar.matcher or self._compiler.compile(grammar.structure)
        except InvalidRequest as error:
            grammar.failure = str(error)
            return None
        matcher.consume_tokens(step.new_tokens)
        if step.guesses:
            matcher = matcher.deep_copy()
            if matcher.try_consume_tokens(step.guesses) < len(step.guesses):
                return None
        bits = matcher.compute_bitmask()
        if not matcher.is_error():
            return bits
        if not step.guesses:
            reason = matcher.get_error().partition("\n")[0]
            grammar.failure = f"{grammar.structure.kind} cannot be followed any further: {reason}"
        return None
