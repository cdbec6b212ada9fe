"""Recurrent layers for the compiled loop: parameters, places of states, and the sequences of a step."""

from collections.abc import Sequence

import numpy as np

from engine.attention.backend import ForwardMetadata
from engine.kernels.cpu.arguments import Floats, Recurrent, RecurrentWeights, StatePlaces, StateSteps
from engine.models.encodings import Parameters
from engine.models.recurrent.config import RecurrentConfig
from engine.models.recurrent.delta import GatedDelta
from engine.models.recurrent.short_conv import ShortConv

_NO_NUMBERS, _NO_PLACES = np.empty((0, 0), np.float32), np.empty(0, np.int64)
_NO_WEIGHTS = RecurrentWeights(_NO_NUMBERS.reshape(0, 0, 0), _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS, _NO_NUMBERS)
NO_RECURRENCE = Recurrent(
    *_NO_WEIGHTS,
    eps=np.float32(0.0),
    num_key_heads=0,
    key_dim=0,
    places=StatePlaces(_NO_NUMBERS, _NO_PLACES, _NO_PLACES, in_piece=0, of_layer=0),
)
"""Of a model without recurrent layers."""
_NO_COUNTS = np.empty(0, np.int32)
_NO_STEPS = StateSteps(np.empty((0, 0), np.int64), np.empty(0, np.bool_), _NO_COUNTS, _NO_COUNTS)


def take_weights(parameters: Parameters, prefix: str, facts: RecurrentConfig, norm_eps: float) -> RecurrentWeights:
    """Take the parameters of a recurrent layer between its projections."""
    if facts.kind == "conv":
        conv, nothing = ShortConv(parameters, prefix, facts).for_kernels(), np.empty((1, 0), np.float32)
        return RecurrentWeights(conv.taps[None], conv.bias[None], nothing, nothing, nothing)
    delta = GatedDelta(parameters, prefix, facts, norm_eps).for_kernels()
    of_head = (values[None] for values in (delta.rate, delta.rate_bias, delta.norm))
    return RecurrentWeights(delta.conv.taps[None], delta.conv.bias[None], *of_head)


def stacked(layers: Sequence[RecurrentWeights]) -> RecurrentWeights:
    """The parameters of several layers."""
    if not layers:
        return _NO_WEIGHTS
    parts: list[Floats] = [np.concatenate(of_layers) for of_layers in zip(*layers, strict=True)]
    return RecurrentWeights(*parts)


def recurrent_layers(
    weights: RecurrentWeights, facts: RecurrentConfig, norm_eps: float, places: StatePlaces
) -> Recurrent:
    """The layers that have these parameters and states."""
    return Recurrent(
        *weights,
        eps=np.float32(norm_eps),
        num_key_heads=facts.num_key_heads,
        key_dim=facts.key_dim,
        places=places,
    )


def state_steps(metadata: ForwardMetadata) -> StateSteps:
    """The sequences of a pass; none, if the model has no recurrent layers."""
    if metadata.states is None:
        return _NO_STEPS
    tables, is_repeated = metadata.states
    starts, context_lens = metadata.query_starts.numpy(), metadata.context_lens.numpy()
    return StateSteps(tables.numpy().astype(np.int64), np.array(is_repeated, np.bool_), starts, context_lens)
