"""Where threads of one compiled loop wait for each other: a counter that only grows."""

from collections.abc import Callable
from typing import Any

from numba import types
from numba.extending import intrinsic

from engine.cpu.ir import INT64, VOID, Emitter
from engine.cpu.jit import jit

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


@jit
def meet(counter: Any, num_threads: Any) -> None:
    """Return once all `num_threads` threads have called this as often as this one."""
    if num_threads == 1:
        return
    everyone = _arrive(counter) // num_threads * num_threads + num_threads
    while _look(counter) < everyone:
        pass
