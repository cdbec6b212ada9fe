"""Arguments in memory, for compiled functions that threads call by address.

A call from Python takes each array of its arguments out of a Python object while it holds the interpreter lock: 0.1 ms
for those of a step, in each thread, one thread after the other. `stored` does this once, and what it returns can be
used again for as long as the arrays stay where they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b
from typing import Any, TypeAlias

import numba
import numpy as np

from engine.kernels.cpu.arguments import Address, Bytes, Int64s, Range
from engine.kernels.cpu.compiler import (
    INT64,
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
    entry,
)
from engine.kernels.cpu.vectors import address

types: Any = numba.types  # numba does not annotate them
typeof: Any = numba.typeof
NUM_STORED = 4
"""Arguments of a kernel."""
Kinds: TypeAlias = tuple[Any, Any, Any, Any]
"""Their types."""
Addresses: TypeAlias = tuple[Address, Address, Address, Address]
_USUAL_BYTES = 8192
JOB_NUMBERS = 1 + NUM_STORED + 2


@dataclass(frozen=True, slots=True)
class Stored:
    """A named tuple of arrays and numbers in memory. Valid while this object lives."""

    value: Any  # owns the arrays
    memory: Bytes
    at: Address
    kind: int
    """Tells its numba type from others."""


@emitted
def _store(typing: TypingContext, value: NumbaType, at: NumbaType, num_bytes: NumbaType) -> Intrinsic:
    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        struct = context.get_value_type(value)
        size = INT64(context.get_abi_sizeof(struct))
        with builder.if_then(builder.icmp_signed("<=", size, args[2])):
            pointer = builder.inttoptr(args[1], struct.as_pointer())
            builder.store(_unowned(context, builder, value, args[0]), pointer)
        return context.make_tuple(builder, signature.return_type, [size, INT64(_kind(value))])

    return types.UniTuple(types.int64, 2)(value, types.int64, types.int64), generate


def _unowned(context: CodeContext, builder: Builder, kind: NumbaType, value: Value) -> Value:
    """The value without references to the owners of its arrays, which the caller drops when it returns."""
    if isinstance(kind, types.Array):
        array = context.make_array(kind)(context, builder, value)
        array.meminfo, array.parent = (context.get_constant_null(each) for each in (_MEMORY, types.pyobject))
        return array._getvalue()
    if isinstance(kind, types.BaseTuple):
        for i, member in enumerate(kind):
            part = _unowned(context, builder, member, builder.extract_value(value, i))
            value = builder.insert_value(value, part, i)
    return value


_MEMORY = types.MemInfoPointer(types.voidptr)


def _kind(kind: NumbaType) -> int:
    return int.from_bytes(blake2b(str(kind).encode(), digest_size=8).digest(), "little", signed=True)


@emitted
def load(typing: TypingContext, kinds: NumbaType, addresses: NumbaType) -> Intrinsic:
    """The values of these types that `stored` has written at these addresses."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        values = []
        for at, kind in zip(Emitter(context, builder).members(args[1], NUM_STORED), loaded, strict=True):
            pointer = builder.inttoptr(at, context.get_value_type(kind).as_pointer())
            values.append(builder.load(pointer))
        return context.make_tuple(builder, signature.return_type, values)

    loaded = [kind.instance_type for kind in kinds]
    return types.Tuple(loaded)(kinds, addresses), generate


@partial(entry, nogil=False)
def _store_in(value: Any, memory: Bytes) -> tuple[int, int]:
    """Write a value, if the memory has room for it. Returns its size in bytes, and its kind."""
    return _store(value, address(memory), len(memory))


def stored(value: Any) -> Stored:
    """Store a named tuple."""
    memory = np.empty(_USUAL_BYTES, np.uint8)
    size, kind = _store_in(value, memory)
    if size > len(memory):
        memory = np.empty(size, np.uint8)
        _store_in(value, memory)
    return Stored(value, memory, memory.ctypes.data, kind)


class Kernel:
    """A compiled function of stored arguments. It is compiled for their types, or read from disk, at the first use with
    them.
    """

    def __init__(self, function: Callable[["Kinds", "Addresses", Range], None]) -> None:
        self._dispatcher: Any = entry(function)
        self._addresses: dict[tuple[int, ...], Address] = {}

    def address_for(self, *arguments: Stored) -> Address:
        """The address of the code for arguments of these types."""
        numbers = tuple(each.kind for each in arguments)
        if numbers not in self._addresses:
            kinds = types.Tuple([types.TypeRef(typeof(each.value)) for each in arguments])
            signature = (kinds, *_NUMBERS)
            self._dispatcher.compile(signature)
            compiled = self._dispatcher.overloads[signature]
            found = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
            self._addresses[numbers] = found
        return self._addresses[numbers]


_NUMBERS = (types.UniTuple(types.int64, NUM_STORED), typeof(Range(0, 0)))
_CALLED = (types.Tuple([types.TypeRef(types.none)] * NUM_STORED), *_NUMBERS)


@emitted
def call(typing: TypingContext, job: NumbaType) -> Intrinsic:
    """Call a kernel. job: [JOB_NUMBERS], the kernel's address, then those of its arguments, then the range."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at = emit.array(job, args[0])
        function, *numbers = (emit.load(emit.at(at, 8 * i), INT64, 8) for i in range(JOB_NUMBERS))
        function_type = context.call_conv.get_function_type(types.none, _CALLED)
        pointer = builder.inttoptr(function, function_type.as_pointer())
        kinds = context.make_tuple(builder, _CALLED[0], [context.get_dummy_value()] * NUM_STORED)
        addresses = context.make_tuple(builder, _CALLED[1], numbers[:NUM_STORED])
        layers = context.make_tuple(builder, _CALLED[2], numbers[NUM_STORED:])
        context.call_conv.call_function(builder, pointer, types.none, _CALLED, [kinds, addresses, layers])
        return context.get_dummy_value()

    return types.void(job), generate


def job(kernel: Kernel, arguments: Sequence[Stored], layers: Range) -> Int64s:
    """The argument of `call`. The stored arguments must live until the call ends."""
    return np.array([kernel.address_for(*arguments), *(each.at for each in arguments), *layers], np.int64)
