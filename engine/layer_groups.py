"""LayerGroups: a forward pass in groups of layers, each announced once its KV is written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Iterates over ranges of layers `[first, stop)`. The caller writes the KV of a range before it requests the next.

    Without `announce` there is one group of all layers.
    """

    num_layers: int
    size: int
    announce: Callable[[int, int], None] | None = None
    """`announce(first, count)`"""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        size = self.size if self.announce is not None else self.num_layers
        for first in range(0, self.num_layers, size):
            stop = min(first + size, self.num_layers)
            yield first, stop
            if self.announce is not None:
                self.announce(first, stop - first)
