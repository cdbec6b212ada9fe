"""Sampler: turns the logits of a batch into tokens and log-probs.

Log-probs are the model's own, before penalties, bias, masks, temperature and truncation.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from engine.masks import TokenMasks
from engine.penalties import Penalties
from engine.random_draws import uniform
from engine.selection import argmax, summarise, take_rows
from engine.sequence import SequenceState
from engine.truncation import Truncation
from mesh.domain.request import SamplingParams
from mesh.domain.tokens import SampledToken, TokenLogprob

_DRAW_BLOCK = 256


class ScoredTokens(NamedTuple):
    """Log-prob of one token per row, and the row's most likely tokens, best first."""

    logprobs: list[float]
    top: list[tuple[TokenLogprob, ...]]


class Sampler:
    """Samples the next token of each sequence. Not thread-safe.

    `masks` enforce the structure of sequences that have one; call `masks.begin` before `sample`. `encoded_prompts`: see
    Penalties.
    """

    def __init__(self, masks: TokenMasks | None = None, *, encoded_prompts: bool = False) -> None:
        self._masks = masks
        self._penalties = Penalties(encoded_prompts=encoded_prompts)

    def sample(self, logits: Tensor, sequences: Sequence[SequenceState]) -> list[SampledToken]:
        """One token per row of fp32 logits [num_seqs, vocab_size], which are not modified."""
        adjusted = self._penalties.apply(logits, sequences)
        if self._masks is not None:
            adjusted = self._masks.apply(logits, adjusted)
        summary = summarise(logits)
        tokens = _choose(adjusted, sequences, summary.largest if adjusted is logits else None)
        scored = _score(logits, tokens, [sequence.request.top_logprobs for sequence in sequences], summary.normaliser)
        return [SampledToken(*fields) for fields in zip(tokens.tolist(), scored.logprobs, scored.top, strict=True)]

    def forget(self, sequence: SequenceState) -> None:
        """Drop the token counts of `sequence`."""
        self._penalties.forget(sequence)


def score(logits: Tensor, tokens: Tensor, num_top: list[int]) -> ScoredTokens:
    """Log-probs of `tokens` [rows] under logits [rows, vocab_size]; `num_top`: number of top tokens per row."""
    return _score(logits, tokens, num_top, summarise(logits).normaliser)


def _score(logits: Tensor, tokens: Tensor, num_top: list[int], normaliser: Tensor) -> ScoredTokens:
    logprobs = (logits.gather(1, tokens[:, None])[:, 0] - normaliser).tolist()
    top: list[tuple[TokenLogprob, ...]] = [()] * len(num_top)
    rows = [row for row, count in enumerate(num_top) if count > 0]
    if rows:
        largest = min(max(num_top), logits.shape[1])
        values, ids = take_rows(logits, rows).topk(largest, dim=1)
        values -= normaliser[rows, None]
        for row, row_ids, row_values in zip(rows, ids.tolist(), values.tolist(), strict=True):
            pairs = zip(row_ids[: num_top[row]], row_values, strict=False)
            top[row] = tuple(TokenLogprob(token, logprob) for token, logprob in pairs)
    return ScoredTokens(logprobs, top)


def _choose(logits: Tensor, sequences: Sequence[SequenceState], largest: Tensor | None) -> Tensor:
    """Greedy or random token of each row; `largest` is the argmax per row if it is known."""
    drawing = [row for row, sequence in enumerate(sequences) if not sequence.request.sampling.is_greedy]
    drawn = _draw(take_rows(logits, drawing), [sequences[row] for row in drawing]) if drawing else None
    if drawn is not None and len(drawing) == len(sequences):
        return drawn
    tokens = argmax(logits) if largest is None else largest
    if drawn is not None:
        tokens[drawing] = drawn
    return tokens


def _draw(logits: Tensor, sequences: list[SequenceState]) -> Tensor:
    """Random tokens [rows]; each row depends on its own sequence only."""
    params = [sequence.request.sampling for sequence in sequences]
    scaled = logits / torch.tensor([p.temperature for p in params], device=logits.device)[:, None]
    keep_mask = _truncation(params).keep_mask(scaled)
    highest = scaled.amax(1, keepdim=True)
    weights = scaled.sub_(highest).exp_()
    if keep_mask is not None:
        weights *= keep_mask
    seeds = np.array([p.seed or 0 for p in params], np.uint64)
    indices = np.array([sequence.num_generated for sequence in sequences], np.uint64)
    return inverse_cdf(weights, torch.from_numpy(uniform(seeds, indices)).to(logits.device))


def _truncation(params: list[SamplingParams]) -> Truncation:
    return Truncation(
        top_k=[p.top_k for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        typical_p=[p.typical_p for p in params],
    )


def inverse_cdf(weights: Tensor, uniforms: Tensor) -> Tensor:
    """Inverse transform sampling: per row, the first token at which the cumulative weight exceeds uniform * total.

    weights: [rows, vocab_size], not normalised; uniforms: [rows] float64. Sums of blocks are searched first, then a
    single block, which avoids a cumulative sum over the vocabulary.
    """
    num_rows, vocab_size = weights.shape
    blocks = pad(weights, (0, -vocab_size % _DRAW_BLOCK)).view(num_rows, -1, _DRAW_BLOCK)
    cumulative = blocks.sum(2).cumsum(1, dtype=torch.float64)  # [rows, num_blocks]
    target = uniforms[:, None] * cumulative[:, -1:]
    block = _first_above(cumulative, target)
    before = torch.where(block > 0, cumulative.gather(1, (block - 1).clamp(min=0)), 0.0)
    chosen = blocks[torch.arange(num_rows, device=weights.device), block[:, 0]]  # [rows, _DRAW_BLOCK]
    within = _first_above(chosen.to(torch.float64).cumsum(1), target - before)
    return (block * _DRAW_BLOCK + within)[:, 0]


def _first_above(cumulative: Tensor, target: Tensor) -> Tensor:
    """Index [rows, 1] of the first value above the target, or of the last increase if rounding left no value above."""
    first = (cumulative <= target).sum(1, keepdim=True)
    last = cumulative.argmax(1, keepdim=True)  # the first of equal maxima
    return torch.minimum(first, last)
