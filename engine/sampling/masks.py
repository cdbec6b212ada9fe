"""TokenMasks: structured output. Sequences with a grammar sample only tokens that the grammar allows.

    prepare(sequence) ─▶ compiles the grammar on another thread, before the sequence is added to the engine
    begin(sequences)  ─▶ a thread advances the grammars and computes masks, while the model computes the step
    apply(logits)     ─▶ waits for the masks; tokens that are not allowed get probability 0

A grammar's state follows from the generated token ids, so replays and other workers compute the same masks.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import torch
from llguidance import LLMatcher
from numpy.typing import NDArray
from torch import Tensor

from checkpoint.grammar import GrammarCompiler
from engine.device_copies import Arrays, DeviceCopies, Tensors
from engine.sequence import SequenceKey, SequenceState
from mesh.domain.request import Structure

Indices = NDArray[np.int64]
"""Indices into logits [num_seqs, vocab_size], flattened."""


_NO_INDICES: Indices = np.empty(0, np.int64)


@dataclass(eq=False, slots=True)
class _Grammar:
    """The grammar state of one sequence. Only the mask thread uses it, except for `failure` and `num_rows`, valid after
    `apply`. `num_rows`: see TokenMasks.num_rows.
    """

    structure: Structure
    scope: str
    matcher: LLMatcher | None = None
    num_consumed: int = 0
    failure: str = ""
    num_rows: int | None = None


@dataclass(frozen=True, slots=True)
class _Step:
    """A grammar, the tokens generated since its last step, and the drafts after them."""

    grammar: _Grammar
    new_tokens: list[int]
    drafts: list[int]


@dataclass(frozen=True, slots=True)
class _Masks:
    """Masks of several rows. Per row, the shorter of two lists is stored: its allowed tokens or its forbidden tokens.

    Rows in `allow_rows` have their tokens in `allowed`; the forbidden tokens of all other rows are in `forbidden`.
    """

    allow_rows: Indices
    allowed: Indices
    forbidden: Indices

    def arrays(self) -> Arrays:
        return {"allow_rows": self.allow_rows, "allowed": self.allowed, "forbidden": self.forbidden}


@dataclass(frozen=True, slots=True)
class _Pending:
    """Masks of these rows, in computation."""

    rows: list[int]
    masks: "Future[_Masks]"


class TokenMasks:
    """The token masks of one engine. Used by the engine's thread only, except for `prepare`."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._grammars: dict[SequenceKey, _Grammar] = {}
        self._pending: deque[_Pending | None] = deque()  # of each step in flight
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def prepare(self, sequence: SequenceState) -> "Future[None] | None":
        """Start to compile the sequence's grammar; None if it has none. The future fails with InvalidRequest.

        First come, first served: routers have compiled it before, one at a time and with turns for tenants.
        """
        structure, scope = sequence.request.sampling.structure, sequence.request.cache_namespace
        return None if structure is None else self._compiling.submit(self._compile, structure, scope)

    def begin(self, sequences: Sequence[SequenceState]) -> None:
        """Start to compute the masks for the next token of each sequence, one row of logits per sequence. Steps are
        applied in the order in which they began.
        """
        rows = [row for row, sequence in enumerate(sequences) if sequence.request.sampling.structure is not None]
        steps = [(row, self._step(sequences[row])) for row in rows]
        if sequences:
            self._pending.append(_Pending(rows, self._masking.submit(self._make, steps)) if rows else None)

    def apply(self, logits: Tensor, adjusted: Tensor, copies: DeviceCopies) -> Tensor:
        """Mask `adjusted` [num_seqs, vocab_size], in place unless it is `logits`; returns the result.

        The structure has priority over all other parameters: where bias, minimum length and the like exclude every
        allowed token, the row is the model's own `logits`, masked.
        """
        pending = self._pending.popleft() if self._pending else None
        if pending is None:
            return adjusted
        masks = copies.to_device({**pending.masks.result().arrays(), "rows": np.array(pending.rows, np.int64)})
        if adjusted is logits:
            return _put_on(logits.clone(), masks)
        adjusted = _put_on(adjusted, masks)
        rows = masks["rows"]
        is_empty = adjusted[rows].amax(1) == float("-inf")
        if adjusted.is_cpu and not is_empty.any():  # elsewhere the host would wait for the answer
            return adjusted
        adjusted[rows] = torch.where(is_empty[:, None], _put_on(logits.clone(), masks)[rows], adjusted[rows])
        return adjusted

    def failure(self, sequence: SequenceState) -> str:
        """The reason for which the sequence's grammar failed, such as a limit on its size; empty if it did not."""
        grammar = self._grammars.get(sequence.key)
        return "" if grammar is None else grammar.failure

    def num_rows(self, sequence: SequenceState) -> int | None:
        """The leading rows of the sequence's last step that count; None: all. Behind later drafts the grammar was too
        much work, so that the rows have no masks. The step that follows such a draft without drafts will tell.
        """
        grammar = self._grammars.get(sequence.key)
        return None if grammar is None else grammar.num_rows

    def forget(self, sequence: SequenceState) -> None:
        """Drop the grammar state of `sequence`."""
        self._grammars.pop(sequence.key, None)

    def _compile(self, structure: Structure, scope: str) -> None:
        self._compiler.compile(structure, scope)

    def _step(self, sequence: SequenceState) -> _Step:
        structure = sequence.request.sampling.structure
        assert structure is not None
        grammar = self._grammars.setdefault(sequence.key, _Grammar(structure, sequence.request.cache_namespace))
        first_draft = sequence.num_tokens - sequence.num_drafted
        new_tokens = sequence.token_ids[sequence.num_prompt_tokens + grammar.num_consumed : first_draft]
        grammar.num_consumed += len(new_tokens)
        return _Step(grammar, new_tokens, sequence.token_ids[first_draft:])

    def _make(self, steps: list[tuple[int, _Step]]) -> _Masks:
        allow_rows: list[int] = []
        allowed: list[Indices] = [_NO_INDICES]
        forbidden: list[Indices] = [_NO_INDICES]
        for row, step in steps:
            bits = self._follow(step) if not step.grammar.failure else None
            if bits is None:
                continue
            packed = np.frombuffer(bits, np.uint8)
            is_allowed = np.unpackbits(packed, count=self._vocab_size, bitorder="little").view(np.bool_)
            tokens = np.flatnonzero(is_allowed)
            if 2 * len(tokens) < self._vocab_size:
                allow_rows.append(row)
                allowed.append(tokens + row * self._vocab_size)
            else:
                forbidden.append(np.flatnonzero(~is_allowed) + row * self._vocab_size)
        return _Masks(np.array(allow_rows, np.int64), np.concatenate(allowed), np.concatenate(forbidden))

    def _follow(self, step: _Step) -> bytes | None:
        """The mask after the step's tokens, one bit per token of the vocabulary.

        None if the drafts do not match the grammar, which makes them wrong, or if the grammar failed.
        """
        grammar = step.grammar
        try:
            matcher = grammar.matcher = grammar.matcher or self._compiler.compile(grammar.structure, grammar.scope)
        except Exception as error:  # the compiler's or the system's: it ends this sequence, not the engine
            grammar.failure = str(error)
            return None
        matcher.consume_tokens(step.new_tokens)
        if not step.drafts:
            grammar.num_rows = None
            bits = matcher.compute_bitmask()
            if not matcher.is_error():
                return bits
            reason = matcher.get_error().partition("\n")[0]
            grammar.failure = f"{grammar.structure.kind} cannot be followed any further: {reason}"
            return None
        matcher = matcher.deep_copy()
        if matcher.try_consume_tokens(step.drafts) == len(step.drafts):
            bits = matcher.compute_bitmask()
            if not matcher.is_error():
                return bits
        if matcher.is_error() and grammar.num_rows is None:
            grammar.num_rows = len(step.drafts)
        return None


def _put_on(logits: Tensor, masks: Tensors) -> Tensor:
    """Apply _Masks.arrays to contiguous `logits` in place."""
    flat = logits.view(-1)
    allowed_logits = flat[masks["allowed"]]
    logits.index_fill_(0, masks["allow_rows"], float("-inf"))
    flat[masks["allowed"]] = allowed_logits
    flat[masks["forbidden"]] = float("-inf")
    return logits
