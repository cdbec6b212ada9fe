"""Types of arguments of recurrent layers: their parameters, the places of states, and the sequences of a step."""

from typing import NamedTuple

import numpy as np

from engine.kernels.cpu.arguments import Address, Floats, Int32s, Int64s

CONV, DELTA, SCAN, CHANNELS = range(4)
"""Kinds of recurrent layers: see engine.models.recurrent.config.RecurrentConfig."""
CONVOLVE, PROJECT, PROJECT_STEPS, MIX, GATE_ROWS = range(5)
STAGES = {
    CONV: (MIX,),
    DELTA: (MIX,),
    SCAN: (CONVOLVE, MIX, GATE_ROWS),
    CHANNELS: (CONVOLVE, PROJECT, PROJECT_STEPS, MIX),
}
"""The stages of a layer of each kind. All threads end one before the next begins."""


class MixPart(NamedTuple):
    """The part of a stage of a recurrent layer that one thread computes."""

    stage: int
    number: int
    num_parts: int


class StepRows(NamedTuple):
    """The rows of a step in a recurrent layer, one of each token."""

    projected: Floats  # [num_tokens, projected], which are overwritten
    inner: Floats  # of CHANNELS, [num_tokens, inner_width], kept from stage to stage; else [num_tokens, 0]
    out: Floats  # [num_tokens, result_width]


class StatePlaces(NamedTuple):
    """Where recurrent states lie: flat numbers of each layer, in rows of the cache. All widths are multiples of 16."""

    rows: Floats  # [rows of the cache, width]
    block: Int64s  # [rows of a state, of all layers]: the block of a row, a column of `tables`
    first: Int64s  # [rows of a state]: its number in `rows`, were that block 0
    in_piece: int  # rows from there to the same one of the next block
    of_layer: int  # rows of a layer


class StateSteps(NamedTuple):
    """The sequences of a step, as recurrent layers see them; see Batch."""

    tables: Int64s  # [num_seqs, blocks of a state]
    num_repeated: Int32s  # [num_seqs]: so many tokens at the end leave the state as it is before them
    query_starts: Int32s  # [num_seqs + 1]
    context_lens: Int32s  # [num_seqs]


class RecurrentWeights(NamedTuple):
    """The parameters of recurrent layers; [num_layers, 0] where their kind does without. A panel of a matrix has 16 of
    its outputs, [inputs, 16].
    """

    taps: Floats  # [num_layers, kernel, channels]
    biases: Floats  # [num_layers, channels]
    rates: Floats  # [num_layers, num_heads] of DELTA and SCAN; of CHANNELS as panels [key_dim, 16], times log2(e)
    rate_biases: Floats  # [num_layers, num_heads or channels]; of SCAN and CHANNELS the biases of steps
    skips: Floats  # [num_layers, num_heads or channels], of SCAN and CHANNELS
    norms: Floats  # DELTA: [num_layers, value_dim]; SCAN: [.., num_heads * value_dim]; CHANNELS: keys, then queries
    value_panels: Floats  # of CHANNELS: flat panels of the matrix from values to [low-rank step, keys, queries]
    step_panels: Floats  # of CHANNELS: flat panels of the matrix from low-rank steps to steps


class ScanFacts(NamedTuple):
    """See engine.models.recurrent.config.ScanConfig."""

    gate_factor: np.float32
    step_factor: np.float32
    least_step: np.float32
    most_step: np.float32
    gate_first: bool


class Recurrent(NamedTuple):
    """The recurrent layers of a model. The convolution's state, [kernel - 1, channels], is at the beginning of a
    layer's; behind it are the matrices [num_heads, key_dim, value_dim] of DELTA, SCAN and CHANNELS, which has one head.
    """

    taps: Floats  # see RecurrentWeights
    biases: Floats
    rates: Floats
    rate_biases: Floats
    skips: Floats
    norms: Floats
    value_panels: Floats
    step_panels: Floats
    eps: np.float32  # of the norm of results; of CHANNELS that of steps, keys and queries
    kind: int
    num_key_heads: int
    key_dim: int
    value_dim: int
    step_rank: int  # of CHANNELS: numbers of a low-rank step
    scan: ScanFacts
    places: StatePlaces
    multiply: Address  # of panels.panel_product, for CHANNELS


_NO_STATES, _NO_ROWS, _NO_COUNTS = np.empty((0, 0), np.float32), np.empty(0, np.int64), np.empty(0, np.int32)
_ZERO = np.float32(0.0)
NO_RECURRENT_WEIGHTS = RecurrentWeights(_NO_STATES.reshape(0, 0, 0), *[_NO_STATES] * 7)
NO_RECURRENCE = Recurrent(
    *NO_RECURRENT_WEIGHTS,
    eps=_ZERO,
    kind=CONV,
    num_key_heads=0,
    key_dim=0,
    value_dim=0,
    step_rank=0,
    scan=ScanFacts(_ZERO, _ZERO, _ZERO, _ZERO, gate_first=False),
    places=StatePlaces(_NO_STATES, _NO_ROWS, _NO_ROWS, in_piece=0, of_layer=0),
    multiply=0,
)
"""The argument for a model without recurrent layers."""
NO_STATE_STEPS = StateSteps(np.empty((0, 0), np.int64), _NO_COUNTS, _NO_COUNTS, _NO_COUNTS)
