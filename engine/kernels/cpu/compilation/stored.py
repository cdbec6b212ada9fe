"""Arguments in memory, for compiled functions that threads call by address.

A call from Python takes each array of its arguments out of a Python object while it holds the interpreter lock: 0.1 ms
for those of a step, in each thread, one thread after the other. `stored` does this once, and what it returns can be
used again for as long as the arrays stay where they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from operator import index
from typing import Any, TypeAlias

import numba
import numpy as np
from numba import extending
from numba.core import cgutils
from numba.core.datamodel import models
from numba.core.typing import templates

from engine.kernels.cpu.arguments import Address, Int64s, Range
from engine.kernels.cpu.compilation.emitter import (
    INT64,
    Builder,
    CodeContext,
    Emitter,
    Intrinsic,
    LLVMType,
    NumbaType,
    Signature,
    TypingContext,
    Value,
    Values,
    emitted,
)
from engine.kernels.cpu.compilation.pieces import address_of, addressed, call_at

types: Any = numba.types  # numba does not annotate them
typeof: Any = numba.typeof
_extending: Any = extending
_cgutils: Any = cgutils
_Type: Any = numba.types.Type
_AttributeTemplate: Any = templates.AttributeTemplate
_OpaqueModel: Any = models.OpaqueModel
NUM_STORED = 4
"""Arguments of a kernel."""
Kinds: TypeAlias = tuple[Any, Any, Any, Any]
"""Their types."""
Addresses: TypeAlias = tuple[Address, Address, Address, Address]
WORD_BYTES = 8
_TYPE_FLAGS = 0x503
"""Flags of an array that its numba type depends on: both orders, aligned, writeable."""
JOB_NUMBERS = 1 + NUM_STORED + 2
"""Numbers of a job: a kernel's address, those of its arguments, and both ends of its range."""


@dataclass(frozen=True, slots=True)
class Stored:
    """A named tuple of arrays and numbers in memory, or an array. Valid while this object lives.

    A number takes 8 bytes. An array is its size, the address of its first element, its shape and its strides.
    """

    value: Any  # owns the arrays
    memory: Int64s
    at: Address
    kind: int
    """Tells its numba type from others."""


def stored(value: Any) -> Stored:
    """Store a named tuple, or an array. Raises TypeError for numbers of other types than int, bool and np.float32."""
    words: list[int] = []
    kinds: list[object] = []
    _add(value, words, kinds)
    memory = np.array(words, np.int64)
    return Stored(value, memory, memory.ctypes.data, hash((type(value), *kinds)))


def _add(value: Any, words: list[int], kinds: list[object]) -> None:
    if isinstance(value, np.ndarray):
        words += value.size, value.ctypes.data, *value.shape, *value.strides
        kinds += value.dtype.num, value.ndim, value.flags.num & _TYPE_FLAGS
    elif isinstance(value, tuple):
        for member in value:
            _add(member, words, kinds)
    else:
        words.append(int(value.view(np.int32)) if isinstance(value, np.float32) else index(value))
        kinds.append(type(value))


def _num_words(kind: NumbaType) -> int:
    """Words of a stored value of this type."""
    if isinstance(kind, types.Array):
        return 2 + 2 * int(kind.ndim)
    return sum(map(_num_words, kind)) if isinstance(kind, types.BaseTuple) else 1


@emitted
def load(typing: TypingContext, kinds: NumbaType, addresses: NumbaType) -> Intrinsic:
    """The values of these types that `stored` has written at these addresses, named tuples as views."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        places = map(emit.pointer, emit.members(args[1], NUM_STORED))
        values = [_read(emit, kind, at) for kind, at in zip(loaded, places, strict=True)]
        return context.make_tuple(builder, signature.return_type, values)

    loaded = [kind.instance_type for kind in kinds]
    return types.Tuple(list(map(_seen, loaded)))(kinds, addresses), generate


class View(_Type):
    """A named tuple that `stored` has written, as its address. Compiled code reads a member where it needs it.

    As a value, with all its arrays, a model would be a thousand numbers, which each function takes apart and puts
    together again for those that it calls: compilation would take several times as long.
    """

    def __init__(self, kind: NumbaType) -> None:
        self.kind = kind
        digest = blake2b(str(kind).encode(), digest_size=4).hexdigest()
        # The name is a part of those of all functions that get it.
        super().__init__(f"View.{kind.instance_class.__name__}.{digest}")


class _ViewMembers(_AttributeTemplate):
    key = View

    def generic_resolve(self, view: NumbaType, name: str) -> NumbaType | None:
        return _seen(view.kind[view.kind.fields.index(name)]) if name in view.kind.fields else None


_extending.register_model(View)(_OpaqueModel)
_extending.infer_getattr(_ViewMembers)


def _member(context: CodeContext, builder: Builder, view: NumbaType, value: Value, name: str) -> Value:
    emit, number = Emitter(context, builder), view.kind.fields.index(name)
    words = sum(map(_num_words, list(view.kind)[:number]))
    return _read(emit, view.kind[number], emit.at(value, words * WORD_BYTES))


_extending.lower_getattr_generic(View)(_member)


def _seen(kind: NumbaType) -> NumbaType:
    """The type of a stored value of this type in compiled code."""
    return View(kind) if isinstance(kind, types.BaseNamedTuple) else kind


def _read(emit: Emitter, kind: NumbaType, at: Value) -> Value:
    """Read a stored value. An array has no owner there, which compiled code would have to count."""
    if isinstance(kind, types.BaseNamedTuple):
        return at
    context, builder = emit.context, emit.builder
    if not isinstance(kind, types.Array):
        return _constant_load(emit, at, context.get_value_type(kind))
    size, address, *sizes = (_constant_load(emit, emit.at(at, i * WORD_BYTES), INT64) for i in range(_num_words(kind)))
    array = context.make_array(kind)(context, builder)
    array.meminfo, array.parent = (context.get_constant_null(each) for each in (_MEMORY, types.pyobject))
    array.nitems, array.itemsize = size, INT64(context.get_abi_sizeof(context.get_data_type(kind.dtype)))
    array.data = builder.inttoptr(address, context.get_value_type(types.CPointer(kind.dtype)))
    array.shape, array.strides = (
        _cgutils.pack_array(builder, each) for each in (sizes[: kind.ndim], sizes[kind.ndim :])
    )
    return array._getvalue()


def value_type(kind: NumbaType) -> NumbaType:
    """The type of what a view of this type shows; other types as they are."""
    return kind.kind if isinstance(kind, View) else kind


def value_of(emit: Emitter, kind: NumbaType, value: Value) -> Value:
    """The value that a view shows; others as they are."""
    return _whole(emit, kind.kind, value) if isinstance(kind, View) else value


def _whole(emit: Emitter, kind: NumbaType, at: Value) -> Value:
    if not isinstance(kind, types.BaseNamedTuple):
        return _read(emit, kind, at)
    members, words = [], 0
    for member in kind:
        members.append(_whole(emit, member, emit.at(at, words * WORD_BYTES)))
        words += _num_words(member)
    return emit.context.make_tuple(emit.builder, kind, members)


def _constant_load(emit: Emitter, at: Value, kind: LLVMType) -> Value:
    """Nothing writes there while compiled code may read it."""
    value = emit.load(at, kind, WORD_BYTES)
    value.set_metadata("invariant.load", emit.builder.module.add_metadata([]))
    return value


_MEMORY = types.MemInfoPointer(types.voidptr)


class Kernel:
    """A compiled function of stored arguments. It is compiled for their types, or read from disk, at the first use with
    them.
    """

    def __init__(self, function: Callable[["Kinds", "Addresses", Range], None]) -> None:
        self._code = addressed(function)
        self._addresses: dict[tuple[int, ...], Address] = {}

    def address_for(self, *arguments: Stored) -> Address:
        """The address of the code for arguments of these types."""
        numbers = tuple(each.kind for each in arguments)
        if numbers not in self._addresses:
            kinds = types.Tuple([types.TypeRef(typeof(each.value)) for each in arguments])
            self._addresses[numbers] = address_of(self._code, (kinds, *_NUMBERS))
        return self._addresses[numbers]


_NUMBERS = (types.UniTuple(types.int64, NUM_STORED), typeof(Range(0, 0)))
_CALLED = (types.Tuple([types.TypeRef(types.none)] * NUM_STORED), *_NUMBERS)


@emitted
def call(typing: TypingContext, job: NumbaType) -> Intrinsic:
    """Call a kernel. job: [JOB_NUMBERS], the kernel's address, then those of its arguments, then the range."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        emit = Emitter(context, builder)
        at = emit.array(job, args[0])
        function, *numbers = (emit.load(emit.at(at, WORD_BYTES * i), INT64, WORD_BYTES) for i in range(JOB_NUMBERS))
        addresses = context.make_tuple(builder, _CALLED[1], numbers[:NUM_STORED])
        return _call(emit, function, addresses, numbers[NUM_STORED:])

    return types.void(job), generate


@emitted
def call_kernel(typing: TypingContext, at: NumbaType, addresses: NumbaType, layer: NumbaType) -> Intrinsic:
    """Call a kernel by its address, for one layer, with the arguments that the calling kernel has at `addresses`. So it
    is compiled by itself, and only where it is needed.
    """

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        at, addresses, layer = args
        return _call(Emitter(context, builder), at, addresses, [layer, builder.add(layer, INT64(1))])

    return types.void(types.int64, addresses, types.int64), generate


def _call(emit: Emitter, function: Value, addresses: Value, layers: Values) -> Value:
    kinds = emit.context.make_tuple(emit.builder, _CALLED[0], [emit.context.get_dummy_value()] * NUM_STORED)
    own = emit.context.make_tuple(emit.builder, _CALLED[2], layers)
    return call_at(emit, function, _CALLED, types.none, [kinds, addresses, own])


def job(kernel: Kernel, arguments: Sequence[Stored], layers: Range) -> Int64s:
    """The argument of `call`. The stored arguments must live until the call ends."""
    return np.array([kernel.address_for(*arguments), *(each.at for each in arguments), *layers], np.int64)
