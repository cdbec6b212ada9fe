"""Triton's interpreter in less time; a plugin of the processes in which kernels are interpreted.

Whenever a kernel starts or calls a function, the interpreter looks through Triton's whole language for what it has to
replace; here that stays replaced. For every result it makes the types of its numbers and of its shape anew; here those
that are equal are made once, and mostly told by identity. It computes every sum and product of whole numbers once more
in 64 bits, and looks at the result only if its option `debug` is set, which is not so here; it is told to leave that.
"""

from dataclasses import replace
from typing import Any

from triton.language import core
from triton.runtime import interpreter

_replace, _replaced = interpreter._patch_lang, set[str]()
_find_dtype, _dtypes = interpreter._get_np_dtype, dict[str, Any]()
_init_type, _init_tensor = core.block_type.__init__, core.tensor.__init__
_are_same_dtype, _broadcast = core.dtype.__eq__, interpreter.TritonSemantic.broadcast_impl_value
_find_common, _common_types = interpreter.TritonSemantic.computation_type_impl, dict[Any, Any]()
_WHOLE_NUMBERS = frozenset(core.dtype.SINT_TYPES + core.dtype.UINT_TYPES)
_types: dict[Any, dict[str, Any]] = {}


def _patch_lang(function: Any) -> Any:
    if function.__module__ not in _replaced:
        _replaced.add(function.__module__)
        _replace(function)
    return interpreter._LangPatchScope()


def _get_np_dtype(type: Any) -> Any:
    if type.name not in _dtypes:
        _dtypes[type.name] = _find_dtype(type)
    return _dtypes[type.name]


def _init_block_type(self: Any, element_ty: Any, shape: Any) -> None:
    key = element_ty.name, *(getattr(size, "value", size) for size in shape)
    if key not in _types:
        _init_type(self, element_ty, shape)
        _types[key] = vars(self)
    self.__dict__ = _types[key]


def _init_shaped(self: Any, handle: Any, type: Any) -> None:
    found = type.__dict__.get("of_tensors")
    if found is None:
        _init_tensor(self, handle, type)
        type.of_tensors = found = self.dtype, self.shape, self.numel
    self.handle, self.type = handle, type
    self.dtype, self.shape, self.numel = found


def _with_element_type(self: Any, scalar: Any) -> Any:
    made = self.__dict__.setdefault("of_elements", {})
    if scalar.name not in made:
        made[scalar.name] = core.block_type(scalar, self.shape)
    return made[scalar.name]


def _is_same_dtype(self: Any, other: Any) -> bool:
    if isinstance(other, core.dtype):
        return self is other or bool(self.name == other.name)
    return bool(_are_same_dtype(self, other))


def _find_common_type(self: Any, *of_operands: Any) -> Any:
    """Of a type, whether it is that of a number in Python, the same for the other operand, and for a division."""
    key = tuple(getattr(each, "name", each) for each in of_operands)
    if key not in _common_types:
        _common_types[key] = _find_common(self, *of_operands)
    return _common_types[key]


def _broadcast_value(self: Any, lhs: Any, rhs: Any) -> Any:
    is_block = lhs.type.is_block()
    if is_block is rhs.type.is_block() and not (is_block and lhs.type.shape.values != rhs.type.shape.values):
        return lhs, rhs
    return _broadcast(self, lhs, rhs)


def _is_int(self: Any) -> bool:
    return self.name in _WHOLE_NUMBERS


def _patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, call)


_builder = interpreter.interpreter_builder
assert not _builder.options.debug
_builder.options = replace(_builder.options, sanitize_overflow=False)
interpreter._patch_attr = _patch_attr
core.dtype.__eq__, core.dtype.is_int = _is_same_dtype, _is_int
interpreter.TritonSemantic.broadcast_impl_value = _broadcast_value
interpreter.TritonSemantic.computation_type_impl = _find_common_type
interpreter._patch_lang = _patch_lang
interpreter._get_np_dtype = _get_np_dtype
core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_shaped
core.block_type.with_element_ty = _with_element_type
