"""Sampler: turns the logits of a batch into tokens and log-probs.

    arrays of the parameters   on the host, while the device still computes the logits
    penalties, masks, draws    on the device of the logits, for all rows at once; nothing is read back
    tokens and log-probs       back to the host, in one copy

Log-probs are the model's own, before penalties, bias, masks, temperature and truncation.

Random numbers are counter-based: a draw depends only on the request's seed and the token's index. So a replay, another
worker or another batch makes the same draw. Mixing as in SplitMix64 (Steele et al. 2014). The host computes them for
every device.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from engine.device_copies import DeviceCopies, NoCopies, Tensors
from engine.sampling.host_rows import rows_for
from engine.sampling.masks import TokenMasks
from engine.sampling.penalties import Penalties, apply_penalties
from engine.sampling.row_math import Drawing, Logits, RandomRows, RowMath, Summary
from engine.sequence import SequenceState
from mesh.domain.tokens import SampledToken, TokenLogprob

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class ScoredTokens(NamedTuple):
    """Log-prob of one token per row, and the row's most likely tokens, best first."""

    logprobs: list[float]
    top: list[tuple[TokenLogprob, ...]]


class Drawn(NamedTuple):
    """Sampled tokens on the device. `tensors`: tokens [rows], their log-probs [rows] and, if a sequence asks for the
    most likely tokens, their log-probs and ids [rows that ask, the largest number].
    """

    tensors: tuple[Tensor, ...]
    num_top: list[int]

    def read(self, on_host: Sequence[Tensor]) -> list[SampledToken]:
        """`on_host`: a copy of `tensors`."""
        tokens, *scores = on_host
        scored = _read_scores(scores, self.num_top)
        return [SampledToken(*fields) for fields in zip(tokens.tolist(), scored.logprobs, scored.top, strict=True)]


class Sampler:
    """Samples the next token of each sequence. Not thread-safe.

    `masks` enforce the structure of sequences that have one; call `masks.begin` before `draw`. `encoded_prompts`: see
    Penalties. `copies` and `rows` are those for the device of the logits, by default the CPU's.
    """

    def __init__(
        self,
        masks: TokenMasks | None = None,
        *,
        encoded_prompts: bool = False,
        copies: DeviceCopies | None = None,
        rows: RowMath | None = None,
    ) -> None:
        self._masks = masks
        self._penalties = Penalties(encoded_prompts=encoded_prompts)
        self._copies = copies or NoCopies()
        self._rows = rows or rows_for(torch.device("cpu"))

    def draw(self, logits: Logits, sequences: Sequence[SequenceState]) -> Drawn:
        """Draw one token per row of the logits, which are not modified. Tokens stay on the device."""
        values, vocab_size = logits.values, logits.values.shape[1]
        changes = self._penalties.arrays(sequences, vocab_size)
        drawing = self._drawing(sequences, vocab_size)
        num_top = [sequence.spec.top_logprobs for sequence in sequences]
        drawn = {} if drawing is None else drawing.arrays
        tensors = self._copies.to_device({**changes, **drawn, **_top_arrays(num_top)})
        adjusted = self._adjusted(values, {name: tensors[name] for name in changes})
        summary = logits.summary or self._rows.summarise(values)
        largest = summary.largest if adjusted is values else None
        tokens = self._choose(adjusted, largest, drawing, tensors)
        logprobs = summary.logprob if tokens is summary.largest else _logprobs(values, tokens, summary)
        return Drawn((tokens, logprobs, *self._top_scores(values, num_top, summary, tensors)), num_top)

    def _adjusted(self, logits: Tensor, changes: Tensors) -> Tensor:
        """A copy with penalties and masks, or `logits` itself if there are none.

        The structure has priority over all other parameters: where bias, minimum length and the like exclude every
        allowed token, the row is the model's own, masked.
        """
        on_host = self._masks.take() if self._masks is not None else {}
        if not changes and not on_host:
            return logits
        masks = self._copies.to_device(on_host) if on_host else {}
        adjusted = self._rows.copied(logits, masks)
        apply_penalties(adjusted, changes)
        if changes and masks:
            rows = masks["masked"]
            is_empty = adjusted[rows].amax(1) == float("-inf")
            if not adjusted.is_cpu or is_empty.any():  # elsewhere the host would wait for the answer
                plain = self._rows.copied(logits, masks)[rows]
                adjusted[rows] = torch.where(is_empty[:, None], plain, adjusted[rows])
        return adjusted

    def _drawing(self, sequences: Sequence[SequenceState], vocab_size: int) -> Drawing | None:
        """The draw of random tokens; None if all rows are greedy."""
        rows = [row for row, sequence in enumerate(sequences) if not sequence.spec.sampling.is_greedy]
        if not rows:
            return None
        params = [sequences[row].spec.sampling for row in rows]
        seeds = np.array([p.seed or 0 for p in params], np.uint64)
        indices = np.array([sequences[row].num_generated for row in rows], np.uint64)
        return self._rows.drawing(RandomRows(rows, params, uniform(seeds, indices)), vocab_size)

    def _choose(self, logits: Tensor, largest: Tensor | None, drawing: Drawing | None, tensors: Tensors) -> Tensor:
        """Tokens [rows], random or the most likely; `largest` are the most likely ones if they are known."""
        drawn = None if drawing is None else drawing.tokens(logits, tensors)
        if drawn is not None and len(drawn) == len(logits):
            return drawn
        tokens = self._rows.argmax(logits) if largest is None else largest
        return tokens if drawn is None else tokens.index_copy(0, tensors["drawing"], drawn)

    def score(self, logits: Logits, token_ids: Sequence[int], num_top: list[int]) -> ScoredTokens:
        """Log-probs of one token per row of the logits; `num_top`: number of top tokens per row."""
        values, summary = logits.values, logits.summary or self._rows.summarise(logits.values)
        tensors = self._copies.to_device({"tokens": np.array(token_ids, np.int64), **_top_arrays(num_top)})
        logprobs = _logprobs(values, tensors["tokens"], summary)
        scores = [logprobs, *self._top_scores(values, num_top, summary, tensors)]
        return _read_scores(self._copies.to_host(scores), num_top)

    def _top_scores(self, logits: Tensor, num_top: list[int], summary: Summary, tensors: Tensors) -> tuple[Tensor, ...]:
        """Log-probs and ids of the most likely tokens of rows that ask for them."""
        if "top_rows" not in tensors:
            return ()
        rows = tensors["top_rows"]
        values, ids = self._rows.top(logits, rows, min(max(num_top), logits.shape[1]))
        return values - summary.normaliser[rows, None], ids

    def forget(self, sequence: SequenceState) -> None:
        """Drop the token counts of `sequence`."""
        self._penalties.forget(sequence)


def _top_arrays(num_top: list[int]) -> dict[str, NDArray[Any]]:
    rows = [row for row, count in enumerate(num_top) if count > 0]
    return {"top_rows": np.array(rows, np.int64)} if rows else {}


def _logprobs(logits: Tensor, tokens: Tensor, summary: Summary) -> Tensor:
    return logits.gather(1, tokens[:, None])[:, 0] - summary.normaliser


def _read_scores(scores: Sequence[Tensor], num_top: list[int]) -> ScoredTokens:
    """`scores`: the log-probs of tokens, then what `Sampler._top_scores` gave, on the host."""
    top: list[tuple[TokenLogprob, ...]] = [()] * len(num_top)
    logprobs, *most_likely = scores
    if most_likely:
        values, ids = most_likely
        rows = (row for row, count in enumerate(num_top) if count > 0)
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            pairs = zip(row_ids[: num_top[row]], row_values, strict=False)
            top[row] = tuple(TokenLogprob(token, logprob) for token, logprob in pairs)
    return ScoredTokens(logprobs.tolist(), top)


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one for each pair of a request's seed and a generated token's index."""
    state = _mix(_mix(seeds + _GOLDEN) + (indices + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
