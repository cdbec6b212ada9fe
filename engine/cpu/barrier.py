"""Where threads of one compiled loop wait for each other: a counter that only grows."""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import INT32, INT64, VOID, Emitter
from engine.cpu.jit import jit

_PATIENCE = 1000
"""Looks before giving way: some 50 microseconds."""
_emit: Callable[[Callable[..., Any]], Any] = intrinsic


@_emit
def _arrive(typing: Any, counter: Any) -> Any:
    """Add 1 to counter[0] for all threads to see; returns what it was."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        at = builder.bitcast(Emitter(context, builder).array(counter, args[0]), INT64.as_pointer())
        return builder.atomic_rmw("add", at, INT64(1), "seq_cst")

    return types.int64(counter), generate


@_emit
def _look(typing: Any, counter: Any) -> Any:
    """counter[0] as other threads left it, after a short pause."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        emit = Emitter(context, builder)
        emit.call("llvm.x86.sse2.pause", VOID)
        at = builder.bitcast(emit.array(counter, args[0]), INT64.as_pointer())
        return builder.load_atomic(at, "acquire", 8)

    return types.int64(counter), generate


@_emit
def _give_way(typing: Any) -> Any:
    """Let another thread that waits for this core have it."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        Emitter(context, builder).call("sched_yield", INT32)
        return context.get_dummy_value()

    return types.void(), generate


@jit
def meet(counter: Any, num_threads: Any) -> None:
    """Return once all `num_threads` threads have called this as often as this one.

    A thread that waits for long gives way: the one it waits for may have lost its core to somebody else, and be in line
    for this one. Without that, steps on a busy machine took thirty times as long.
    """
    if num_threads == 1:
        return
    everyone = _arrive(counter) // num_threads * num_threads + num_threads
    num_looks = 0
    while _look(counter) < everyone:
        num_looks += 1
        if num_looks > _PATIENCE:
            _give_way()
