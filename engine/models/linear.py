"""Linear layers by scheme. A new scheme needs an entry here, one in linear_parameters.SCHEMES, its name in choices.py.

engine/load.py must refuse the compiled loop for a scheme that the loop lacks, check device and dtype, and choose the
dtype of KV.
"""

from collections.abc import Callable, Mapping

from engine.models.int8 import Int8Linear
from engine.models.layers import Linear
from engine.models.linear_parameters import LinearParameters
from engine.models.ops import LinearLayer

_LAYERS: Mapping[str, Callable[[LinearParameters], LinearLayer]] = {"float": Linear, "int8": Int8Linear}


def make_linear(parameters: LinearParameters) -> LinearLayer:
    """Build the linear layer for the scheme of `parameters`."""
    return _LAYERS[parameters.scheme](parameters)
