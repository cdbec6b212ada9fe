"""The encodings in which matrices of weights are stored, and the parameters of a model as they are loaded.

An encoding says what the numbers of a matrix mean: float, int8, fp8, int4 in steps of int8, int4 with scales or, for
some matrices of a model in that, int8 in groups. LinearParameters is a matrix as it is loaded. Every memory layout of a
matrix, oneDNN's or that of the compiled loops, is built from LinearParameters, so each encoding is stored in one way.
`engine/models/linear.py` has the layers that multiply with float and int8; others are for the compiled decoder only.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import NamedTuple

from torch import Tensor

from engine.loading.load_phases import load_phase
from engine.models.rounding import INT4_GROUP, round_to_int4, round_to_int8, round_to_int8_groups, round_to_steps

IN_STEPS = "int4 in int8"
"""The encoding of matrices that are rounded to 4 bits, to steps of int8."""


@dataclass(frozen=True, slots=True, eq=False)
class LinearParameters:
    """A matrix [outputs, inputs] and its bias [outputs]. Scales are fp32. Number [output, input] of the matrix is, by
    encoding:

    float           weight[output, input]
    int8            weight[output, input] * scales[output], with `weight` in [-128, 127]
    fp8             weight[output, input] * scales[output, group], with `weight` in e4m3; outputs in other forms
                    (engine/kernels/cpu/machine.py) have fp32 `numbers[output, input]` instead
    int4 in int8    (lows[output, group] + steps[output, group] * weight[output, input]) * scales[output], with `weight`
                    in [0, 15], and groups of 32 inputs: whole numbers of int8 times a scale
    int4            (weight[output, input] - zeros[output, group]) * scales[output, group], with `weight` in [0, 15];
                    with `is_mxfp4` or `is_nf4`, `weight` numbers the levels that count in its place
                    (engine/kernels/cpu/products/nibbles.py), and groups of MXFP4 have 32 inputs; with `minima` in place
                    of zeros it is weight[output, input] * scales[output, group] - minima[output, group]
    int8 in groups  as int4, with `weight` in [1, 255]

    A group is of neighbouring inputs; the last one may be narrower. With an `order`, int64 [inputs], column i of
    `weight` is for input `order[i]`, and groups are of neighbouring columns. Products are multiplied by `factor`.
    """

    weight: Tensor
    encoding: str = "float"
    scales: Tensor | None = None
    zeros: Tensor | None = None
    steps: Tensor | None = None
    lows: Tensor | None = None
    minima: Tensor | None = None
    bias: Tensor | None = None
    order: Tensor | None = None
    is_mxfp4: bool = False
    is_nf4: bool = False
    numbers: Tensor | None = None
    factor: float = 1.0

    def scaled(self, factor: float) -> "LinearParameters":
        """`factor` times the matrix, which is in groups; its scales are changed."""
        assert self.scales is not None
        minima = None if self.minima is None else self.minima.mul_(factor)
        return replace(self, scales=self.scales.mul_(factor), minima=minima)


def _keep(weight: Tensor) -> LinearParameters:
    return LinearParameters(weight)


def _round_to_int8(weight: Tensor) -> LinearParameters:
    rounded, scales = round_to_int8(weight)
    return LinearParameters(rounded, "int8", scales)


def _round_to_int4(weight: Tensor) -> LinearParameters:
    rounded, scales, zeros = round_to_int4(weight)
    return LinearParameters(rounded, "int4", scales, zeros)


def _round_to_steps(weight: Tensor) -> LinearParameters:
    rounded, scales, steps, lows = round_to_steps(weight)
    return LinearParameters(rounded, IN_STEPS, scales, steps=steps, lows=lows)


def _round_to_int8_groups(weight: Tensor, group: int) -> LinearParameters:
    rounded, scales, zeros = round_to_int8_groups(weight, group)
    return LinearParameters(rounded, "int8 in groups", scales, zeros)


ENCODINGS: Mapping[str, Callable[[Tensor], LinearParameters]] = {
    "float": _keep,
    "int8": _round_to_int8,
    "int4": _round_to_int4,
    IN_STEPS: _round_to_steps,
}
"""Conversions of floating-point weights [outputs, inputs] to each encoding. fp8 is only taken from checkpoints;
matrices beside it keep their type.
"""
OUTPUT_ENCODINGS = {"int4": "int8", IN_STEPS: "int8"}
"""Encodings of the output matrix where they are others than that of the model."""
OUTPUT = "lm_head"
"""The name of the output matrix."""
PACKED = frozenset({"float", "int8", "fp8", "int4", IN_STEPS})
"""Encodings that the compiled decoder can pack and multiply."""
CUT_BY_INPUTS = frozenset({"float"})
"""Encodings in which the products of a matrix's parts, cut by inputs, add up to its product. The scales of int8 are
made from whole rows, of weights and of activations.
"""


Forms = tuple[tuple[int, int], ...]


class StoredMatrices(NamedTuple):
    """How the compiled decoder multiplies the matrices of a checkpoint that are not all in floating point.

    In int4 `group` inputs share a scale; the matrices `in_int8`, which the checkpoint has in another form, have 8 bits,
    to which they are rounded if they do not have them; those `with_minima` have these in place of zeros. In fp8 `forms`
    has, for each matrix, how many outputs that follow each other are stored alike, and their form
    (engine/kernels/cpu/machine.py). With `keeps_output` the output matrix stays in floating point beside others that
    are rounded.
    """

    group: int = INT4_GROUP
    in_int8: frozenset[str] = frozenset()
    with_minima: frozenset[str] = frozenset()
    forms: Mapping[str, Forms] = MappingProxyType({})
    keeps_output: bool = False

    def int4_bytes(self, name: str) -> float:
        """Bytes per number of a matrix in a model in int4. A group has a scale, and a zero or minimum beside it."""
        if name in self.with_minima:
            return 0.5 + 4 / self.group
        return (1.0 if name in self.in_int8 else 0.5) + 3 / self.group


ALL_FLOAT = StoredMatrices()

Values = tuple[str, Tensor | LinearParameters, bool]
"""Name and values of a parameter, and whether it is a matrix, which may be in the model's encoding already."""


class Parameters:
    """The parameters of a model by name, with all matrices converted to one encoding; the output matrix: see
    OUTPUT_ENCODINGS. `stored` says what the matrices of a checkpoint in int4 or fp8 are; `factors` are those of
    products with some matrices.

    `source` yields the parameters `names`. It is read as far as a taken parameter demands, so that a model that copies
    each parameter to its own layout never holds all of them twice. A parameter can be taken once.
    """

    def __init__(
        self,
        encoding: str = "float",
        names: Iterable[str] = (),
        source: Iterable[Values] = (),
        stored: StoredMatrices = ALL_FLOAT,
        factors: Mapping[str, float] | None = None,
    ) -> None:
        self.encoding = encoding
        self.stored = stored
        self._factors = factors or {}
        self._source = iter(source)
        self._unread = set(names)
        self._tensors: dict[str, Tensor] = {}
        self._linears: dict[str, LinearParameters] = {}

    def put(self, name: str, values: Tensor | LinearParameters, *, is_matrix: bool = False) -> None:
        """Add a parameter. A matrix is converted to the encoding, unless it is in it."""
        self._unread.discard(name)
        if isinstance(values, LinearParameters):
            self._linears[name] = values
        elif is_matrix:
            with load_phase("convert"):
                self._linears[name] = self._converted(name, values)
        else:
            self._tensors[name] = values

    def _converted(self, name: str, matrix: Tensor) -> LinearParameters:
        if name in self.stored.in_int8:
            return _round_to_int8_groups(matrix, self.stored.group)
        encoding = OUTPUT_ENCODINGS.get(self.encoding, self.encoding) if name == OUTPUT else self.encoding
        encoding = "float" if name == OUTPUT and self.stored.keeps_output else encoding
        return ENCODINGS.get(encoding, _keep)(matrix)

    def read_all(self) -> None:
        """Read what is left of the source. Raises ConfigurationError."""
        for name, values, is_matrix in self._source:
            self.put(name, values, is_matrix=is_matrix)

    def _read(self, name: str) -> None:
        while name in self._unread:
            found, values, is_matrix = next(self._source)
            self.put(found, values, is_matrix=is_matrix)

    def take(self, name: str) -> Tensor:
        """Remove and return a parameter that is not a matrix. Raises KeyError if it does not exist."""
        self._read(name)
        return self._tensors.pop(name)

    def take_optional(self, name: str) -> Tensor | None:
        """As `take`, but returns None if the parameter does not exist."""
        self._read(name)
        return self._tensors.pop(name, None)

    def take_linear(self, name: str) -> LinearParameters:
        """Remove and return a matrix with its bias, `{name}_bias`, if any. Raises KeyError if it does not exist."""
        self._read(name)
        bias, factor = self.take_optional(f"{name}_bias"), self._factors.get(name, 1.0)
        return replace(self._linears.pop(name), bias=bias, factor=factor)

    def take_output(self, embedding: Tensor) -> LinearParameters:
        """Remove and return the output matrix; if absent, it is `embedding` [vocab_size, hidden_size]."""
        self._read(OUTPUT)
        if OUTPUT not in self._linears:
            self.put(OUTPUT, embedding, is_matrix=True)
        return self.take_linear(OUTPUT)
