"""A mixture of experts on a GPU, without the host: Triton kernels, whose launches do not depend on what rows choose.
So a decode step reads nothing back, and can be captured.

    chosen ─ list_choices ─▶ the choices that name each expert
    rows ─ multiply_chosen: gate and up ─▶ [choices, 2 * inner] ─ activation ─▶ [choices, inner]
         ─ multiply_chosen: down, times shares ─▶ [choices, hidden] ─ sum ─▶ [rows, hidden]

A program has some outputs of one expert, and takes the rows that have chosen it in tiles. So the matrices of an expert
are read from memory once if some row has chosen it, and not at all otherwise: with B rows that choose k of E experts at
random, those of E (1 - (1 - k / E)^B) experts. Products of gathered matrices would move 3 B k experts, and products of
all rows with all experts E. torch's own `grouped_mm` has bf16 only. Tiles after the first read the matrix again, from
the GPU's cache if it holds it. Therefore steps of many rows, which are prompts, are faster expert by expert in a
library's products, and wait for the host once in a layer: see `Experts` in engine/models/layer.py.
"""

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from engine.attention.backend import ForwardMetadata
from engine.attention.triton_paged import launching_on, why_not_triton
from engine.models.encodings import LinearParameters
from mesh.domain.kv import Span

FEW_ROWS = 256
"""The kernels compute steps of up to this many rows, and those that are captured."""
_COLUMNS = 64
_STEP_BYTES = 128  # of a row or an output, read at once
_CHOICES_AT_ONCE = 1024
_ALIGNMENT_BYTES = 64
_NUM_STAGES = 4


def why_not_on_device(attention: str, device: torch.device) -> str | None:
    """The reason why the kernels cannot compute experts, or None. Attention in torch means to do without Triton."""
    if attention not in ("flash", "triton"):
        return f"attention backend {attention} does without Triton"
    return why_not_triton(device)


class ExpertMatrices:
    """One matrix [outputs, inputs] of each of some experts: the first one, and the distances to all of them; `biases`
    [experts, outputs], if they have any.
    """

    def __init__(self, matrices: Sequence[LinearParameters]) -> None:
        self._weights = [_aligned(matrix.weight) for matrix in matrices]  # whose addresses are in `offsets`
        self.first = self._weights[0]
        numbers = [weight.data_ptr() // weight.element_size() for weight in self._weights]
        self.offsets = torch.tensor([number - numbers[0] for number in numbers], device=self.first.device)
        biases = [matrix.bias for matrix in matrices if matrix.bias is not None]
        self.biases = torch.stack(biases) if biases else None


def _aligned(weight: Tensor) -> Tensor:
    """Dense, and at an address where 16 of its numbers end at another such: the kernels rely on it."""
    is_aligned = weight.is_contiguous() and weight.data_ptr() % _ALIGNMENT_BYTES == 0
    return weight if is_aligned else weight.clone(memory_format=torch.contiguous_format)


class ListedChoices(NamedTuple):
    """The choices that name each expert of a rank: `choices` [experts, rows] int32, and how many there are."""

    choices: Tensor
    counts: Tensor
    top_k: int

    @property
    def num_rows(self) -> int:
        return self.choices.shape[1]


class ExpertProducts:
    """The kernels, as all layers of a decoder launch them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._kernels: Any = import_module("engine.models.expert_kernels")
        self.fit_step = False
        """True if the kernels compute the experts of the step that has begun."""
        self.are_compiled = False

    def begin(self, metadata: ForwardMetadata) -> None:
        """Begin a step. Rows of adapters are left to the host, which knows them."""
        has_few_rows = metadata.positions.shape[0] <= FEW_ROWS
        self.fit_step = (metadata.is_captured or has_few_rows) and not metadata.adapters

    def list_choices(self, chosen: Tensor, experts: Span) -> ListedChoices:
        """chosen: [rows, top_k] int64, no expert twice in a row."""
        num_rows, top_k = chosen.shape
        listed = torch.empty(experts.count, num_rows, dtype=torch.int32, device=chosen.device)
        counts = torch.empty(experts.count, dtype=torch.int32, device=chosen.device)
        with launching_on(self._device):
            self._kernels.list_choices[(experts.count,)](
                chosen.contiguous(),
                listed,
                counts,
                experts.first,
                num_rows * top_k,
                num_rows,
                AT_ONCE=_CHOICES_AT_ONCE,
                enable_fp_fusion=True,
            )
        return ListedChoices(listed, counts, top_k)

    def multiply(
        self, x: Tensor, matrices: ExpertMatrices, listed: ListedChoices, shares: Tensor | None = None
    ) -> Tensor:
        """Products [choices, outputs] of rows of x with the matrices of the chosen experts, biases added. x has a row
        for each row of the step; or, with the `shares` that multiply the products, for each choice. Without
        shares, rows of choices that are not listed are not written; with shares they are 0.
        """
        (width, depth), num_choices = matrices.first.shape, listed.num_rows * listed.top_k
        allocate = torch.empty if shares is None else torch.zeros
        out = allocate(num_choices, width, dtype=x.dtype, device=x.device)
        with launching_on(self._device):
            self._kernels.multiply_chosen[(len(listed.counts), -(-width // _COLUMNS))](
                x.contiguous(),
                out,
                matrices.first,
                matrices.offsets,
                out if matrices.biases is None else matrices.biases,
                out if shares is None else shares.contiguous(),
                listed.choices,
                listed.counts,
                listed.num_rows,
                CHOICES_PER_ROW=listed.top_k if shares is None else 1,
                WIDTH=width,
                DEPTH=depth,
                ROWS=_tile_rows(listed.num_rows),
                COLUMNS=_COLUMNS,
                STEP=_STEP_BYTES // x.element_size(),
                HAS_BIASES=matrices.biases is not None,
                HAS_SHARES=shares is not None,
                num_stages=_NUM_STAGES,
                enable_fp_fusion=True,
            )
        return out


def _tile_rows(num_rows: int) -> int:
    if num_rows <= 16:
        return 16
    return 32 if num_rows <= FEW_ROWS else 64


class ChosenExperts:
    """The experts of a layer that a rank holds, for the kernels. `inner` makes the second product's rows of the first
    one's results.
    """

    def __init__(
        self,
        products: ExpertProducts,
        experts: Span,
        ups: Sequence[LinearParameters],
        downs: Sequence[LinearParameters],
        inner: Callable[[Tensor], Tensor],
    ) -> None:
        self.products = products
        self._experts = experts
        self._ups = ExpertMatrices(ups)
        self._downs = ExpertMatrices(downs)
        self._inner = inner

    def __call__(self, x: Tensor, chosen: Tensor, shares: Tensor) -> Tensor:
        """The sum of what the chosen experts make of x [rows, hidden_size], times their shares. chosen, shares: [rows,
        top_k]. Experts of other ranks count for nothing.
        """
        listed = self.products.list_choices(chosen, self._experts)
        inner = self._inner(self.products.multiply(x, self._ups, listed))
        results = self.products.multiply(inner, self._downs, listed, shares)
        return results.view(*chosen.shape, -1).sum(1)

    def compile(self, top_k: int) -> None:
        """Compile the kernels for steps of few rows, so that the first request need not wait."""
        if self.products.are_compiled:
            return
        self.products.are_compiled = True
        like = self._ups.first
        for num_rows in (1, FEW_ROWS):
            x = torch.zeros(num_rows, like.shape[1], dtype=like.dtype, device=like.device)
            chosen = self._experts.first + torch.arange(top_k, device=like.device).expand(num_rows, top_k)
            self(x, chosen, chosen.to(like.dtype))
