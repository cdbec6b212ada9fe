"""ChannelScan: Mamba 1 (Mamba: Linear-Time Sequence Modeling, Gu and Dao 2023) behind a short convolution, as in Jamba.

Each channel has a column s of the state [key_dim, channels], rates a [key_dim] < 0 and a skip d. All channels share the
key k and the query q of a token; each has a value v and a step t (the paper's A, D, B, C, x and delta). A token makes

    s <- exp(t a) s + (t v) k;  its result is s q + d v

Steps, keys and queries follow from the convolved values by two small matrices, which are never quantised: their errors
would add up in the state.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.machine import LOG2_E
from engine.kernels.cpu.recurrent.recurrent_arguments import RecurrentWeights
from engine.models.encodings import Parameters
from engine.models.norms import rms_norm
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.for_kernels import NO_NUMBERS, in_panels
from engine.models.recurrent.short_conv import CausalConv, split_states

CHUNK = 64
"""Tokens whose decays are computed at once."""


class ChannelScan:
    """Rows are [values, gate of the result]; the values pass the convolution."""

    def __init__(self, parameters: Parameters, prefix: str, facts: RecurrentConfig) -> None:
        self._facts = facts
        self._conv = CausalConv(parameters, prefix, facts)
        self._rates = -parameters.take(f"{prefix}decay_log").to(torch.float32).exp().T.contiguous()
        self._step_bias = parameters.take(f"{prefix}decay_bias").to(torch.float32)
        self._skip = parameters.take(f"{prefix}skip").to(torch.float32)
        self._inner = parameters.take(f"{prefix}inner")
        self._steps = parameters.take(f"{prefix}steps")
        names = ("step_norm", "key_norm", "query_norm")
        self._norms = [parameters.take_optional(f"{prefix}{name}") for name in names]

    def for_kernels(self) -> RecurrentWeights:
        rates, bias, skip = in_panels(self._rates.T * LOG2_E), self._step_bias.numpy(), self._skip.numpy()
        values, steps, norms = in_panels(self._inner), self._steps.to(torch.float32), NO_NUMBERS
        of_steps, of_keys, of_queries = self._norms
        if of_steps is not None and of_keys is not None and of_queries is not None:
            steps = steps * of_steps
            norms = torch.cat((of_keys, of_queries)).to(torch.float32).numpy()[None]
        taps, biases = self._conv.for_kernels()
        return RecurrentWeights(taps, biases, rates, bias[None], skip[None], norms, values, in_panels(steps))

    def step(self, rows: Tensor, states: Tensor) -> Tensor:
        conv_states, columns = split_states(states, self._facts)
        values, gate = rows.to(torch.float32).chunk(2, 1)
        values = F.silu(self._conv.step(values, conv_states))
        steps, keys, queries = self._project(values)
        state = columns[:, 0]
        state.mul_((self._rates * steps[:, None]).exp()).addcmul_(keys[:, :, None], (steps * values)[:, None])
        out = (queries[:, None] @ state)[:, 0]
        return out.addcmul_(self._skip, values) * F.silu(gate)

    def scan(self, rows: Tensor, state: Tensor) -> Tensor:
        conv_states, columns = split_states(state[None], self._facts)
        values, gate = rows.to(torch.float32).chunk(2, 1)
        values = F.silu(self._conv.scan(values, conv_states[0]))
        steps, keys, queries = self._project(values)
        out, current = self._skip * values, columns[0, 0]
        for first in range(0, len(rows), CHUNK):
            chunk = slice(first, first + CHUNK)
            decays = (self._rates * steps[chunk, None]).exp()
            added = keys[chunk, :, None] * (steps[chunk] * values[chunk])[:, None]
            for result, query, decay, more in zip(out[chunk], queries[chunk], decays, added, strict=True):
                current.mul_(decay).add_(more)
                result += query @ current
        return out * F.silu(gate)

    def _project(self, values: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps [num_tokens, channels], keys and queries [num_tokens, key_dim]."""
        rank, key_dim = self._facts.channel_scan.step_rank, self._facts.key_dim
        parts = torch.split(F.linear(values.to(self._inner.dtype), self._inner), [rank, key_dim, key_dim], 1)
        steps, keys, queries = (self._normed(part, norm) for part, norm in zip(parts, self._norms, strict=True))
        steps = F.softplus(F.linear(steps, self._steps).to(torch.float32) + self._step_bias)
        return steps, keys.to(torch.float32), queries.to(torch.float32)

    def _normed(self, part: Tensor, weight: Tensor | None) -> Tensor:
        return part if weight is None else rms_norm(part, weight, self._facts.channel_scan.norm_eps)
