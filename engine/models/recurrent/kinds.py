"""The kinds of recurrences, which RecurrentConfig names."""

from typing import Protocol

from torch import Tensor

from engine.kernels.cpu.recurrent.recurrent_arguments import RecurrentWeights
from engine.models.encodings import Parameters
from engine.models.recurrent.channel_scan import ChannelScan
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.delta import GatedDelta
from engine.models.recurrent.scan import SelectiveScan
from engine.models.recurrent.short_conv import ShortConv


class Recurrence(Protocol):
    """Plug point: ShortConv, GatedDelta, SelectiveScan, ChannelScan. Rows are what the layer's first projection gives
    for a token; results and states are fp32.
    """

    def for_kernels(self) -> RecurrentWeights:
        """The parameters of this one layer as the kernel of CPUs takes them, which computes what `scan` does."""
        ...

    def step(self, rows: Tensor, states: Tensor) -> Tensor:
        """One token of each sequence: rows [num_seqs, projected], states [num_seqs, state_numbers], which are updated
        in place -> [num_seqs, result_width].
        """
        ...

    def scan(self, rows: Tensor, state: Tensor) -> Tensor:
        """Tokens of one sequence, one after the other: rows [num_tokens, projected], state [state_numbers], which is
        updated in place -> [num_tokens, result_width].
        """
        ...


def take_recurrence(parameters: Parameters, prefix: str, facts: RecurrentConfig, norm_eps: float) -> Recurrence:
    """Take the parameters of a recurrent layer between its projections."""
    if facts.kind == "conv":
        return ShortConv(parameters, prefix, facts)
    if facts.kind == "channels":
        return ChannelScan(parameters, prefix, facts)
    kind = GatedDelta if facts.kind == "delta" else SelectiveScan
    return kind(parameters, prefix, facts, norm_eps)
