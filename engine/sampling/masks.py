"""TokenMasks: structured output. Sequences with a grammar sample only tokens that the grammar allows.

    prepare(sequence) ─▶ compiles the grammar on another thread, before the sequence is added to the engine
    begin(sequences)  ─▶ a thread advances the grammars and computes masks, while the model computes the step
    take()            ─▶ waits for the masks; Sampler gives tokens that are not allowed probability 0

A grammar's state follows from the generated token ids, so replays and other workers compute the same masks.
"""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
from llguidance import LLMatcher

from checkpoint.grammar import GrammarCompiler
from engine.device_copies import Arrays
from engine.sequence import SequenceState
from mesh.domain.structure import Structure
from mesh.domain.tokens import SequenceKey


@dataclass(eq=False, slots=True)
class _Grammar:
    """The grammar state of one sequence. Only the mask thread uses it, except for `failure` and `num_rows`, valid after
    `take`. `num_rows`: see TokenMasks.num_rows.
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


class TokenMasks:
    """The token masks of one engine. Used by the engine's thread only, except for `prepare`."""

    def __init__(self, compiler: GrammarCompiler, vocab_size: int) -> None:
        self._compiler = compiler
        self._vocab_size = vocab_size
        self._grammars: dict[SequenceKey, _Grammar] = {}
        self._pending: deque[Future[Arrays] | None] = deque()  # of each step in flight
        self._compiling = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._masking = ThreadPoolExecutor(1, thread_name_prefix="masks")

    def prepare(self, sequence: SequenceState) -> "Future[None] | None":
        """Start to compile the sequence's grammar; None if it has none. The future fails with InvalidRequest.

        First come, first served: routers have compiled it before, one at a time and with turns for tenants.
        """
        structure, scope = sequence.spec.sampling.structure, sequence.spec.cache_namespace
        return None if structure is None else self._compiling.submit(self._compile, structure, scope)

    def begin(self, sequences: Sequence[SequenceState]) -> None:
        """Start to compute the masks for the next token of each sequence, one row of logits per sequence."""
        rows = [row for row, sequence in enumerate(sequences) if sequence.spec.sampling.structure is not None]
        steps = [(row, self._step(sequences[row])) for row in rows]
        if sequences:
            self._pending.append(self._masking.submit(self._make, steps) if rows else None)

    def take(self) -> Arrays:
        """Wait for the masks of the step that began first and was not taken; empty if its rows have none.

        masked     int64 [masks]: rows of logits
        mask_bits  uint8 [masks, bytes]: a bit for each token, the lowest first; 1 if it is allowed
        """
        pending = self._pending.popleft() if self._pending else None
        return {} if pending is None else pending.result()

    def failure(self, sequence: SequenceState) -> str:
        """The reason for which the sequence's grammar failed, such as a limit on its size; empty if it did not."""
        grammar = self._grammars.get(sequence.key)
        return "" if grammar is None else grammar.failure

    def num_rows(self, sequence: SequenceState) -> int | None:
        """The number of leading rows of the sequence's last step that count; None: all. After later drafts the grammar
        was too much work, so these rows have no masks; a step without drafts decides about the tokens there.
        """
        grammar = self._grammars.get(sequence.key)
        return None if grammar is None else grammar.num_rows

    def forget(self, sequence: SequenceState) -> None:
        """Drop the grammar state of `sequence`."""
        self._grammars.pop(sequence.key, None)

    def _compile(self, structure: Structure, scope: str) -> None:
        self._compiler.compile(structure, scope)

    def _step(self, sequence: SequenceState) -> _Step:
        structure = sequence.spec.sampling.structure
        assert structure is not None
        grammar = self._grammars.setdefault(sequence.key, _Grammar(structure, sequence.spec.cache_namespace))
        first_draft = sequence.num_tokens - sequence.num_drafted
        new_tokens = sequence.token_ids[sequence.num_prompt_tokens + grammar.num_consumed : first_draft]
        grammar.num_consumed += len(new_tokens)
        return _Step(grammar, new_tokens, sequence.token_ids[first_draft:])

    def _make(self, steps: list[tuple[int, _Step]]) -> Arrays:
        followed = [(row, None if step.grammar.failure else self._follow(step)) for row, step in steps]
        masks = [(row, np.frombuffer(mask, np.uint8)) for row, mask in followed if mask is not None]
        if not masks:
            return {}
        bits = np.zeros((len(masks), -(-self._vocab_size // 8)), np.uint8)
        for own, (_, mask) in zip(bits, masks, strict=True):
            own[: len(mask)] = mask[: len(own)]
        return {"masked": np.array([row for row, _ in masks], np.int64), "mask_bits": bits}

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
