"""How far a quantised model is from its original, by the next-token distributions of both on held-out prompts."""

import math
import sys
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.finite import is_finite
from mesh.domain.errors import ConfigurationError

_MAX_EXPONENT = math.log(sys.float_info.max)


@dataclass(frozen=True, slots=True)
class Quality:
    """Means over the tokens of all prompts. `top1_agreement`: share of places where both find the same token most
    probable. `mean_kl`: Kullback-Leibler divergence from the original, in nats. `logprob_difference`: absolute, of the
    prompts' own tokens. Both perplexities are of these tokens, too; one of the quantised model that no float holds is
    the largest float.
    """

    num_prompts: int
    num_tokens: int
    top1_agreement: float
    mean_kl: float
    logprob_difference: float
    base_perplexity: float
    perplexity: float


class QualityMeter:
    """Sums up differences of logits."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sums = torch.zeros(5, dtype=torch.float64)

    def add(self, following: Tensor, base: Tensor, quantized: Tensor) -> None:
        """Count some places by the tokens that follow them [places], and the logits of both models [places,
        vocab_size].
        """
        original, rounded = base.log_softmax(1), quantized.log_softmax(1)
        original_own, rounded_own = original.gather(1, following[:, None]), rounded.gather(1, following[:, None])
        sums = (
            (rounded.argmax(1) == original.argmax(1)).sum(),
            (original.exp() * (original - rounded)).sum(),
            (rounded_own - original_own).abs().sum(),
            original_own.sum(),
            rounded_own.sum(),
        )
        self._sums += torch.stack([value.double() for value in sums])
        self._num_tokens += len(following)

    def quality(self, num_prompts: int) -> Quality:
        """The means of at least one place. Raises ConfigurationError if logits were NaN or infinite, or if the original
        expects the prompts so little that no float holds its perplexity.
        """
        agreement, kl, difference, base, quantized = (self._sums / self._num_tokens).tolist()
        if not -base <= _MAX_EXPONENT:
            what = f"give their tokens e^{base:.0f} on average" if math.isfinite(base) else "are NaN or infinite"
            raise ConfigurationError(
                f"the original model cannot be compared with: its logits of the held-out prompts {what}: check that it "
                "answers them, or use other prompts"
            )
        if not is_finite(self._sums):
            raise ConfigurationError(
                "the quantised model's logits of the held-out prompts are NaN or infinite, the original's are not: use "
                "another scheme"
            )
        perplexity = math.exp(min(-quantized, _MAX_EXPONENT))
        return Quality(num_prompts, self._num_tokens, agreement, kl, difference, math.exp(-base), perplexity)
