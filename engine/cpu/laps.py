"""Where the time of a step goes: cycles of each phase, counted inside the compiled loop."""

import time
from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import INT64, Emitter
from engine.cpu.jit import jit

PHASES = ("norm", "qkv", "rotate and store", "attention", "quantise", "output", "gate and up", "down", "logits")
NORM, QKV, PLACE, ATTENTION, QUANTISE, OUTPUT, GATE_UP, DOWN, LOGITS = range(len(PHASES))

_emit: Callable[[Callable[..., Any]], Any] = intrinsic


@_emit
def _cycles(typing: Any) -> Any:
    """The CPU's counter."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return Emitter(context, builder).call("llvm.readcyclecounter", INT64)

    return types.int64(), generate


@jit
def start_laps(laps: Any) -> None:
    """`laps` [len(PHASES) + 1] int64: cycles of each phase, and when the last one ended."""
    laps[-1] = _cycles()


@jit
def lap(laps: Any, phase: Any) -> None:
    """The time since the last call was this phase's."""
    now = _cycles()
    laps[phase] += now - laps[-1]
    laps[-1] = now


@jit
def _now() -> Any:
    return _cycles()


def cycles_per_ms(measured_s: float = 0.05) -> float:
    """How fast the counter runs, measured for so long."""
    cycles, begun = _now(), time.perf_counter()
    while time.perf_counter() - begun < measured_s:
        pass
    return float((_now() - cycles) / (time.perf_counter() - begun) / 1000)
