"""A barrier for the threads of one compiled loop: a counter that only grows."""

from numba import types

from engine.kernels.cpu.arguments import Int64s
from engine.kernels.cpu.compiler import (
    INT32,
    INT64,
    VOID,
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
    jit,
)

_MAX_SPINS = 1000
"""Reads of the counter before a thread yields its core: about 50 microseconds."""


@emitted
def _arrive(typing: TypingContext, counter: NumbaType) -> Intrinsic:
    """Add 1 to counter[0] atomically; returns the previous value."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        pointer = builder.bitcast(Emitter(context, builder).array(counter, args[0]), INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, INT64(1), "seq_cst")

    return types.int64(counter), generate


@emitted
def _read_after_pause(typing: TypingContext, counter: NumbaType) -> Intrinsic:
    """Execute a pause instruction, then read counter[0] with acquire order."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        emit.call("llvm.x86.sse2.pause", VOID)
        pointer = builder.bitcast(emit.array(counter, args[0]), INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counter), generate


@emitted
def _yield_core(typing: TypingContext) -> Intrinsic:
    """Let the system run another thread on this core (sched_yield)."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        Emitter(context, builder).call("sched_yield", INT32)
        return context.get_dummy_value()

    return types.void(), generate


@jit
def wait(counter: Int64s, num_threads: int) -> None:
    """Return once all `num_threads` threads have called this function as often as this thread.

    A thread that has spun for _MAX_SPINS reads yields its core. The thread it waits for may have lost its core to
    another process and be queued for this one; without the yield, steps on a busy machine took thirty times as long.
    """
    if num_threads == 1:
        return
    target = _arrive(counter) // num_threads * num_threads + num_threads
    num_spins = 0
    while _read_after_pause(counter) < target:
        num_spins += 1
        if num_spins > _MAX_SPINS:
            _yield_core()
