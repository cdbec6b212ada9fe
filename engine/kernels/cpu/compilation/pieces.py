"""Pieces: compiled functions that kernels call by their addresses. They are compiled by themselves, once for each type
of numbers, and not with every kernel: the loop over layers knows no type of weights or KV, so there is one for all.

The arguments and the result of a piece are numbers and named tuples of numbers, whose types are its annotations. Its
first argument, `kind`, only tells the type of numbers that it is compiled for.
"""

import inspect
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, get_type_hints

import numba
import numpy as np
from numpy.typing import DTypeLike

from engine.kernels.cpu.arguments import Address
from engine.kernels.cpu.compilation.compiler import entry
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

types: Any = numba.types  # numba does not annotate them
_from_dtype: Any = numba.from_dtype

addressed = partial(entry, no_cpython_wrapper=True, no_cfunc_wrapper=True)
"""As `entry`, for functions that are called by their address only."""


def address_of(function: Callable[..., Any], arguments: Sequence[Any], result: Any = types.none) -> Address:
    """The address of the code of an `entry` or `addressed` function for arguments of these types, which is compiled or
    read from disk.
    """
    dispatcher: Any = function
    dispatcher.compile(tuple(arguments))
    compiled = dispatcher.overloads[tuple(arguments)]
    if compiled.signature.return_type != result:
        raise TypeError(f"{dispatcher.__name__} returns {compiled.signature.return_type}, not {result}")
    found: Address = compiled.library.get_pointer_to_function(compiled.fndesc.llvm_func_name)
    return found


def call_at(emit: Emitter, at: Value, kinds: Sequence[NumbaType], result: NumbaType, values: Values) -> Value:
    """Write code that calls a compiled function by its address, with arguments of these types."""
    call_conv, builder = emit.context.call_conv, emit.builder
    function = builder.inttoptr(at, call_conv.get_function_type(result, kinds).as_pointer())
    _, returned = call_conv.call_function(builder, function, result, kinds, values)
    return returned


class Piece:
    """Decorates the function. `address_for` compiles it or reads it from disk."""

    def __init__(self, function: Callable[..., Any]) -> None:
        hints, (_, *names) = get_type_hints(function), inspect.signature(function).parameters
        self.arguments = types.Tuple([_declared(hints[name]) for name in names])
        self.result = _declared(hints["return"])
        self._code = addressed(function)
        self._addresses: dict[Any, Address] = {}

    def address_for(self, kind: DTypeLike | NumbaType) -> Address:
        """The address of the code for numbers of this type."""
        number = kind if isinstance(kind, types.Type) else _from_dtype(np.dtype(kind))
        if number not in self._addresses:
            kinds = (types.TypeRef(number), *self.arguments)
            self._addresses[number] = address_of(self._code, kinds, self.result)
        return self._addresses[number]


def _declared(hint: Any) -> NumbaType:
    """The type of arguments with this annotation."""
    numbers = {int: types.int64, bool: types.boolean, np.float32: types.float32, type(None): types.none}
    if hint in numbers:
        return numbers[hint]
    members = [_declared(each) for each in get_type_hints(hint).values()]
    return types.BaseTuple.from_types(members, hint)


def caller(piece: Piece) -> Callable[..., Any]:
    """The function that compiled code calls a piece with: of its address, and the tuple of its arguments but `kind`."""

    @emitted
    def call(typing: TypingContext, at: NumbaType, arguments: NumbaType) -> Intrinsic:
        def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
            emit, kinds = Emitter(context, builder), (types.TypeRef(types.none), *piece.arguments)
            values = [context.get_dummy_value(), *emit.members(args[1], len(piece.arguments))]
            return call_at(emit, args[0], kinds, piece.result, values)

        return piece.result(types.int64, piece.arguments), generate

    return call


@emitted
def element_of(typing: TypingContext, kind: NumbaType) -> Intrinsic:
    """Any number of the type that a piece is compiled for."""

    def generate(context: CodeContext, builder: Builder, signature: Signature, args: Values) -> Value:
        return context.get_constant_null(signature.return_type)

    return kind.instance_type(kind), generate
