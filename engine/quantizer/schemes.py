"""The schemes of `tandem quantize`: what a matrix is stored as, what is folded before it is rounded, and how it is."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from engine.quantized_formats.matrix import QuantizedMatrix
from engine.quantized_formats.storage import MatrixStorage
from engine.quantizer.awq import clipped_scales, search_factors
from engine.quantizer.compressed import Activations
from engine.quantizer.gptq import round_by_errors
from engine.quantizer.grids import RoundRows, fp8_rows, int4_scales, int8_rows, round_fp8, round_int4, round_int8
from engine.quantizer.statistics import InputStatistics

Tie = Callable[[Tensor], Tensor]
"""Makes factors equal where only equal ones can be folded."""
Factors = Callable[[Sequence[Tensor], Sequence[InputStatistics], Tie], Tensor]
"""Factors of inputs that some matrices share; each matrix has the statistics of its own tokens."""
Round = Callable[[Tensor, InputStatistics], QuantizedMatrix]
"""Rounds a matrix [outputs, inputs]; the statistics are those of its inputs after folding."""

_INT8 = MatrixStorage("plain", 8, int8_rows=True)
_FP8 = MatrixStorage("plain", 8, is_float=True)
_TINY = 1e-5


@dataclass(frozen=True, slots=True)
class Scheme:
    """`needs`: the statistics of inputs that `factors` and `round` read. Scales are stored in `scales_dtype`."""

    weights: MatrixStorage
    activations: Activations
    needs: Literal["nothing", "largest", "gram"]
    round: Round
    factors: Factors | None = None
    scales_dtype: torch.dtype = torch.float32

    @property
    def round_rows(self) -> RoundRows | None:
        """Rounds activations as engines do that serve the scheme."""
        return None if self.activations is None else {"int8": int8_rows, "fp8": fp8_rows}[self.activations]


def make_scheme(name: str, *, group_size: int, alpha: float, dtype: torch.dtype) -> Scheme:
    """The scheme of that name in engine.quantizer.SCHEMES, for a checkpoint in `dtype`."""
    if name == "fp8":
        return Scheme(_FP8, "fp8", "nothing", lambda weight, _: round_fp8(weight))
    if name == "w8a8":
        return Scheme(_INT8, "int8", "nothing", lambda weight, _: round_int8(weight))
    if name == "smoothquant":
        return Scheme(_INT8, "int8", "largest", lambda weight, _: round_int8(weight), _smoothquant(alpha))
    return _int4_scheme(name, group_size, dtype)


def _smoothquant(alpha: float) -> Factors:
    """SmoothQuant (Xiao et al. 2023), equation 4: the larger `alpha`, the more is moved to the weights."""

    def factors(weights: Sequence[Tensor], statistics: Sequence[InputStatistics], tie: Tie) -> Tensor:
        of_inputs = torch.stack([seen.largest for seen in statistics]).amax(0).clamp(min=_TINY)
        of_weights = torch.stack([weight.abs().amax(0) for weight in weights]).amax(0).clamp(min=_TINY)
        return tie((of_inputs**alpha / of_weights ** (1 - alpha)).clamp(min=_TINY))

    return factors


def _int4_scheme(name: str, group_size: int, dtype: torch.dtype) -> Scheme:
    weights = MatrixStorage("packed", 4, block_inputs=group_size)

    def nearest(weight: Tensor, _: InputStatistics) -> QuantizedMatrix:
        return round_int4(weight, int4_scales(weight, group_size, dtype))

    def clipped(weight: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        return round_int4(weight, clipped_scales(weight, statistics.gram, group_size, dtype))

    def by_errors(weight: Tensor, statistics: InputStatistics) -> QuantizedMatrix:
        scales = clipped_scales(weight, statistics.gram, group_size, dtype)
        return round_by_errors(weight, statistics.gram, scales)

    def factors(weights: Sequence[Tensor], statistics: Sequence[InputStatistics], tie: Tie) -> Tensor:
        return search_factors(weights, statistics, tie, group_size, dtype)

    if name == "awq":
        return Scheme(weights, None, "gram", clipped, factors, dtype)
    if name == "gptq":
        return Scheme(weights, None, "gram", by_errors, scales_dtype=dtype)
    return Scheme(weights, None, "nothing", nearest, scales_dtype=dtype)
