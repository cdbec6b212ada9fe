"""Causal convolutions of each channel over the last tokens, and the layer that is little more than one (LFM2, 2025)."""

import torch
from torch import Tensor

from engine.kernels.cpu.arguments import Floats
from engine.kernels.cpu.recurrent.recurrent_arguments import RecurrentWeights
from engine.models.encodings import Parameters
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.for_kernels import NO_NUMBERS


class CausalConv:
    """Each channel's last `kernel` inputs, weighted. The state is [kernel - 1, channels], the inputs before the first.
    The order of the sum is the same for steps and chunks, so they give the same numbers. `factors`: of the inputs of
    each channel, which the state holds without them.
    """

    def __init__(
        self, parameters: Parameters, prefix: str, facts: RecurrentConfig, factors: Tensor | None = None
    ) -> None:
        weight = parameters.take(f"{prefix}conv").to(torch.float32).reshape(facts.channels, facts.kernel).T
        self._weight = (weight if factors is None else weight * factors.to(weight.device)).contiguous()
        self._taps = self._weight.unbind(0)
        bias = parameters.take_optional(f"{prefix}conv_bias")
        self._bias = None if bias is None else bias.to(torch.float32)
        self._before = facts.kernel - 1

    def for_kernels(self) -> tuple[Floats, Floats]:
        """The taps and the biases of RecurrentWeights."""
        bias = torch.zeros(self._weight.shape[1]) if self._bias is None else self._bias
        return self._weight.numpy()[None], bias.numpy()[None]

    def step(self, inputs: Tensor, states: Tensor) -> Tensor:
        """One token of each sequence: [num_seqs, channels], states [num_seqs, kernel - 1, channels]."""
        out = self._weigh([*states.unbind(1), inputs])
        states[:, :-1] = states[:, 1:].clone()
        states[:, -1] = inputs
        return out

    def scan(self, inputs: Tensor, state: Tensor) -> Tensor:
        """Tokens of one sequence: [num_tokens, channels], state [kernel - 1, channels]."""
        padded, count = torch.cat((state, inputs)), len(inputs)
        state.copy_(padded[count:])
        return self._weigh([padded[tap : tap + count] for tap in range(self._before + 1)])

    def _weigh(self, inputs: list[Tensor]) -> Tensor:
        out = inputs[0] * self._taps[0]
        for values, tap in zip(inputs[1:], self._taps[1:], strict=True):
            out.addcmul_(values, tap)
        return out if self._bias is None else out.add_(self._bias)


def split_states(states: Tensor, facts: RecurrentConfig) -> tuple[Tensor, Tensor]:
    """Views of the states [num_seqs, state_numbers] of layers with heads: those of the convolution [num_seqs,
    kernel - 1, channels], and the matrices [num_seqs, heads, key_dim, value_dim].
    """
    conv, matrices = states[:, : facts.conv_numbers], states[:, facts.conv_numbers :]
    shape = (facts.num_heads, facts.key_dim, facts.value_dim)
    return torch.unflatten(conv, 1, (facts.kernel - 1, facts.channels)), torch.unflatten(matrices, 1, shape)


class ShortConv:
    """gate * conv(input_gate * input): rows are [input_gate, gate, input]."""

    def __init__(self, parameters: Parameters, prefix: str, facts: RecurrentConfig) -> None:
        self._conv = CausalConv(parameters, prefix, facts)
        self._shape = (facts.kernel - 1, facts.channels)

    def for_kernels(self) -> RecurrentWeights:
        taps, biases = self._conv.for_kernels()
        none = NO_NUMBERS
        return RecurrentWeights(taps, biases, none, none, none, none, none, none)

    def step(self, rows: Tensor, states: Tensor) -> Tensor:
        input_gate, gate, inputs = rows.to(torch.float32).chunk(3, 1)
        return gate * self._conv.step(input_gate * inputs, states.view(-1, *self._shape))

    def scan(self, rows: Tensor, state: Tensor) -> Tensor:
        input_gate, gate, inputs = rows.to(torch.float32).chunk(3, 1)
        return gate * self._conv.scan(input_gate * inputs, state.view(self._shape))
