"""RecurrentPart: a layer's recurrence with the projections before and behind it."""

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from engine.models.encodings import LinearParameters, Parameters
from engine.models.linear import LinearLayer, Rows
from engine.models.model_config import ModelConfig
from engine.models.recurrent.mixer import RecurrentMixer, take_mixer

Recur = Callable[[RecurrentMixer, Tensor], Tensor]
"""A layer's recurrence, and what it mixes: [num_tokens, projected] -> [num_tokens, result_width]."""


class RecurrentPart(NamedTuple):
    """`into` takes the layer's input rows, `out` the result of the mixer."""

    into: LinearLayer
    mixer: RecurrentMixer
    out: LinearLayer

    def mix(self, x: Rows, recur: Recur) -> Rows:
        """The input rows of `out`."""
        return self.out.ops.rows(recur(self.mixer, self.into(x)))


def take_recurrent(
    parameters: Parameters,
    prefix: str,
    config: ModelConfig,
    layer: int,
    make_linear: Callable[[str, LinearParameters], LinearLayer],
) -> RecurrentPart | None:
    """Take the parameters of a layer's recurrence; None if it has none."""
    if (mixer := take_mixer(parameters, prefix, config, layer)) is None:
        return None
    names = (f"{prefix}recurrent_in", f"{prefix}recurrent_out")
    into, out = (make_linear(name, parameters.take_linear(name)) for name in names)
    return RecurrentPart(into, mixer, out)
