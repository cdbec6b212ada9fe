"""Sampler: turns the logits of a batch into tokens and log-probs.

Log-probs are the model's own, before penalties, bias, masks, temperature and truncation.

Truncation is top-k, top-p and min-p as one threshold per row, then typical-p. The order is that of transformers: top-k;
top-p over the tokens that top-k kept; min-p; typical-p over the tokens that these kept. Tokens tied with the last kept
token are kept, too, so the result does not depend on how a sort breaks ties. On CPU, rows are sorted and searched with
numpy, 2 to 20 times as fast as torch.

Random numbers are counter-based: a draw depends only on the request's seed and the token's index. So a replay, another
worker or another batch makes the same draw. Mixing as in SplitMix64 (Steele et al. 2014).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad

from engine.kernels.cpu import row_kernels
from engine.kernels.cpu.machine import why_no_loops
from engine.masks import TokenMasks
from engine.penalties import Penalties
from engine.sequence import SequenceState
from mesh.domain.request import SamplingParams
from mesh.domain.tokens import SampledToken, TokenLogprob

_DRAW_BLOCK = 256
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


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


def _truncation(params: list[SamplingParams]) -> "Truncation":
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


@dataclass(frozen=True, slots=True)
class Truncation:
    """Limits per row, on the host. Off: top_k 0, top_p 1, min_p 0, typical_p 1."""

    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    typical_p: list[float]

    def keep_mask(self, logits: Tensor) -> Tensor | None:
        """1 for tokens to keep, 0 for others, in the shape of `logits`; None if all tokens are kept.

        The logits are already divided by the temperature.
        """
        low = self.thresholds(logits)
        mask = None if low is None else torch.ge(logits, low[:, None], out=torch.empty_like(logits))
        if any(p < 1.0 for p in self.typical_p):
            mask = torch.ones_like(logits) if mask is None else mask
            _keep_typical(mask, logits, self.typical_p)
        return mask

    def thresholds(self, logits: Tensor) -> Tensor | None:
        """Lowest logit [num_rows] that top-k, top-p and min-p keep; None if they keep all tokens."""
        vocab_size = logits.shape[1]
        limits = [k if 0 < k < vocab_size else vocab_size for k in self.top_k]
        by_k = any(k < vocab_size for k in limits)
        by_p = any(p < 1.0 for p in self.top_p)
        by_min = any(p > 0.0 for p in self.min_p)
        if not (by_k or by_p or by_min):
            return None
        low = torch.full(logits.shape[:1], float("-inf"), device=logits.device)
        if by_k:
            _raise_to_top_k(low, logits, limits)
        if by_p:
            _raise_to_top_p(low, logits, self.top_p)
        if by_min:
            minimum = torch.tensor(self.min_p, device=logits.device)
            low = torch.maximum(low, logits.amax(1) + minimum.log())  # log(0) = -inf: off
        return low


def _raise_to_top_k(low: Tensor, logits: Tensor, limits: list[int]) -> None:
    """Set each limited row's threshold to its k-th largest logit."""
    rows = [row for row, k in enumerate(limits) if k < logits.shape[1]]
    low[rows] = kth_largest(take_rows(logits, rows), [limits[row] for row in rows])


def _raise_to_top_p(low: Tensor, logits: Tensor, top_p: list[float]) -> None:
    """Raise each limited row's threshold to the logit at which the kept probability first reaches top_p."""
    rows = [row for row, p in enumerate(top_p) if p < 1.0]
    limits = torch.tensor([top_p[row] for row in rows], device=logits.device, dtype=torch.float64)
    ordered = descending(take_rows(logits, rows))
    weights = (ordered - ordered[:, :1]).exp_()
    weights *= ordered >= low[rows, None]
    mass = weights.cumsum(1, dtype=torch.float64)
    # Rounding may leave no column that reaches the total mass; then the last column is used.
    reached = (mass < limits[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    low[rows] = torch.maximum(low[rows], ordered.gather(1, reached)[:, 0])


def _keep_typical(mask: Tensor, logits: Tensor, typical_p: list[float]) -> None:
    """Keep, in each limited row, the tokens whose information is closest to the row's entropy, until their probability
    reaches typical_p (locally typical sampling, Meister et al. 2023).
    """
    rows = [row for row, p in enumerate(typical_p) if p < 1.0]
    limits = torch.tensor([typical_p[row] for row in rows], device=logits.device, dtype=torch.float64)
    logprobs = take_rows(logits, rows).masked_fill(take_rows(mask, rows) == 0, float("-inf")).log_softmax(1)
    weights = logprobs.exp()
    entropy = -(weights * logprobs).nansum(1, keepdim=True)  # removed tokens give 0 * -inf = NaN
    distance = (logprobs + entropy).abs_()
    ordered, order = distance.sort(1)
    mass = weights.gather(1, order).cumsum(1, dtype=torch.float64)
    reached = (mass < limits[:, None] * mass[:, -1:]).sum(1, keepdim=True).clamp_(max=logits.shape[1] - 1)
    mask[rows] *= distance <= ordered.gather(1, reached)


def take_rows(values: Tensor, rows: list[int]) -> Tensor:
    """The selected `rows`, which are distinct and ascending. If these are all rows, the result is `values` itself, so
    it must not be modified in place.
    """
    if len(rows) == values.shape[0]:
        return values
    return values.index_select(0, torch.tensor(rows, device=values.device))


def argmax(values: Tensor) -> Tensor:
    """Column of each row's largest value: [rows] int64, on the device of `values`."""
    if values.is_cpu:
        return torch.from_numpy(values.numpy().argmax(1))
    return values.argmax(1)


class Summary(NamedTuple):
    """Per row: the column of the largest value (the first one if several are equal), and log(sum(exp(row)))."""

    largest: Tensor  # [rows] int64
    normaliser: Tensor  # [rows] fp32


def summarise(values: Tensor) -> Summary:
    """Summary of fp32 values [rows, columns], by a compiled loop where the CPU allows it."""
    if values.is_cpu and values.stride(1) == 1 and why_no_loops() is None:
        largest, normalisers = row_kernels.summarise(values.numpy())
        return Summary(torch.from_numpy(largest), torch.from_numpy(normalisers))
    return Summary(argmax(values), values.logsumexp(1))


def descending(values: Tensor) -> Tensor:
    """Each row sorted, largest first."""
    if values.is_cpu:
        return torch.from_numpy(-np.sort(-values.numpy(), axis=1))
    return values.sort(1, descending=True).values


def kth_largest(values: Tensor, ks: list[int]) -> Tensor:
    """The ks[row]-th largest value of each row (1 is the largest): [rows]."""
    if values.is_cpu:
        columns = [values.shape[1] - k for k in ks]
        parted = np.partition(values.numpy(), sorted(set(columns)), axis=1)
        return torch.from_numpy(parted[np.arange(len(ks)), columns])
    largest = values.topk(max(ks), dim=1).values
    return largest.gather(1, torch.tensor(ks, device=values.device)[:, None] - 1)[:, 0]


def uniform(seeds: NDArray[np.uint64], indices: NDArray[np.uint64]) -> NDArray[np.float64]:
    """Uniform numbers in [0, 1), one for each pair of a request's seed and a generated token's index."""
    state = _mix(_mix(seeds + _GOLDEN) + (indices + np.uint64(1)) * _GOLDEN)
    return (state >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(state: NDArray[np.uint64]) -> NDArray[np.uint64]:
    state = (state ^ (state >> np.uint64(30))) * _MIX_1
    state = (state ^ (state >> np.uint64(27))) * _MIX_2
    return state ^ (state >> np.uint64(31))
