"""Layers in groups, each announced once its KV is written."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerGroups:
    """Iterate to get ranges of layers `[first, end)`; asking for the next one says that the last one's KV is written.

    Without `announce` there is one group of all layers.
    """

    num_layers: int
    size: int
    announce: Callable[[int, int], None] | None = None
    """`announce(first, count)`"""

    def __iter__(self) -> Iterator[tuple[int, int]]:
        size = self.size if self.announce is not None else self.num_layers
        for first in range(0, self.num_layers, size):
            end = min(first + size, self.num_layers)
            yield first, end
            if self.announce is not None:
                self.announce(first, end - first)
