"""Triton's interpreter in less time; a plugin of the processes in which kernels are interpreted.

Whenever a kernel calls a function, the interpreter looks through Triton's whole language for what it has to replace.
The start of the kernel has replaced all that our functions use, and the first call of a function of Triton's library
what that uses.
"""

from typing import Any

from triton.runtime import interpreter

_replaced: set[str] = set()


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    if self.fn.__module__ not in _replaced:
        _replaced.add(self.fn.__module__)
        interpreter._patch_lang(self.fn)
    try:
        return self.rewrite()(*args, **kwargs)
    except Exception as error:
        raise interpreter.InterpreterError(repr(error)) from error


interpreter.InterpretedFunction.__call__ = _call
