"""GatedDelta: the gated delta rule (Gated Delta Networks, Yang et al. 2024) behind a short convolution, as in Qwen 3.5.

Each head has a matrix S [key_dim, value_dim]. A token with key k, query q, value v, decay a and strength b makes

    S <- a S;  S <- S + k (b (v - S^T k))^T;  its result is S^T q

Chunks of prompts do so for many tokens at once: the changes of S within a chunk solve a triangular system (section 3.3
of the paper), whose matrix depends on keys only.
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
"""Tokens of one triangular system."""
_LENGTH_EPS = 1e-6


class GatedDelta:
    """Rows are [queries, keys, values, gate of the result, strengths, decays]; the first three pass the convolution."""

    def __init__(self, parameters: Parameters, prefix: str, facts: RecurrentConfig, norm_eps: float) -> None:
        self._facts = facts
        self._eps = norm_eps
        self._conv = CausalConv(parameters, prefix, facts)
        self._rate = -parameters.take(f"{prefix}decay_log").to(torch.float32).exp()
        self._rate_bias = parameters.take(f"{prefix}decay_bias").to(torch.float32)
        self._norm = parameters.take(f"{prefix}recurrent_norm").to(torch.float32)

    def for_kernels(self) -> RecurrentWeights:
        rate, rate_bias, norm = (values.numpy()[None] for values in (self._rate, self._rate_bias, self._norm))
        return RecurrentWeights(*self._conv.for_kernels(), rate, rate_bias, NO_NUMBERS, norm, NO_NUMBERS, NO_NUMBERS)

    def step(self, rows: Tensor, states: Tensor) -> Tensor:
        facts = self._facts
        conv_states, matrices = split_states(states, self._facts)
        mixed, gate, strength, decay = self._parts(rows)
        q, k, v = self._heads(self._conv.step(mixed, conv_states))
        matrices.mul_(decay.exp()[..., None, None])
        change = (v - (matrices * k[..., None]).sum(2)) * strength[..., None]
        matrices.addcmul_(k[..., None], change[:, :, None])
        out = (matrices * q[..., None]).sum(2)
        return self._gated(out, gate).reshape(-1, facts.value_width)

    def scan(self, rows: Tensor, state: Tensor) -> Tensor:
        facts = self._facts
        conv_states, matrices = split_states(state[None], self._facts)
        mixed, gate, strength, decay = self._parts(rows)
        q, k, v = (heads.transpose(0, 1) for heads in self._heads(self._conv.scan(mixed, conv_states[0])))
        out = _scan(q, k, v, strength.T, decay.T, matrices[0])
        return self._gated(out.transpose(0, 1), gate).reshape(-1, facts.value_width)

    def _parts(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Inputs of the convolution, the gate, strengths [num_tokens, heads], and logs of decays."""
        facts, rows = self._facts, rows.to(torch.float32)
        widths = [facts.channels, facts.value_width, facts.num_heads, facts.num_heads]
        mixed, gate, strength, decay = torch.split(rows, widths, 1)
        return mixed, gate, strength.sigmoid(), self._rate * F.softplus(decay + self._rate_bias)

    def _heads(self, mixed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries and keys [num_tokens, heads, key_dim] of length 1, queries scaled; values [.., heads, value_dim]."""
        facts = self._facts
        q, k, v = torch.split(F.silu(mixed), [facts.key_width, facts.key_width, facts.value_width], 1)
        copies = facts.num_heads // facts.num_key_heads
        q, k = (_unit(rows.view(len(rows), -1, facts.key_dim)).repeat_interleave(copies, 1) for rows in (q, k))
        return q * facts.key_dim**-0.5, k, v.view(len(v), -1, facts.value_dim)

    def _gated(self, out: Tensor, gate: Tensor) -> Tensor:
        scale = torch.rsqrt(out.square().mean(-1, keepdim=True) + self._eps)
        return out * scale * self._norm * F.silu(gate).view(out.shape)


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + _LENGTH_EPS)


def _scan(q: Tensor, k: Tensor, v: Tensor, strength: Tensor, decay: Tensor, matrices: Tensor) -> Tensor:
    """The rule for all tokens of a sequence: q, k [heads, num_tokens, key_dim], v [.., value_dim], strength and log of
    decay [heads, num_tokens], matrices [heads, key_dim, value_dim], updated in place -> [heads, num_tokens, value_dim].
    """
    num_tokens = q.shape[1]
    size = min(_CHUNK, num_tokens)
    missing = -num_tokens % size  # filled with tokens that change nothing
    q, k, v = (_in_chunks(F.pad(rows, (0, 0, 0, missing)), size) for rows in (q, k, v))
    strength, decay = (_in_chunks(F.pad(numbers, (0, missing)), size) for numbers in (strength, decay))
    total = decay.cumsum(2)  # log of the decay since the chunk began: [heads, chunks, size]
    earlier = torch.ones((size, size), dtype=torch.bool, device=q.device).tril()
    between = (total[..., :, None] - total[..., None, :]).masked_fill(~earlier, float("-inf")).exp()
    since = total.exp()[..., None]
    k_strong = k * strength[..., None]
    system = (k_strong @ k.transpose(2, 3)) * between  # its diagonal counts as 1
    wanted = torch.cat((v * strength[..., None], k_strong * since), -1)
    solved = torch.linalg.solve_triangular(system, wanted, upper=False, unitriangular=True)
    values, seen = torch.split(solved, [v.shape[-1], k.shape[-1]], -1)
    scores = (q @ k.transpose(2, 3)) * between
    q = q * since
    k = (k * (total[..., -1:] - total).exp()[..., None]).transpose(2, 3)
    last = total[..., -1].exp()[..., None, None]
    out = torch.empty_like(v)
    for number in range(q.shape[1]):
        change = values[:, number] - seen[:, number] @ matrices
        out[:, number] = q[:, number] @ matrices + scores[:, number] @ change
        matrices.mul_(last[:, number]).add_(k[:, number] @ change)
    return out.flatten(1, 2)[:, :num_tokens]


def _in_chunks(x: Tensor, size: int) -> Tensor:
    """[heads, num_tokens, ..] -> [heads, chunks, size, ..]."""
    return torch.unflatten(x, 1, (-1, size))
