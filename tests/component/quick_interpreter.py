"""Triton's interpreter in less time; a plugin of the processes in which kernels are interpreted.

Whenever a kernel starts or calls a function, the interpreter looks through Triton's whole language for what it has to
replace; here that stays replaced. For every result it makes the types of its numbers and of its shape anew; here those
that are equal are made once.
"""

from typing import Any

from triton.language import core
from triton.runtime import interpreter

_replace, _replaced = interpreter._patch_lang, set[str]()
_find_dtype, _dtypes = interpreter._get_np_dtype, dict[str, Any]()
_init_type, _init_tensor = core.block_type.__init__, core.tensor.__init__
_types: dict[Any, dict[str, Any]] = {}
_shapes: dict[Any, tuple[Any, Any]] = {}


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
    key = tuple(type.shape) if type.is_block() else ()
    if key not in _shapes:
        _init_tensor(self, handle, type)
        _shapes[key] = self.shape, self.numel
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _shapes[key]


interpreter._patch_lang = _patch_lang
interpreter._get_np_dtype = _get_np_dtype
core.block_type.__init__, core.tensor.__init__ = _init_block_type, _init_shaped
