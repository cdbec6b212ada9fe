"""Tape: a stand-in for CUDA graphs on CPU, with their rules.

A CUDA graph repeats launches: the same kernels, on the same addresses, with the numbers of the capture. TapeCapture
records torch's operations with their tensors and numbers; `replay` repeats the operations and runs no Python of the
captured function. Before it does, it overwrites every result of the last run, so nothing survives from the capture.

A checked replay then runs the function again, as it would run without graphs. It fails

* if the two results differ: a number of the host that has changed since the capture is baked in;
* if the function reads other memory than at the capture: a buffer has moved, or was allocated anew.

Operations that wait for the device, or bring host memory to it, cannot be captured. Memory that is allocated but not
filled holds NaN. TapedKernels record launches of Triton kernels in Triton's interpreter, TapedSums the sums of ranks.
"""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes, _get_current_dispatch_mode
from torch.utils._pytree import tree_leaves

from engine.decode_graphs import Captured, Run

_REFUSED = {
    "aten::_local_scalar_dense": "reads a value on the host",
    "aten::is_nonzero": "reads a value on the host",
    "aten::nonzero": "has a shape that the host must know",
    "aten::masked_select": "has a shape that the host must know",
    "aten::lift_fresh": "makes a tensor of numbers of the host",
}
_ALLOCATES = ("aten::empty", "aten::new_empty")


class NotCapturable(AssertionError):
    """The captured function did what a capture does not allow."""


class ReplayDiffers(AssertionError):
    """A replay did not do what the function does now."""


@dataclass(frozen=True, slots=True)
class _Call:
    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: list[Tensor]  # in memory of their own
    repeats: bool

    def run(self) -> None:
        results = [leaf for leaf in tree_leaves(self.function(*self.args, **self.kwargs)) if isinstance(leaf, Tensor)]
        for target, result in zip(self.results, results, strict=False):
            target.copy_(result)


@dataclass
class _Tape(TorchDispatchMode):
    """Records operations. `inputs`: memory that was there before, by address."""

    calls: list[_Call] = field(default_factory=list)
    inputs: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__init__()
        self._own: dict[int, Tensor] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if reason := _REFUSED.get(name):
            raise NotCapturable(f"{name} {reason}")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        for tensor in given:
            if _memory(tensor) not in self._own:
                self.inputs[_memory(tensor)] = tensor
        result = func(*args, **(kwargs or {}))
        places = {_memory(tensor) for tensor in given}
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
        fresh = [tensor for tensor in made if _memory(tensor) not in places]
        self._own |= {_memory(tensor): tensor for tensor in fresh}
        is_view = bool(made) and not fresh and not func._schema.is_mutable
        repeats = not is_view and not name.startswith(_ALLOCATES)
        if name.startswith(_ALLOCATES):
            _poison(fresh)
        self.calls.append(_Call(func, args, kwargs or {}, fresh, repeats))
        return result

    def add_launch(self, launch: Callable[..., None], arguments: tuple[Any, ...]) -> None:
        """A launch that has been done; it changes tensors of its arguments only."""
        for tensor in (leaf for leaf in arguments if isinstance(leaf, Tensor)):
            if _memory(tensor) not in self._own:
                self.inputs[_memory(tensor)] = tensor
        self.calls.append(_Call(launch, arguments, {}, [], repeats=True))


class _NoLists(TorchFunctionMode):
    """On CPU `tolist` reads without an operation."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is Tensor.tolist:
            raise NotCapturable("tolist reads values on the host")
        return func(*args, **(kwargs or {}))


def _poison(tensors: Iterable[Tensor]) -> None:
    for tensor in tensors:
        tensor.fill_(float("nan") if tensor.is_floating_point() else 0)


class TapedKernels:
    """A module of Triton kernels in the interpreter. A graph repeats a launch with the grid, the addresses and the
    numbers of the capture.
    """

    def __init__(self, kernels: Any) -> None:
        self._kernels = kernels

    def __getattr__(self, name: str) -> "_TapedKernel":
        return _TapedKernel(getattr(self._kernels, name))


@dataclass(frozen=True, slots=True)
class _TapedKernel:
    kernel: Any

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        def launch(*arguments: Any, **constants: Any) -> None:
            tape = _get_current_dispatch_mode()
            with _disable_current_modes():  # the interpreter's own operations
                self.kernel[grid](*arguments, **constants)
            if isinstance(tape, _Tape):
                tape.add_launch(partial(self.kernel[grid], **constants), arguments)

        return launch


class TapedSums:
    """A backend that sums over ranks. A graph repeats a sum on the address of the capture, together with theirs."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend

    def allreduce(self, tensors: list[Tensor]) -> "TapedSums":
        tape = _get_current_dispatch_mode()
        with _disable_current_modes():
            self._sum(*tensors)
        if isinstance(tape, _Tape):
            tape.add_launch(self._sum, tuple(tensors))
        return self

    def wait(self) -> None:
        """Sums are done when `allreduce` returns."""

    def _sum(self, tensor: Tensor) -> None:
        self._backend.allreduce([tensor]).wait()


def _memory(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


class TapeGraph:
    """Captured work of a function. `num_replays` counts."""

    def __init__(self, run: Callable[[], Tensor], *, is_checked: bool) -> None:
        self._run = run
        self._is_checked = is_checked
        self.num_replays = 0
        with _NoLists(), _Tape() as tape:
            self.hidden = run()
        self._calls, self._inputs = tape.calls, tape.inputs

    def replay(self) -> None:
        self.num_replays += 1
        _poison(self._results())
        for call in self._calls:
            if call.repeats:
                call.run()
        if self._is_checked:
            self._check()

    def _results(self) -> Iterator[Tensor]:
        return (result for call in self._calls for result in call.results)

    def _check(self) -> None:
        with _NoLists(), _Tape() as tape:
            wanted = self._run()
        if moved := tape.inputs.keys() ^ self._inputs.keys():
            shapes = [tuple((tape.inputs | self._inputs)[address].shape) for address in moved]
            raise ReplayDiffers(f"buffers are not where they were at capture, or are new: shapes {shapes}")
        is_nan = self.hidden.isnan()  # in rows that nobody reads
        if not (torch.equal(wanted.isnan(), is_nan) and torch.equal(wanted[~is_nan], self.hidden[~is_nan])):
            raise ReplayDiffers("the replay computes something else: a number of the host is baked into the capture")


class TapeCapture:
    """Capture of a function on CPU. `graphs`: what was captured."""

    def __init__(self, *, is_checked: bool = True) -> None:
        self._is_checked = is_checked
        self.graphs: list[TapeGraph] = []

    def __call__(self, run: Run, rehearse: Run | None = None) -> Captured:
        (rehearse or run)()  # as on a GPU
        graph = TapeGraph(run, is_checked=self._is_checked)
        self.graphs.append(graph)
        return Captured(graph, graph.hidden)

    @property
    def num_replays(self) -> int:
        return sum(graph.num_replays for graph in self.graphs)
