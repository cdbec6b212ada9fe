"""Where the time of a step goes: the phases of the loop, and the CPU cycles that a thread spends in each."""

import time

from numba import types

from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.compilation.compiler import entry, jit
from engine.kernels.cpu.compilation.emitter import (
    INT64,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
)
from engine.kernels.cpu.threads.barrier import Team, wait

PHASES = ("norm", "qkv", "rotate and store", "attention", "quantise", "output", "gate and up", "down", "logits")
NORM, QKV, STORE_KV, ATTENTION, QUANTISE, OUTPUT, GATE_UP, DOWN, LOGITS = range(len(PHASES))


@emitted
def _cycle_counter(typing: TypingContext) -> Intrinsic:
    """Read the CPU's time-stamp counter (rdtsc)."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        return Emitter(context, builder).call("llvm.readcyclecounter", INT64)

    return types.int64(), generate


@jit
def start_phases(phase_cycles: Int64s) -> None:
    """Begin to count. phase_cycles: [len(PHASES) + 1], cycles of each phase, then the counter at the last end."""
    phase_cycles[-1] = _cycle_counter()


@jit
def end_phase(phase_cycles: Int64s, phase: int) -> None:
    """Add the cycles since the last call of `start_phases` or `end_phase` to this phase."""
    now = _cycle_counter()
    phase_cycles[phase] += now - phase_cycles[-1]
    phase_cycles[-1] = now


@jit
def finish_phase(team: Team, phase: int) -> None:
    """Wait for the threads of all ranks, then count the phase's cycles, waiting included."""
    wait(team.all_counter, team.num_all)
    end_phase(team.phase_cycles, phase)


@jit
def finish_own_phase(team: Team, phase: int) -> None:
    """Wait for the rank's threads only, then count the phase's cycles, waiting included."""
    wait(team.counter, team.num_threads)
    end_phase(team.phase_cycles, phase)


@entry
def _now() -> int:
    return _cycle_counter()


def cycles_per_ms(measured_s: float = 0.05) -> float:
    """Rate of the cycle counter, measured by spinning for `measured_s` seconds."""
    cycles, start_s = _now(), time.perf_counter()
    while time.perf_counter() - start_s < measured_s:
        pass
    return float((_now() - cycles) / (time.perf_counter() - start_s) / 1000)
