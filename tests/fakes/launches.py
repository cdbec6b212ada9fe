"""A module of Triton kernels that computes nothing, and notes how each kernel would be launched."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any


@dataclass
class Launches:
    """`noted`: name, arguments and constants of each launch."""

    noted: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)

    def __getattr__(self, name: str) -> Any:
        def note(*arguments: Any, **constants: Any) -> None:
            self.noted.append((name, arguments, constants))

        return _Grids(note)

    def different(self) -> list[tuple[str, tuple[Any, ...], dict[str, Any]]]:
        """Without those that would need no other code."""
        return list({(name, str(constants)): (name, args, constants) for name, args, constants in self.noted}.values())


@dataclass
class _Grids:
    launch: Callable[..., None]

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.launch
