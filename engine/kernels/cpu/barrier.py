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

_MAX_SPINS = 2000
"""Reads of the counter before a thread naps: about 100 microseconds, in which a rank wakes up for its next step."""


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
def _nap(typing: TypingContext) -> Intrinsic:
    """Sleep for as short as the system can, about 60 microseconds, so that another thread may run on this core."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        Emitter(context, builder).call("usleep", INT32, INT32(1))
        return context.get_dummy_value()

    return types.void(), generate


@jit
def wait(counter: Int64s, num_threads: int) -> None:
    """Return once all `num_threads` threads have called this function as often as this thread.

    A thread that has spun for _MAX_SPINS reads sleeps for a moment. The thread it waits for may have lost its core to
    another process and be queued for this one; without that, steps on a busy machine took thirty times as long. It does
    not yield (sched_yield): on Linux 6.18 a worker that yielded many times a millisecond kept the processes of other
    sessions and containers from its cores for as long as its streams ran.
    """
    if num_threads == 1:
        return
    target = _arrive(counter) // num_threads * num_threads + num_threads
    num_spins = 0
    while _read_after_pause(counter) < target:
        num_spins += 1
        if num_spins > _MAX_SPINS:
            _nap()
