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
from mesh.domain.structure import Structure
from mesh.grammar import GrammarCompiler

Places = NDArray[np.int64]
"""Indices into logits [num_seqs, vocab_size], row behind row."""


_NOWHERE: Places = np.empty(0, np.int64)


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
class _Masks:
    """Of each row the shorter of two lists. In `few_rows` nothing may come but what is at `allowed`; in other rows
    everything may but what is at `forbidden`.
    """

    few_rows: Places
    allowed: Places
    forbidden: Places

    def put_on(self, logits: Tensor) -> Tensor:
        """Change `logits`, contiguous, in place."""
        few_rows, allowed, forbidden = (
            torch.from_numpy(each).to(logits.device) for each in (self.few_rows, self.allowed, self.forbidden)
        )
        flat = logits.view(-1)
        kept = flat[allowed]
        logits.index_fill_(0, few_rows, float("-inf"))
        flat[allowed] = kept
        flat[forbidden] = float("-inf")
        return logits


@dataclass(frozen=True, slots=True)
class _Pending:
    """Masks that are being made for these rows."""

    rows: list[int]
    masks: "Future[_Masks]"


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
            steps = [(row, self._step(sequences[row])) for row in rows]
            self._pending = _Pending(rows, self._masking.submit(self._make, steps))

    def wait(self) -> None:
        """Return when the masks that were begun are there. `apply` does so by itself."""
        if self._pending is not None:
            self._pending.masks.result()

    def apply(self, logits: Tensor, adjusted: Tensor) -> Tensor:
        """Logits [num_seqs, vocab_size] without what may not come: `adjusted`, changed in place unless it is `logits`.

        A structure comes before all other wishes: where bias, minimum length and the like leave no token that may
        come, the model's own `logits` decide among those that may.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            return adjusted
        masks = pending.masks.result()
        if adjusted is logits:
            return masks.put_on(logits.clone())
        adjusted = masks.put_on(adjusted)
        rows = torch.tensor(pending.rows, device=logits.device)
        hopeless = rows[adjusted[rows].amax(1) == float("-inf")]
        if len(hopeless):
            adjusted[hopeless] = masks.put_on(logits.clone())[hopeless]
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

    def _make(self, steps: list[tuple[int, _Step]]) -> _Masks:
        few_rows: list[int] = []
        allowed: list[Places] = [_NOWHERE]
        forbidden: list[Places] = [_NOWHERE]
        for row, step in steps:
            bits = self._follow(step) if not step.grammar.failure else None
            if bits is None:
                continue
            packed = np.frombuffer(bits, np.uint8)
            may_come = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
            tokens = np.flatnonzero(may_come)
            if 2 * len(tokens) < self._vocab_size:
                few_rows.append(row)
                allowed.append(tokens + row * self._vocab_size)
            else:
                forbidden.append(np.flatnonzero(~may_come) + row * self._vocab_size)
        return _Masks(np.array(few_rows, np.int64), np.concatenate(allowed), np.concatenate(forbidden))

    def _follow(self, step: _Step) -> bytes | None:
        """The mask after the tokens, one bit for each token of the vocabulary. None if there is no such mask: after
        guesses that do not fit, which are wrong; else that is the sequence's failure.
        """
        grammar = step.grammar
        try:
            matcher = grammar.matcher = grammar.matcher or self._compiler.compile(grammar.structure)
        except Exception as error:  # the compiler's or the system's: it ends this sequence, not the engine
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
