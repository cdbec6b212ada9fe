"""LoRA adapters of the eager decoder: linear layers with what adapters add to their rows."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from torch.nn import functional as F

from engine.attention.backend import AdapterRows
from engine.models.adapters import AdapterWeights, ModulePiece
from engine.models.encodings import LinearParameters
from engine.models.linear import LinearLayer, Ops, Rows, make_linear


class Adapters:
    """The adapters of an eager decoder, which change parameters that `shapes` have. `begin` says which rows of a pass
    use which; one thread calls it.
    """

    def __init__(self, shapes: Sequence[AdapterWeights]) -> None:
        self._names = {name for weights in shapes for name in weights}
        self._layers: dict[str, AdaptedLinear] = {}
        self.rows: tuple[AdapterRows, ...] = ()

    def begin(self, rows: tuple[AdapterRows, ...]) -> None:
        self.rows = rows

    @contextmanager
    def among(self, chosen: Tensor) -> Iterator[None]:
        """Meanwhile layers get only the chosen rows of the pass: [num_chosen] int64, ascending."""
        all_rows = self.rows
        if all_rows:
            bounds = torch.tensor([(first, end) for _, first, end in all_rows], device=chosen.device)
            bounds_in_chosen = torch.searchsorted(chosen, bounds).tolist()
            some = (AdapterRows(rows.slot, *place) for rows, place in zip(all_rows, bounds_in_chosen, strict=True))
            self.rows = tuple(rows for rows in some if rows.first < rows.end)
        try:
            yield
        finally:
            self.rows = all_rows

    def make_linear(self, name: str, parameters: LinearParameters) -> LinearLayer:
        """The layer of parameter `name`, with what adapters add to it, if any does. Their matrices are on the device of
        the layer's, and have its type if that is a float.
        """
        linear = make_linear(parameters)
        if name not in self._names:
            return linear
        like = parameters.weight.new_empty(0)
        like = like if like.is_floating_point() else like.to(torch.float32)
        self._layers[name] = adapted = AdaptedLinear(linear, self, like)
        return adapted

    def put(self, slot: int, weights: AdapterWeights) -> None:
        for name, layer in self._layers.items():
            layer.put(slot, weights.get(name, ()))


class AdaptedLinear:
    """A linear layer, and what the adapters of the pass add to its rows. `like` has the type and device of their
    matrices.
    """

    def __init__(self, linear: LinearLayer, adapters: Adapters, like: Tensor) -> None:
        self._linear = linear
        self._adapters = adapters
        self._like = like
        self._pieces: dict[int, list[ModulePiece]] = {}  # by slot

    def put(self, slot: int, pieces: Sequence[ModulePiece]) -> None:
        self._pieces[slot] = [ModulePiece(a.to(self._like), b.to(self._like), first) for a, b, first in pieces]

    @property
    def ops(self) -> Ops:
        return self._linear.ops

    def __call__(self, rows: Rows) -> Tensor:
        return self._add(self._linear(rows), rows)

    def add_to(self, residual: Tensor, rows: Rows) -> Tensor:
        return self._add(self._linear.add_to(residual, rows), rows)

    def _add(self, out: Tensor, rows: Rows) -> Tensor:
        for slot, first, end in self._adapters.rows:
            for a, b, first_output in self._pieces.get(slot, ()):
                change = F.linear(F.linear(self.ops.values(rows)[first:end], a), b)
                out[first:end, first_output : first_output + len(b)] += change
        return out
