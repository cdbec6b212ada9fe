"""How the threads of one compiled loop wait for each other: counters that only grow."""

from typing import NamedTuple

from numba import types

from engine.kernels.cpu.arguments import Int64s, Range
from engine.kernels.cpu.compilation.compiler import jit
from engine.kernels.cpu.compilation.emitter import (
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
)


class RowShare(NamedTuple):
    """Consecutive rows of a step, which some of a worker's threads compute without the others: all columns of them.

    Queries attend to earlier rows of their sequence, which another share may hold: it has written their KV, or the
    state behind them, when its number in `stored` says so.
    """

    number: int
    first_needed: int  # the share in which the sequence of the first row begins
    stored: Int64s  # [num_shares]: layers whose KV or state each share has written


class Team(NamedTuple):
    """One of the threads that run the same loop: among its rank's threads, and among those of all ranks. Of a rank
    that shares out rows, the threads of one share.
    """

    thread: int
    num_threads: int
    counter: Int64s  # [1], of the barrier of the rank's threads
    number: int
    num_all: int
    all_counter: Int64s  # [1], of the barrier of all threads
    phase_cycles: Int64s  # of this thread; see phases.py
    share: RowShare


@jit
def share_of(count: int, number: int, num_parts: int) -> Range:
    """The numbers below `count` that are those of part `number`, where as many parts share them out."""
    return Range(count * number // num_parts, count * (number + 1) // num_parts)


MAX_SPINS = 2000
"""Reads of the counter before a thread naps: about 100 microseconds, in which a rank wakes up for its next step."""


@emitted
def arrive(typing: TypingContext, counter: NumbaType) -> Intrinsic:
    """Add 1 to counter[0] atomically; returns the previous value."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        pointer = builder.bitcast(Emitter(context, builder).array(counter, args[0]), INT64.as_pointer())
        return builder.atomic_rmw("add", pointer, INT64(1), "seq_cst")

    return types.int64(counter), generate


@emitted
def exchange(typing: TypingContext, counter: NumbaType, value: NumbaType) -> Intrinsic:
    """Write counter[0]; no read or write of this thread moves to the other side of it."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        pointer = builder.bitcast(Emitter(context, builder).array(counter, args[0]), INT64.as_pointer())
        builder.atomic_rmw("xchg", pointer, args[1], "seq_cst")
        return context.get_dummy_value()

    return types.void(counter, types.int64), generate


@emitted
def publish(typing: TypingContext, counter: NumbaType, value: NumbaType) -> Intrinsic:
    """Write counter[0] with release order: whoever reads the value sees all that this thread has written before."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        pointer = builder.bitcast(Emitter(context, builder).array(counter, args[0]), INT64.as_pointer())
        builder.store_atomic(args[1], pointer, "release", 8)
        return context.get_dummy_value()

    return types.void(counter, types.int64), generate


@emitted
def read_after_pause(typing: TypingContext, counter: NumbaType) -> Intrinsic:
    """Execute a pause instruction, then read counter[0] with acquire order."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        emit.call("llvm.x86.sse2.pause", VOID)
        pointer = builder.bitcast(emit.array(counter, args[0]), INT64.as_pointer())
        return builder.load_atomic(pointer, "acquire", 8)

    return types.int64(counter), generate


@emitted
def nap(typing: TypingContext) -> Intrinsic:
    """Sleep for as short as the system can, about 60 microseconds, so that another thread may run on this core."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        Emitter(context, builder).call("usleep", INT32, INT32(1))
        return context.get_dummy_value()

    return types.void(), generate


@jit
def wait(counter: Int64s, num_threads: int) -> None:
    """Return once all `num_threads` threads have called this function as often as this thread."""
    if num_threads > 1:
        wait_until(counter, arrive(counter) // num_threads * num_threads + num_threads)


@jit
def publish_rows(share: RowShare, thread: int, layer: int) -> None:
    """Say that the layer's KV or state of the share's rows is written."""
    if thread == 0:
        publish(share.stored[share.number :], layer + 1)


@jit
def wait_for_earlier_rows(share: RowShare, layer: int) -> None:
    """Return once the layer's KV or state of earlier rows of the first sequence is written."""
    for number in range(share.first_needed, share.number):
        wait_until(share.stored[number:], layer + 1)


@jit
def wait_until(counter: Int64s, target: int) -> None:
    """Return once counter[0] is at least `target`.

    A thread that has spun for MAX_SPINS reads sleeps for a moment. The thread it waits for may have lost its core to
    another process and be queued for this one; without that, steps on a busy machine took thirty times as long. It does
    not yield (sched_yield): on Linux 6.18 a worker that yielded many times a millisecond kept the processes of other
    sessions and containers from its cores for as long as its streams ran.
    """
    num_spins = 0
    while read_after_pause(counter) < target:
        num_spins += 1
        if num_spins > MAX_SPINS:
            nap()
