"""Penalties: logit bias, minimum length, bad words, and repetition, frequency and presence penalties.

The result is that of vLLM's order: forbidden tokens, logit bias, then the penalties; a forbidden token has the logit
-inf whatever its bias. The repetition penalty covers prompt and output, the other two the output only. A prompt that an
encoder reads is not covered, because the decoder's text does not continue it. All state can be rebuilt from the token
ids.

    Penalties.arrays   on the host, from the sequences: which logits change, and by how much
    apply_penalties    on the device of the logits
"""

from collections.abc import Iterator, Sequence
from copy import copy
from itertools import chain
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_copies import Arrays, Tensors
from engine.sequence import SequenceState
from mesh.domain.tokens import SequenceKey

# Beyond what models compute. Tiny penalties would make infinity of logits, and a temperature NaN of that.
_LARGEST = 1e30


class TokenCounts:
    """The distinct tokens of one sequence, from position `first` on, and how often each was generated."""

    def __init__(self, sequence: SequenceState, first: int) -> None:
        tokens = np.asarray(sequence.token_ids[first:], np.int64)
        ids, inverse = np.unique(tokens, return_inverse=True)
        self._size = len(ids)
        self._ids = _grown(ids)
        counts = np.bincount(inverse[sequence.num_prompt_tokens - first :], minlength=self._size)
        self._counts = _grown(counts.astype(np.int64))
        self._rows = {int(token): row for row, token in enumerate(ids)}
        self.num_seen = sequence.num_tokens
        """Tokens of the sequence that are counted, or precede `first`."""

    def catch_up(self, sequence: SequenceState) -> None:
        """Count the tokens generated since the last call."""
        for token in sequence.token_ids[self.num_seen :]:
            row = self._rows.setdefault(token, self._size)
            if row == self._size:
                if row == len(self._ids):
                    self._ids, self._counts = _grown(self._ids), _grown(self._counts)
                self._ids[row] = token
                self._size += 1
            self._counts[row] += 1
        self.num_seen = sequence.num_tokens

    def with_drafts(self, drafted: SequenceState) -> "TokenCounts":
        """A copy that also counts the drafts, which may be wrong. A long prompt is not counted again for each draft."""
        counts = copy(self)
        counts._ids, counts._counts, counts._rows = self._ids.copy(), self._counts.copy(), self._rows.copy()
        counts.catch_up(drafted)
        return counts

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and output."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of times each of `ids` was generated; 0 for tokens of the prompt only."""
        return self._counts[: self._size]


class Penalties:
    """Bias, bans and penalties for rows of logits. Keeps token counts of sequences with penalties.

    With `encoded_prompts`, the encoder reads all of a prompt but its last token, the decoder's start token.
    """

    def __init__(self, *, encoded_prompts: bool = False) -> None:
        self._encoded_prompts = encoded_prompts
        self._counts: dict[SequenceKey, TokenCounts] = {}

    def forget(self, sequence: SequenceState) -> None:
        """Drop the token counts of `sequence`; unknown sequences are ignored."""
        self._counts.pop(sequence.key, None)

    def arrays(self, sequences: Sequence[SequenceState], vocab_size: int) -> Arrays:
        """The changes of one step to rows of logits, for `apply_penalties`; empty if no sequence has any."""
        return _biases(sequences) | _forbidden_entries(sequences, vocab_size) | self._penalised(sequences)

    def _penalised(self, sequences: Sequence[SequenceState]) -> dict[str, NDArray[Any]]:
        rows = [row for row, sequence in enumerate(sequences) if sequence.spec.sampling.has_penalties]
        if not rows:
            return {}
        counted = [self._count(sequences[row]) for row in rows]
        sizes = [len(counts.ids) for counts in counted]
        params = [sequences[row].spec.sampling for row in rows]

        def spread(values: list[float]) -> NDArray[np.float32]:
            return np.repeat(np.asarray(values, np.float32), sizes)

        return {
            "counted_rows": np.repeat(np.asarray(rows, np.int64), sizes),
            "counted_tokens": np.concatenate([counts.ids for counts in counted]),
            "counts": np.concatenate([counts.counts for counts in counted]).astype(np.float32),
            "repetition": spread([p.repetition_penalty for p in params]),
            "frequency": spread([p.frequency_penalty for p in params]),
            "presence": spread([p.presence_penalty for p in params]),
        }

    def _count(self, sequence: SequenceState) -> TokenCounts:
        first = sequence.num_prompt_tokens - 1 if self._encoded_prompts else 0
        counts = self._counts.get(sequence.key)
        if sequence.num_drafted:
            if counts is None or counts.num_seen != sequence.num_tokens - sequence.num_drafted:
                return TokenCounts(sequence, first)
            return counts.with_drafts(sequence)
        if counts is None:
            counts = self._counts[sequence.key] = TokenCounts(sequence, first)
        counts.catch_up(sequence)
        return counts


def apply_penalties(logits: Tensor, changes: Tensors) -> None:
    """Adjust logits [num_seqs, vocab_size] in place. `changes`: what Penalties.arrays gave, on their device."""
    if "biases" in changes:
        logits[changes["bias_rows"], changes["bias_tokens"]] += changes["biases"]
    if "forbidden_rows" in changes:
        logits[changes["forbidden_rows"], changes["forbidden_tokens"]] = float("-inf")
    if "counts" in changes:
        _penalise(logits, changes)


def _penalise(logits: Tensor, changes: Tensors) -> None:
    at, counts, repetition = (
        (changes["counted_rows"], changes["counted_tokens"]),
        changes["counts"],
        changes["repetition"],
    )
    values = logits[at]
    values = torch.where(values > 0, (values / repetition).clamp_(max=_LARGEST), values * repetition)
    values -= counts * changes["frequency"]
    values -= (counts > 0) * changes["presence"]
    logits[at] = values


def _biases(sequences: Sequence[SequenceState]) -> dict[str, NDArray[Any]]:
    rows = [row for row, sequence in enumerate(sequences) if sequence.spec.sampling.logit_bias]
    if not rows:
        return {}
    biases = [sequences[row].spec.sampling.logit_bias for row in rows]
    sizes = [len(bias) for bias in biases]
    # Without a Python object for each entry: a batch may have 100,000 of them.
    return {
        "bias_rows": np.repeat(np.asarray(rows, np.int64), sizes),
        "bias_tokens": np.fromiter(chain.from_iterable(biases), np.int64, sum(sizes)),
        "biases": np.fromiter(chain.from_iterable(bias.values() for bias in biases), np.float32, sum(sizes)),
    }


def _forbidden_entries(sequences: Sequence[SequenceState], vocab_size: int) -> dict[str, NDArray[Any]]:
    forbidden = {
        (row, token)
        for row, sequence in enumerate(sequences)
        for token in _forbidden(sequence)
        if 0 <= token < vocab_size
    }
    if not forbidden:
        return {}
    rows, tokens = zip(*forbidden, strict=True)
    return {"forbidden_rows": np.array(rows, np.int64), "forbidden_tokens": np.array(tokens, np.int64)}


def _forbidden(sequence: SequenceState) -> Iterator[int]:
    """Tokens that are not allowed next: those that would end the sequence too early, or complete a bad word."""
    spec = sequence.spec
    minimum = spec.sampling.min_new_tokens
    if minimum and sequence.num_generated < minimum:
        yield from spec.eos_token_ids
        yield from spec.sampling.stop_token_ids
    for *beginning, last in spec.sampling.bad_word_ids:
        first = sequence.num_tokens - len(beginning)
        if first >= sequence.num_prompt_tokens and sequence.token_ids[first:] == beginning:
            yield last


def _grown(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([values, np.zeros(max(64, len(values)), np.int64)])
