"""SelectiveScan: Mamba 2 (Transformers are SSMs, Dao and Gu 2024) behind a short convolution.

Each head has a matrix S [key_dim, value_dim], a rate a < 0 and a skip d. A token with key k, query q, value v and step
t (the paper's A, D, B, C, x and delta) makes

    S <- exp(t a) S + k (t v)^T;  its result is S^T q + d v

Chunks of prompts do so for many tokens at once (section 6 of the paper): within a chunk by scores of all pairs of
tokens, as attention has them, and through S for those before it.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.kernels.cpu.recurrent.recurrent_arguments import RecurrentWeights
from engine.models.encodings import Parameters
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.for_kernels import NO_NUMBERS
from engine.models.recurrent.short_conv import CausalConv, split_states

_CHUNK = 64
"""Tokens of which all pairs are scored."""


class SelectiveScan:
    """Rows are [gate of the result, values, keys, queries, steps]; the middle three pass the convolution."""

    def __init__(self, parameters: Parameters, prefix: str, facts: RecurrentConfig, norm_eps: float) -> None:
        self._facts = facts
        self._eps = norm_eps
        self._gate_factor, *of_channels, self._step_factor = facts.scan.factors
        widths = (facts.value_width, facts.key_width, facts.key_width)
        factors = [torch.full((width,), factor) for width, factor in zip(widths, of_channels, strict=True)]
        self._conv = CausalConv(parameters, prefix, facts, torch.cat(factors))
        self._rate = -parameters.take(f"{prefix}decay_log").to(torch.float32).exp()
        self._step_bias = parameters.take(f"{prefix}decay_bias").to(torch.float32)
        self._skip = parameters.take(f"{prefix}skip").to(torch.float32)
        norm = parameters.take_optional(f"{prefix}recurrent_norm")
        self._norm = None if norm is None else norm.to(torch.float32)

    def for_kernels(self) -> RecurrentWeights:
        rate, bias, skip = (values.numpy()[None] for values in (self._rate, self._step_bias, self._skip))
        norm = NO_NUMBERS if self._norm is None else self._norm.numpy()[None]
        return RecurrentWeights(*self._conv.for_kernels(), rate, bias, skip, norm, NO_NUMBERS, NO_NUMBERS)

    def step(self, rows: Tensor, states: Tensor) -> Tensor:
        conv_states, matrices = split_states(states, self._facts)
        gate, mixed, steps = self._parts(rows)
        v, k, q = self._heads(self._conv.step(mixed, conv_states))
        copies = self._facts.num_heads // self._facts.num_key_heads
        k, q = (heads.repeat_interleave(copies, 1)[..., None] for heads in (k, q))
        matrices.mul_((self._rate * steps).exp()[..., None, None])
        matrices.addcmul_(k, (v * steps[..., None])[:, :, None])
        return self._gated((matrices * q).sum(2) + self._skip[:, None] * v, gate)

    def scan(self, rows: Tensor, state: Tensor) -> Tensor:
        conv_states, matrices = split_states(state[None], self._facts)
        gate, mixed, steps = self._parts(rows)
        v, k, q = self._heads(self._conv.scan(mixed, conv_states[0]))
        decays, out = self._rate * steps, self._skip[:, None] * v
        grouped = torch.unflatten(matrices[0], 0, (self._facts.num_key_heads, -1))
        for first in range(0, len(rows), _CHUNK):
            chunk = slice(first, first + _CHUNK)
            out[chunk] += _scan_chunk(v[chunk] * steps[chunk, :, None], k[chunk], q[chunk], decays[chunk], grouped)
        return self._gated(out, gate)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The gate, inputs of the convolution, and steps [num_tokens, heads]."""
        facts, rows = self._facts, rows.to(torch.float32)
        gate, mixed, steps = torch.split(rows, [facts.value_width, facts.channels, facts.num_heads], 1)
        steps = F.softplus(steps * self._step_factor + self._step_bias).clamp(*facts.scan.step_limits)
        return gate * self._gate_factor, mixed, steps

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Values [num_tokens, heads, value_dim]; keys and queries [.., key_heads, key_dim]."""
        facts = self._facts
        v, k, q = torch.split(F.silu(mixed), [facts.value_width, facts.key_width, facts.key_width], 1)
        k, q = (rows.view(len(rows), -1, facts.key_dim) for rows in (k, q))
        return v.view(len(v), -1, facts.value_dim), k, q

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        """[num_tokens, heads, value_dim] -> [num_tokens, value_width]."""
        out, gate = out.flatten(1), F.silu(gate)
        if self._norm is None:
            return out * gate
        gate_first = self._facts.scan.norm == "gated"
        grouped = torch.unflatten(out * gate if gate_first else out, 1, (self._facts.num_key_heads, -1))
        scale = torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self._eps)
        normed = (grouped * scale).flatten(1) * self._norm
        return normed if gate_first else normed * gate


def _scan_chunk(v: Tensor, k: Tensor, q: Tensor, decays: Tensor, matrices: Tensor) -> Tensor:
    """The rule for a few tokens: v times their steps [num_tokens, heads, value_dim], k, q [num_tokens, key_heads,
    key_dim], logs of decays [num_tokens, heads]; matrices [key_heads, heads of each, key_dim, value_dim] are updated.
    -> [num_tokens, heads, value_dim]. Sums of logs are in fp64, because only their differences count.
    """
    count, groups = len(v), matrices.shape[:2]
    total = decays.to(torch.float64).cumsum(0).T.reshape(*groups, count)
    earlier = torch.ones((count, count), dtype=torch.bool, device=v.device).tril()
    between = (total[..., :, None] - total[..., None, :]).to(torch.float32).masked_fill(~earlier, float("-inf")).exp()
    since, until = (logs.exp().to(torch.float32)[..., None] for logs in (total, total[..., -1:] - total))
    v = v.transpose(0, 1).reshape(*groups, count, -1)
    k, q = k.permute(1, 2, 0)[:, None], q.transpose(0, 1)[:, None]
    out = (q @ k * between) @ v + (q @ matrices) * since
    matrices.mul_(since[..., -1:, :]).add_(k @ (v * until))
    return out.flatten(0, 1).transpose(0, 1)
