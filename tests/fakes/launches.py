"""A module of Triton kernels that computes nothing, and notes how each kernel would be launched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor


@dataclass
class Launches:
    """`noted`: name, arguments and constants of each launch. Tensors are noted without their memory."""

    noted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **constants: Any) -> None:
            kept = (value.new_empty(0) if isinstance(value, Tensor) else value for value in arguments)
            self.noted.append((name, tuple(kept), constants))

        return _Grids(note)

    def different(self) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """Without those that would need no other code."""
        return list({(name, str(constants)): (name, args, constants) for name, args, constants in self.noted}.values())


@dataclass
class _Grids:
    launch: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch
