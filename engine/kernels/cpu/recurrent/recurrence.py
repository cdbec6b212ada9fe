"""The tokens of a step in a recurrent layer, between its projections, as engine/models/recurrent computes it in torch.

States are updated where they lie, in rows of the KV cache. A unit of work is some channels of a sequence, or a value
head, or those that share a key head. It takes the sequence's tokens one after the other, and reads and writes numbers
of its own, so results depend neither on chunks, nor on other sequences, nor on the number of threads.
"""

from functools import cache
from typing import Any

import numba
import numpy as np
from numba import types

from engine.kernels.cpu.arguments import Address, Floats, Matrix, Range
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.compilation.emitter import (
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
)
from engine.kernels.cpu.compilation.pieces import address_of, call_at
from engine.kernels.cpu.compilation.stored import value_of, value_type
from engine.kernels.cpu.machine import CACHE_LINE_BYTES, FLOAT_BYTES, LANES
from engine.kernels.cpu.products.panels import panel_product
from engine.kernels.cpu.recurrent.delta_heads import mix_heads
from engine.kernels.cpu.recurrent.recurrent_arguments import (
    CHANNELS,
    CONV,
    CONVOLVE,
    DELTA,
    GATE_ROWS,
    NO_RECURRENCE,
    NO_STATE_STEPS,
    PROJECT,
    PROJECT_STEPS,
    MixPart,
    Recurrent,
    StateSteps,
    StepRows,
)
from engine.kernels.cpu.recurrent.scan_channels import project_steps, project_values, scan_channels
from engine.kernels.cpu.recurrent.scan_heads import convolve_channels, gate_and_norm, scan_head
from engine.kernels.cpu.recurrent.states import MixedRows, convolve_tokens, mix_channels, tokens_of
from engine.kernels.cpu.threads.barrier import share_of
from engine.kernels.cpu.vectors import address

_numba: Any = numba  # it does not annotate its functions
_CHANNELS = 256
"""Channels of a unit of convolutions and of Mamba 1."""


@entry
def mix(recurrent: Recurrent, layer: int, steps: StateSteps, rows: StepRows, part: MixPart) -> None:
    """Compute a part of a recurrent layer."""
    (projected, inner, out), stage = rows, part.stage
    at = MixedRows(address(projected), projected.shape[1] * FLOAT_BYTES, address(out), out.shape[1] * FLOAT_BYTES)
    inner_rows = Matrix(address(inner), inner.shape[1] * FLOAT_BYTES)
    if stage == GATE_ROWS:
        gate_and_norm(recurrent, layer, share_of(len(out), part.number, part.num_parts), at)
    elif stage == PROJECT:
        project_values(recurrent, layer, len(out), part, at, inner_rows)
    elif stage == PROJECT_STEPS:
        project_steps(recurrent, layer, len(out), part, at, inner_rows)
    else:
        _mix_units(recurrent, layer, steps, len(out), part, at, inner_rows)


@jit
def _mix_units(
    recurrent: Recurrent, layer: int, steps: StateSteps, num_rows: int, part: MixPart, at: MixedRows, inner: Matrix
) -> None:
    """A part of a stage whose units are those of sequences."""
    stage, num_units = part.stage, _num_units(recurrent, part.stage)
    width = min(recurrent.value_dim, _CHANNELS) if recurrent.kind == CHANNELS else recurrent.value_dim
    work, matrix = num_units * num_rows, _aligned(recurrent.key_dim * width)
    first, end = share_of(work, part.number, part.num_parts)
    for seq in range(len(steps.tables)):
        tokens = tokens_of(steps, seq)
        for unit in range(num_units):
            place = num_units * tokens.first + unit * (tokens.end - tokens.first)
            if place < first or place >= end:
                continue
            own = Range(unit * _CHANNELS, min(recurrent.taps.shape[2], (unit + 1) * _CHANNELS))
            if stage == CONVOLVE and recurrent.kind == CHANNELS:
                convolve_tokens(recurrent, layer, steps, tokens, own, at)
            elif stage == CONVOLVE:
                convolve_channels(recurrent, layer, steps, tokens, own, at)
            elif recurrent.kind == CHANNELS:
                scan_channels(recurrent, layer, steps, tokens, own, matrix, at, inner)
            elif recurrent.kind == CONV:
                mix_channels(recurrent, layer, steps, tokens, own, at)
            elif recurrent.kind == DELTA:
                mix_heads(recurrent, layer, steps, tokens, unit, matrix, at)
            else:
                scan_head(recurrent, layer, steps, tokens, unit, matrix, at)


@jit
def _aligned(size: int) -> Floats:
    """Numbers that begin at a cache line: vectors that lie across two take three times as long."""
    numbers = np.empty(size + LANES, np.float32)
    first = -address(numbers) % CACHE_LINE_BYTES // FLOAT_BYTES
    return numbers[first : first + size]


@jit
def _num_units(recurrent: Recurrent, stage: int) -> int:
    """Units of each sequence: blocks of channels, key heads or heads."""
    if stage == CONVOLVE or recurrent.kind == CONV or recurrent.kind == CHANNELS:
        return -(-recurrent.taps.shape[2] // _CHANNELS)
    return recurrent.num_key_heads if recurrent.kind == DELTA else recurrent.rates.shape[1]


@emitted
def call_mix(
    typing: TypingContext,
    mix_at: NumbaType,
    recurrent: NumbaType,
    layer: NumbaType,
    steps: NumbaType,
    rows: NumbaType,
    part: NumbaType,
) -> Intrinsic:
    """Call `mix` by its address. So its code, which depends on no type of weights, is compiled once, and only for
    models that have recurrent layers.
    """
    given = (recurrent, layer, steps, rows, part)
    kinds = tuple(map(value_type, given))
    if kinds != _mix_types():
        raise TypeError(f"mix is compiled for {_mix_types()}, not for {kinds}")

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        values = [value_of(emit, *each) for each in zip(given, args[1:], strict=True)]
        return call_at(emit, args[0], kinds, types.none, values)

    return types.void(types.intp, *given), generate


@cache
def mix_address() -> Address:
    """The address of `mix`, which is compiled or loaded from disk."""
    return address_of(mix, _mix_types())


def multiply_address(kind: int) -> Address:
    """The code of products within layers of this kind, which is compiled or loaded from disk; 0 if they have none."""
    return panel_product.address_for(np.float32) if kind == CHANNELS else 0


@cache
def _mix_types() -> tuple[Any, ...]:
    """The types of the arguments of `mix`."""
    rows = np.empty((0, 0), np.float32)
    return tuple(map(_numba.typeof, (NO_RECURRENCE, 0, NO_STATE_STEPS, StepRows(rows, rows, rows), MixPart(0, 0, 1))))
