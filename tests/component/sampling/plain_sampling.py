"""Sampling written the slow, obvious way, one sequence and one token at a time; and the engine's sampler, read back."""

import math
from collections import Counter
from collections.abc import Sequence

import torch
from torch import Tensor

from engine.sampling.row_math import Logits
from engine.sampling.sampler import Sampler
from engine.sequence import SequenceState
from mesh.domain.tokens import SampledToken


def adjusted(logits: Tensor, sequence: SequenceState) -> Tensor:
    """One row of logits after minimum length, bad words, bias and penalties."""
    spec, row = sequence.spec, logits.clone()
    sampling = spec.sampling
    if sequence.num_generated < sampling.min_new_tokens:
        for token in {*spec.eos_token_ids, *sampling.stop_token_ids}:
            row[token] = -math.inf
    for token, bias in sampling.logit_bias.items():
        row[token] += bias
    output = sequence.token_ids[sequence.num_prompt_tokens :]
    for word in sampling.bad_word_ids:
        if [*output, word[-1]][-len(word) :] == list(word):
            row[word[-1]] = -math.inf
    generated = Counter(output)
    for token in set(sequence.token_ids):
        penalty = sampling.repetition_penalty
        row[token] = row[token] / penalty if row[token] > 0 else row[token] * penalty
        row[token] -= generated[token] * sampling.frequency_penalty
        row[token] -= (generated[token] > 0) * sampling.presence_penalty
    return row


def distribution(logits: Tensor, sequence: SequenceState) -> Tensor:
    """Probabilities of one row after everything: float64 [vocab_size]."""
    sampling = sequence.spec.sampling
    row = adjusted(logits, sequence).double() / sampling.temperature
    if sampling.top_k:
        row[row < row.sort(descending=True).values[min(sampling.top_k, len(row)) - 1]] = -math.inf
    probabilities, order = row.softmax(0).sort(descending=True)
    before = probabilities.cumsum(0) - probabilities
    row[order[before >= sampling.top_p]] = -math.inf
    probabilities = row.softmax(0)
    probabilities[probabilities < sampling.min_p * probabilities.max()] = 0.0
    return _typical(probabilities / probabilities.sum(), sampling.typical_p)


def _typical(probabilities: Tensor, mass: float) -> Tensor:
    """Tokens in the order of how far their information is from the entropy, until they have the mass."""
    information = -probabilities.log()
    entropy = (probabilities * information).nansum()
    kept, total = torch.zeros_like(probabilities), 0.0
    for token in (information - entropy).abs().argsort().tolist():
        if mass < 1.0 and total >= mass:
            break
        kept[token] = probabilities[token]
        total += float(probabilities[token])
    return kept / kept.sum()


def sample(sampler: Sampler, logits: Tensor, sequences: Sequence[SequenceState]) -> list[SampledToken]:
    """One token per row of the logits, read back."""
    drawn = sampler.draw(Logits(logits), sequences)
    return drawn.read(sampler._copies.to_host(drawn.tensors))
