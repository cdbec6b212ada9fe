"""Makes numba compile functions as parts of their compiled callers only, for `compiler.jit`."""

import inspect
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any, NoReturn, ParamSpec, TypeVar

import numba
from llvmlite import binding
from numba.core import codegen, compiler, cpu
from numba.core.registry import CPUDispatcher, cpu_target
from numba.extending import overload

P = ParamSpec("P")
R = TypeVar("R")

# numba does not annotate its classes.
types: Any = numba.types
_Compiler: Any = compiler.Compiler
_CPUDispatcher: Any = CPUDispatcher
_JITCodeLibrary: Any = codegen.JITCodeLibrary
_cpu: Any = cpu
_cpu_target: Any = cpu_target
_binding: Any = binding
OPTIONS: Any = {"nogil": True, "fastmath": True, "error_model": "numpy"}


class _Part(_JITCodeLibrary):
    """The LLVM code of a function that becomes a part of its callers. It is optimised there, and gets no machine code
    of its own.
    """

    def _optimize_final_module(self) -> None:
        pass

    def _finalize_final_module(self) -> None:
        self._finalize_dynamic_globals()
        self._finalized = True


class _PartCompiler(_Compiler):
    """Compiles a function for compiled callers only. Optimising it once more with each caller, and machine code for it
    and for its call from Python with dozens of arrays, would double the time of a first start.
    """

    def compile_extra(self, function: Any) -> Any:
        context = self.state.targetctx  # a copy, for this compilation
        self.state.library = _Part(context.codegen(), function.__qualname__)
        context.get_executable = _as_part
        context.get_abi_sizeof = _bytes_of
        return super().compile_extra(function)


def _bytes_of(kind: Any) -> int:
    """As `CPUContext.get_abi_sizeof`, which asks LLVM anew for every variable."""
    return _bytes_of_type(str(kind))


@cache
def _bytes_of_type(kind: str) -> int:
    with _binding.parse_assembly(f"@it = external global {kind}") as module:
        it, target = module.get_global_variable("it"), _cpu_target.target_context.target_data
        size: int = target.get_abi_size(it.global_value_type)
    return size


def _as_part(library: Any, description: Any, environment: Any) -> Any:
    """As `CPUContext.get_executable`: an object that identifies the function to its callers. It cannot be called."""
    return _cpu._dynfunc.make_function(
        description.lookup_module(), description.qualname, "", 0, environment, (library,)
    )


class PartDispatcher(_CPUDispatcher):
    def get_call_template(self, args: Iterable[Any], kws: Mapping[str, Any]) -> Any:
        """Compile a function once for all constants that its callers give."""
        return super().get_call_template(tuple(map(types.unliteral, args)), kws)

    def __call__(self, *args: object) -> NoReturn:
        raise TypeError(f"only compiled code calls {self.__name__}: for calls from Python there is `entry`")


PART_OPTIONS: Any = {
    **OPTIONS,
    "no_cpython_wrapper": True,
    "no_cfunc_wrapper": True,
    "pipeline_class": _PartCompiler,
}


def select_by_dtype(declared: Callable[P, R], matching: Mapping[object, Callable[P, R]], other: Callable[P, R]) -> None:
    """Make compiled calls of `declared` run the function of `matching` whose numba type is that of the last argument,
    and `other` if there is none.

    All functions must have the same parameters and annotations, which numba compares.
    """

    def select(*args: Any) -> Callable[P, R]:
        return matching.get(args[-1], other)

    select.__signature__ = inspect.signature(other)  # type: ignore[attr-defined]
    overload(declared, jit_options=PART_OPTIONS)(select)
