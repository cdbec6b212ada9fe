"""Penalties: logit bias, minimum length, bad words, and repetition, frequency and presence penalties.

Applied in vLLM's order: forbidden tokens, logit bias, then the penalties. The repetition penalty covers prompt and
output, the other two the output only. A prompt that an encoder reads is not covered, because the decoder's text does
not continue it. All state can be rebuilt from the token ids.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.sequence import SequenceKey, SequenceState


class TokenCounts:
    """The distinct tokens of one sequence, from position `first` on, and how often each was generated."""

    def __init__(self, sequence: SequenceState, first: int = 0) -> None:
        tokens = np.asarray(sequence.token_ids[first:], np.int64)
        ids, inverse = np.unique(tokens, return_inverse=True)
        self._size = len(ids)
        self._ids = _grown(ids)
        counts = np.bincount(inverse[sequence.num_prompt_tokens - first :], minlength=self._size)
        self._counts = _grown(counts.astype(np.int64))
        self._rows = {int(token): row for row, token in enumerate(ids)}
        self._num_seen = sequence.num_tokens

    def catch_up(self, sequence: SequenceState) -> None:
        """Count the tokens generated since the last call."""
        for token in sequence.token_ids[self._num_seen :]:
            row = self._rows.setdefault(token, self._size)
            if row == self._size:
                if row == len(self._ids):
                    self._ids, self._counts = _grown(self._ids), _grown(self._counts)
                self._ids[row] = token
                self._size += 1
            self._counts[row] += 1
        self._num_seen = sequence.num_tokens

    @property
    def ids(self) -> NDArray[np.int64]:
        """Distinct tokens of prompt and output."""
        return self._ids[: self._size]

    @property
    def counts(self) -> NDArray[np.int64]:
        """Number of times each of `ids` was generated; 0 for tokens of the prompt only."""
        return self._counts[: self._size]


class Penalties:
    """Applies bias, bans and penalties to rows of logits. Keeps token counts of sequences with penalties.

    With `encoded_prompts`, the encoder reads all of a prompt but its last token, the decoder's start token.
    """

    def __init__(self, *, encoded_prompts: bool = False) -> None:
        self._encoded_prompts = encoded_prompts
        self._counts: dict[SequenceKey, TokenCounts] = {}

    def forget(self, sequence: SequenceState) -> None:
        """Drop the token counts of `sequence`; unknown sequences are ignored."""
        self._counts.pop(sequence.key, None)

    def apply(self, logits: Tensor, sequences: Sequence[SequenceState]) -> Tensor:
        """Adjusted copy of logits [num_seqs, vocab_size], or `logits` itself if no sequence changes them."""
        changed = [row for row, sequence in enumerate(sequences) if _changes(sequence)]
        if not changed:
            return logits
        logits = logits.clone()
        _add_biases(logits, sequences, changed)
        _forbid(logits, sequences, changed)
        penalised = [row for row in changed if sequences[row].request.sampling.has_penalties]
        if penalised:
            self._penalise(logits, sequences, penalised)
        return logits

    def _penalise(self, logits: Tensor, sequences: Sequence[SequenceState], rows: list[int]) -> None:
        counted = [self._count(sequences[row]) for row in rows]
        sizes = [len(counts.ids) for counts in counted]
        params = [sequences[row].request.sampling for row in rows]
        device = logits.device

        def spread(values: list[float]) -> Tensor:
            return torch.from_numpy(np.repeat(np.asarray(values, np.float32), sizes)).to(device)

        at = (
            torch.from_numpy(np.repeat(np.asarray(rows, np.int64), sizes)).to(device),
            torch.from_numpy(np.concatenate([counts.ids for counts in counted])).to(device),
        )
        counts = torch.from_numpy(np.concatenate([c.counts for c in counted])).to(device, torch.float32)
        values = logits[at]
        repetition = spread([p.repetition_penalty for p in params])
        values = torch.where(values > 0, values / repetition, values * repetition)
        values -= counts * spread([p.frequency_penalty for p in params])
        values -= (counts > 0) * spread([p.presence_penalty for p in params])
        logits[at] = values

    def _count(self, sequence: SequenceState) -> TokenCounts:
        first = sequence.num_prompt_tokens - 1 if self._encoded_prompts else 0
        if sequence.num_drafted:  # drafts may be wrong, so their counts are not kept
            return TokenCounts(sequence, first)
        counts = self._counts.get(sequence.key)
        if counts is None:
            counts = self._counts[sequence.key] = TokenCounts(sequence, first)
        counts.catch_up(sequence)
        return counts


@dataclass(slots=True)
class _Entries:
    """Single logits to change: row, token and value of each."""

    rows: list[int]
    tokens: list[int]
    values: list[float]

    def index(self, device: torch.device) -> tuple[Tensor, Tensor]:
        return torch.tensor(self.rows, device=device), torch.tensor(self.tokens, device=device)


def _add_biases(logits: Tensor, sequences: Sequence[SequenceState], rows: list[int]) -> None:
    entries = _Entries([], [], [])
    for row in rows:
        bias = sequences[row].request.sampling.logit_bias
        entries.rows += [row] * len(bias)
        entries.tokens += bias.keys()
        entries.values += bias.values()
    if entries.rows:
        logits[entries.index(logits.device)] += torch.tensor(entries.values, device=logits.device)


def _forbid(logits: Tensor, sequences: Sequence[SequenceState], rows: list[int]) -> None:
    entries = _Entries([], [], [])
    for row in rows:
        forbidden = {token for token in _forbidden(sequences[row]) if 0 <= token < logits.shape[1]}
        entries.rows += [row] * len(forbidden)
        entries.tokens += forbidden
    if entries.rows:
        logits[entries.index(logits.device)] = float("-inf")


def _forbidden(sequence: SequenceState) -> Iterator[int]:
    """Tokens that are not allowed next: those that would end the sequence too early, or complete a bad word."""
    request = sequence.request
    if _too_short(sequence):
        yield from request.eos_token_ids
        yield from request.sampling.stop_token_ids
    for *beginning, last in request.sampling.bad_word_ids:
        first = sequence.num_tokens - len(beginning)
        if first >= sequence.num_prompt_tokens and sequence.token_ids[first:] == beginning:
            yield last


def _too_short(sequence: SequenceState) -> bool:
    minimum = sequence.request.sampling.min_new_tokens
    return minimum > 0 and sequence.num_generated < minimum


def _changes(sequence: SequenceState) -> bool:
    sampling = sequence.request.sampling
    return bool(sampling.has_penalties or sampling.logit_bias or sampling.bad_word_ids or _too_short(sequence))


def _grown(values: NDArray[np.int64]) -> NDArray[np.int64]:
    return np.concatenate([values, np.zeros(max(64, len(values)), np.int64)])
