"""Compiled matrix products, and what precedes and follows them, against numpy."""

from dataclasses import dataclass, replace
from typing import Any

import numba
import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from engine.kernels.cpu import rows as row_phases
from engine.kernels.cpu.arguments import (
    Address,
    Matrix,
    Operand,
    Part,
    Range,
)
from engine.kernels.cpu.buffers import round_up
from engine.kernels.cpu.compilation.compiler import entry
from engine.kernels.cpu.compilation.parts import OPTIONS
from engine.kernels.cpu.machine import (
    EIGHT_BITS,
    FOUR_BITS,
    IN_BF16,
    IN_FP32,
    INT4_GROUPS,
    MAX_STEP,
    MAX_ZERO,
    MXFP4,
    NF4,
    SHORTS_ORDER,
    STEP_GROUP,
    TILE_ROWS,
    UNIT,
    WITH_MINIMA,
    amx_shapes,
    has_amx,
    knows_bf16,
    knows_vnni,
)
from engine.kernels.cpu.products import matmul
from engine.kernels.cpu.products.finish import ADD, GATE, STORE
from engine.kernels.cpu.products.matmul import Target, product_code
from engine.kernels.cpu.products.nibble_numbers import (
    E2M1_LEVELS,
    E2M1_ZERO,
    KINDS_IN_GROUPS,
    NF4_LEVELS,
    NF4_ZERO,
    Numbers,
)
from engine.kernels.cpu.products.packing import MatrixShape, Packer, operand_dtypes, unit_runs, wide_size
from engine.kernels.cpu.products.tiles import TileProduct, multiply_tile
from engine.kernels.cpu.rows import Norm
from engine.models.encodings import ENCODINGS, LinearParameters

begin_products, end_products = entry(matmul.begin_products), entry(matmul.end_products)
product, norm_rows, put_rows = entry(matmul.product), entry(row_phases.norm_rows), entry(row_phases.put_rows)

Array = NDArray[Any]
MAX_ROWS = 70
# Columns that fill units, panels, or neither; depths that fill int8's groups of 64, or not.
SHAPES = [MatrixShape(48, 64), MatrixShape(264, 208), MatrixShape(128, 48), MatrixShape(1, 576)]
GATED = [MatrixShape(2 * 16, 64, gated=True), MatrixShape(2 * 112, 208, gated=True)]
NUM_PARTS = (1, 2, 3, 7)
NO_AMX = np.empty(0, np.uint8)
GATED_FACTOR = np.float32(2**-18)  # keeps gates of whole numbers where silu is not flat

INT8 = ("int8", "amx")
needs_amx = pytest.mark.skipif(not has_amx(), reason="the CPU has no amx_int8, or the kernel keeps it")
KINDS = [
    pytest.param("float32", id="fp32"),
    pytest.param("float16", id="fp16"),
    pytest.param("bfloat16", id="bf16"),
    pytest.param("float8_e4m3fn", id="fp8, bf16 and fp32"),
    pytest.param("int8", id="int8"),
    pytest.param("steps", id="int4 in steps of int8"),
    *(pytest.param(f"int4-{group}", id=f"int4 in groups of {group}") for group in INT4_GROUPS),
    pytest.param("int4-minima-32", id="int4 with minima"),
    pytest.param("mxfp4-32", id="mxfp4"),
    *(pytest.param(f"nf4-{group}", id=f"nf4 in groups of {group}") for group in INT4_GROUPS),
    *(pytest.param(f"groups-{group}", id=f"int8 in groups of {group}") for group in (32, 64)),
    pytest.param("amx", id="int8 with AMX", marks=needs_amx),
    pytest.param("steps amx", id="int4 in steps of int8 with AMX", marks=needs_amx),
    pytest.param("bfloat16 amx", id="bf16 with AMX", marks=needs_amx),
]


_LEVELS = {"mxfp4": (E2M1_LEVELS, E2M1_ZERO, MXFP4), "nf4": (NF4_LEVELS, NF4_ZERO, NF4)}
NO_LEVELS: tuple[tuple[int, ...], int, int | None] = ((), 0, None)


@dataclass(frozen=True)
class Products:
    """Random matrices of these shapes, packed; all of whole numbers that every type holds, so that every order of
    adding is exact.
    """

    kind: str
    shapes: list[MatrixShape]
    matrices: list[torch.Tensor]
    biases: list[torch.Tensor | None]
    weights: Any

    @classmethod
    def of(cls, kind: str, shapes: list[MatrixShape]) -> "Products":
        torch.manual_seed(0)
        biases = [None if i % 2 else torch.randint(-99, 99, (s.columns,)).float() for i, s in enumerate(shapes)]
        if kind.startswith(("int4", "mxfp4", "nf4", "groups")):
            return cls._of_int4(kind, [replace(s, group=int(kind.rpartition("-")[2])) for s in shapes], biases)
        if kind.startswith("steps"):
            shapes = [replace(shape, inputs=round_up(shape.inputs, STEP_GROUP)) for shape in shapes]
            return cls._of_steps(kind, shapes, biases)
        if kind == "float8_e4m3fn":
            return cls._of_fp8(kind, shapes, biases)
        is_int8, most = kind in INT8, 127
        matrices = [torch.randint(1 - most, most, (s.columns, s.inputs)).float() for s in shapes]
        for matrix in matrices:
            matrix[:, -1] = most  # so that the scale is 1
        dtype = torch.int8 if is_int8 else getattr(torch, kind.removesuffix(" amx"))
        packer = Packer(shapes, dtype)
        for i, (matrix, bias) in enumerate(zip(matrices, biases, strict=True)):
            stored = ENCODINGS["int8"](matrix) if is_int8 else LinearParameters(matrix.to(dtype))
            packer.put(i, stored.weight, scales=stored.scales, bias=bias)
        return cls(kind, shapes, matrices, biases, packer.weights)

    @classmethod
    def _of_steps(cls, kind: str, shapes: list[MatrixShape], biases: list[torch.Tensor | None]) -> "Products":
        """Steps are anything that fits, and so are low ends."""
        packer, matrices = Packer(shapes, torch.int64), []
        for i, (shape, bias) in enumerate(zip(shapes, biases, strict=True)):
            weight = torch.randint(0, 16, (shape.columns, shape.inputs), dtype=torch.uint8)
            steps = torch.randint(1, MAX_STEP + 1, (shape.columns, shape.inputs // STEP_GROUP), dtype=torch.uint8)
            lows = (torch.rand(steps.shape) * (256 - 15 * steps.int())).floor().to(torch.int16).sub_(128).to(torch.int8)
            packer.put_steps(i, weight, torch.ones(shape.columns), steps, lows, bias)
            group_of = torch.arange(shape.inputs) // STEP_GROUP
            matrices.append(lows[:, group_of].float() + steps[:, group_of].float() * weight)
            assert matrices[-1].abs().max() <= 128
        return cls(kind, shapes, matrices, biases, packer.weights)

    @classmethod
    def _of_fp8(cls, kind: str, shapes: list[MatrixShape], biases: list[torch.Tensor | None]) -> "Products":
        """Units of each form follow each other; scales are powers of two."""
        forms = [(IN_BF16, 32, IN_FP32, shape.inputs) for shape in shapes]
        of_outputs = [
            torch.tensor(own)[(torch.arange(shape.columns) + 32 * i) // 64 % 4]
            for i, (shape, own) in enumerate(zip(shapes, forms, strict=True))
        ]
        shapes = [
            replace(shape, runs=unit_runs(shape.columns, own, gated=shape.gated))
            for shape, own in zip(shapes, of_outputs, strict=True)
        ]
        packer, matrices = Packer(shapes, torch.float8_e4m3fn), []
        for i, (shape, own, bias) in enumerate(zip(shapes, of_outputs, biases, strict=True)):
            octets = torch.randint(-15, 16, (shape.columns, shape.inputs)).float()
            scales = torch.randint(0, 3, (shape.columns, -(-shape.inputs // 32))).exp2()
            group_of = torch.arange(shape.inputs) // torch.where(own > IN_BF16, own, 1)[:, None]
            group_of = torch.where(own[:, None] > IN_BF16, group_of, 0)
            numbers = octets * scales.gather(1, group_of)
            packer.put_forms(i, numbers, octets.to(torch.float8_e4m3fn), scales, bias)
            matrices.append(numbers)
        return cls(kind, shapes, matrices, biases, packer.weights)

    @classmethod
    def _of_int4(cls, kind: str, shapes: list[MatrixShape], biases: list[torch.Tensor | None]) -> "Products":
        """Scales are powers of two, others in each group; zeros are anything that fits."""
        is_int8 = kind.startswith("groups")
        levels, zero, kind_of_levels = _LEVELS.get(kind.partition("-")[0], NO_LEVELS)
        has_minima = kind.startswith("int4-minima")
        numbers = EIGHT_BITS if is_int8 else WITH_MINIMA if has_minima else FOUR_BITS
        shapes = [replace(shape, numbers=numbers) for shape in shapes]
        packer, matrices = Packer(shapes, torch.uint8), []
        for i, (shape, bias) in enumerate(zip(shapes, biases, strict=True)):
            weight = torch.randint(0, 256 if is_int8 else 16, (shape.columns, shape.inputs), dtype=torch.uint8)
            scales = torch.randint(0, 3, (shape.columns, shape.num_groups)).exp2()
            zeros = torch.randint(0, 256 if is_int8 else 17, scales.shape, dtype=torch.uint8)
            zeros = torch.full_like(zeros, zero) if levels else zeros
            minima = torch.randint(-255, 256, scales.shape).float()
            packer.put_groups(i, weight, scales, minima if has_minima else zeros, bias, levels=kind_of_levels)
            group_of = torch.arange(shape.inputs) // shape.group
            weight = torch.tensor(levels)[weight.int()] if levels else weight
            if has_minima:
                matrices.append(weight.float() * scales[:, group_of] - minima[:, group_of])
            else:
                matrices.append((weight.float() - zeros[:, group_of].float()) * scales[:, group_of])
        return cls(kind, shapes, matrices, biases, packer.weights)

    def operand(self, rows: int) -> Operand:
        """Room for so many rows; what is beyond their inputs is not zero."""
        kind, sums_kind = operand_dtypes(self.weights)
        a = np.full((rows + TILE_ROWS) * 720, 77, kind)
        sums = np.empty(2 * TILE_ROWS * UNIT, sums_kind)
        amx = amx_shapes() if self.kind.endswith("amx") else NO_AMX
        wide, code = np.empty(wide_size(self.weights), np.float32), product_code(self.weights)
        return Operand(a, np.empty(rows, np.float32), sums, amx, code, wide)

    def multiply(self, index: int, x: Array, out: Array, *, adds: bool = False, num_parts: int = 1) -> Array:
        """All parts of a product of whole rows x, one after the other; `out` is filled and returned."""
        operand = self.operand(len(x))
        put_rows(x, x.shape[1], self.weights, index, operand, Range(0, len(x)))
        begin_products(operand)
        for part in range(num_parts):
            if self.shapes[index].gated:
                operand.factors[:] = GATED_FACTOR
            mode = GATE if self.shapes[index].gated else ADD if adds else STORE
            product(operand, self.weights, index, Target(out, mode), Part(part, num_parts))
        end_products(operand)
        return out

    def expected(self, index: int, x: Array) -> Array:
        """x @ matrix + bias, in float64."""
        exact = x.astype(np.float64) @ self.matrices[index].numpy().T.astype(np.float64)
        bias = self.biases[index]
        return exact if bias is None else exact + bias.numpy()


def whole_rows(inputs: int) -> Array:
    """What int8 rows, and groups of int4's rows, hold with a scale of 1."""
    rows = np.random.default_rng(inputs).integers(-126, 127, (MAX_ROWS, inputs)).astype(np.float32)
    rows[:, :: min(INT4_GROUPS)] = 127
    return rows


@pytest.mark.parametrize("kind", KINDS)
def test_products_are_exact(kind: str) -> None:
    products = Products.of(kind, SHAPES)
    for index, shape in enumerate(products.shapes):
        x, columns = whole_rows(shape.inputs), -(-shape.columns // 16) * 16
        expected = products.expected(index, x)
        for rows in range(1, MAX_ROWS + 1):
            num_parts = NUM_PARTS[rows % len(NUM_PARTS)]
            blank = np.full((rows, columns), np.nan, np.float32)
            found = products.multiply(index, x[:rows], blank, num_parts=num_parts)
            assert np.array_equal(found[:, : shape.columns], expected[:rows])
            assert not found[:, shape.columns :].any()
            added = products.multiply(index, x[:rows], np.full_like(found, 5.0), adds=True, num_parts=num_parts)
            assert np.array_equal(added, found + 5.0)


@pytest.mark.parametrize("kind", KINDS)
def test_gated_products(kind: str) -> None:
    products = Products.of(kind, GATED)
    for index, shape in enumerate(products.shapes):
        x, half = whole_rows(shape.inputs), shape.columns // 2
        bias = products.biases[index]
        biases = np.zeros(shape.columns) if bias is None else bias.numpy().astype(np.float64)
        sums = (products.expected(index, x) - biases) * GATED_FACTOR + biases
        expected = sums[:, :half] / (1 + np.exp(-sums[:, :half])) * sums[:, half:]
        for rows in range(1, MAX_ROWS + 1):
            blank = np.full((rows, half), np.nan, np.float32)
            found = products.multiply(index, x[:rows], blank, num_parts=NUM_PARTS[rows % len(NUM_PARTS)])
            np.testing.assert_allclose(found, expected[:rows], rtol=1e-5, atol=1e-30)


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_its_batch(kind: str) -> None:
    shapes = [MatrixShape(144, 208), MatrixShape(96, 208, gated=True), MatrixShape(144, 224)]
    products = Products.of(kind, shapes)
    for index, (shape, columns) in enumerate(zip(products.shapes, (144, 48, 144), strict=True)):
        x = np.random.default_rng(1).normal(size=(MAX_ROWS, shape.inputs)).astype(np.float32)
        together = products.multiply(index, x, np.empty((MAX_ROWS, columns), np.float32))
        for first, end in ((0, 1), (69, 70), (3, 5), (5, 8), (9, 16), (11, 28), (20, 53)):
            alone = products.multiply(index, x[first:end], np.empty((end - first, columns), np.float32))
            assert np.array_equal(alone, together[first:end])


@pytest.mark.parametrize("kind", ["float32", "int8"])
@pytest.mark.parametrize("width", [16, 48, 576])
def test_rows_are_put_and_normed(kind: str, width: int) -> None:
    products = Products.of(kind, [MatrixShape(16, width)])
    operand, weights = products.operand(5), products.weights
    depth = int(weights.matrices[0, 2])
    rng = np.random.default_rng(width)
    x = (rng.normal(size=(5, width)) * np.logspace(-4, 4, 5)[:, None]).astype(np.float32)
    x[0] = 0.0
    weight, eps = rng.uniform(0.5, 1.5, width).astype(np.float32), np.float32(1e-5)
    normed = x / np.sqrt((x.astype(np.float64) ** 2).mean(1, keepdims=True) + eps) * weight
    for put, expected in ((put_rows, x), (norm_rows, normed)):
        arguments = (x, width, weights, 0) if put is put_rows else (x, Norm(weight[None], eps), weights, 0)
        for part in (Range(0, 2), Range(2, 5)):
            put(*arguments, operand, part)
        q = operand.a[: 5 * depth].reshape(5, depth)[:, :width]
        if q.dtype == np.uint16:  # int8 without VNNI
            q = q.view(np.int16).reshape(5, -1, 4)[:, :, SHORTS_ORDER].reshape(q.shape)
        found = (q.astype(np.float64) - (128 if q.dtype == np.uint8 else 0)) * operand.factors[:, None]
        level = operand.factors[:, None] if kind == "int8" else 0
        assert (np.abs(found - expected) <= 0.501 * level + 2e-6 * np.abs(expected)).all()


def test_layer_norms_of_rows() -> None:
    width = 96
    products = Products.of("float32", [MatrixShape(16, width)])
    operand, rng = products.operand(3), np.random.default_rng(1)
    x = (100 + rng.normal(size=(3, width))).astype(np.float32)
    weight = rng.normal(size=(2, width)).astype(np.float32)
    norm_rows(x, Norm(weight, np.float32(1e-5)), products.weights, 0, operand, Range(0, 3))
    found = operand.a[: 3 * width].reshape(3, width) * operand.factors[:3, None]
    weights, biases = torch.from_numpy(weight).double()
    expected = torch.nn.functional.layer_norm(torch.from_numpy(x).double(), [width], weights, biases, 1e-5)
    np.testing.assert_allclose(found, expected.numpy(), atol=2e-4)


@pytest.mark.parametrize("kind", ["float32", "int4-32"])
def test_rows_are_put_in_the_order_of_the_matrix(kind: str) -> None:
    """Matrix 1 has an order: its row is that of matrix 0 with the numbers in this order."""
    shapes = [MatrixShape(16, 96, group=32 if kind == "int4-32" else 0)] * 2
    packer = Packer(shapes, torch.uint8 if kind == "int4-32" else torch.float32)
    rng = np.random.default_rng(0)
    packer.put_order(1, torch.from_numpy(rng.permutation(96)))
    products = Products(kind, shapes, [], [], packer.weights)
    order = packer.weights.orders
    assert len(order) == 96
    x, weight = (rng.normal(size=size).astype(np.float32) for size in ((5, 96), (96,)))
    plain, ordered = products.operand(5), products.operand(5)
    put_rows(np.ascontiguousarray(x[:, order]), x.shape[1], packer.weights, 0, plain, Range(0, 5))
    put_rows(x, x.shape[1], packer.weights, 1, ordered, Range(0, 5))
    assert np.array_equal(plain.a, ordered.a)
    assert np.array_equal(plain.factors, ordered.factors)
    eps = np.float32(1e-5)
    norm_rows(np.ascontiguousarray(x[:, order]), Norm(weight[None, order], eps), packer.weights, 0, plain, Range(0, 5))
    norm_rows(x, Norm(weight[None], eps), packer.weights, 1, ordered, Range(0, 5))
    assert np.array_equal(plain.a, ordered.a)
    np.testing.assert_allclose(plain.factors, ordered.factors, rtol=1e-6)  # squares are added in another order


def test_blocks_hold_scales_sums_and_bytes() -> None:
    """The last group of a row is narrower."""
    products = Products.of("int4-64", [MatrixShape(16, 176)])
    operand, x = products.operand(3), np.random.default_rng(0).normal(size=(3, 176)).astype(np.float32)
    x[0] = 0.0
    put_rows(x, x.shape[1], products.weights, 0, operand, Range(0, 3))
    blocks = operand.a[: 3 * 3 * 72].reshape(3, 3, 72)
    for group in range(3):
        block, part = blocks[:, group], x[:, 64 * group : 64 * group + 64]
        q = block[:, 8 : 8 + part.shape[1]].astype(np.int64)
        scales, sums = (
            np.ascontiguousarray(block[:, at : at + 4]).view(kind) for at, kind in ((0, np.float32), (4, np.int32))
        )
        assert np.array_equal(-sums[:, 0], q.sum(1) * (MAX_ZERO if knows_vnni() else 1))
        assert not block[:, 8 + part.shape[1] :].any()
        assert (np.abs(q * scales - part) <= 0.501 * scales).all()


@pytest.mark.parametrize("scale", [2.0**-24, 3.0, 0.1, 60000.0])
def test_scales_of_fp16_are_kept(scale: float) -> None:
    """Also those that are denormal or near the end of fp16's range, beside others of another size in the column."""
    packer = Packer([MatrixShape(16, 64, group=32)], torch.uint8)
    scales = torch.full((16, 2), scale).half().float()
    scales[:, 1] = scales[:, 0] / 64
    packer.put_groups(
        0, torch.full((16, 64), 9, dtype=torch.uint8), scales, torch.full((16, 2), 8, dtype=torch.uint8), None
    )
    operand = Operand(
        np.zeros((1 + TILE_ROWS) * 80, np.int8),
        np.ones(1, np.float32),
        np.empty(2 * TILE_ROWS * UNIT, np.float32),
        NO_AMX,
        product_code(packer.weights),
    )
    x = np.zeros((1, 64), np.float32)
    for group in range(2):
        x[:] = 0.0
        x[0, 32 * group] = 127.0
        put_rows(x, x.shape[1], packer.weights, 0, operand, Range(0, 1))
        out = np.empty((1, 16), np.float32)
        product(operand, packer.weights, 0, Target(out, STORE), Part(0, 1))
        assert np.array_equal(out[0], 127 * scales[:, group].numpy())


def test_code_for_one_kind_of_numbers_contains_no_other() -> None:
    """As the 16 levels of NF4, or their halves, are a part of the code that looks them up."""
    levels = bytes(NF4_LEVELS) if knows_vnni() else bytes(level >> 4 for level in NF4_LEVELS)
    compiled: Any = matmul.multiply
    with_levels = set()
    for numbers in KINDS_IN_GROUPS:
        compiled.address_for(Numbers(numbers))
        signature = (numba.types.TypeRef(Numbers(numbers)), *compiled.arguments)
        if levels in compiled._code._cache.path(signature).read_bytes():
            with_levels.add(numbers)
    assert with_levels == {NF4}


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_every_number_of_two_bytes_is_widened_exactly(dtype: torch.dtype) -> None:
    """Columns hold all numbers that are finite, denormal ones too; each is multiplied by 1."""
    bits = torch.arange(2**16, dtype=torch.int32).to(torch.int16)
    numbers = bits.view(dtype)
    numbers = torch.where(numbers.isfinite(), numbers, torch.zeros_like(numbers))
    packer = Packer([MatrixShape(2**12, 16)], dtype)
    packer.put(0, numbers.reshape(2**12, 16))
    for rows in (1, 3, 16):
        kind, sums_kind = operand_dtypes(packer.weights)
        sums = np.empty(2 * TILE_ROWS * UNIT, sums_kind)
        wide = np.empty(wide_size(packer.weights), np.float32)
        a, code = np.zeros((rows + TILE_ROWS) * 16, kind), product_code(packer.weights)
        operand = Operand(a, np.ones(rows, np.float32), sums, NO_AMX, code, wide)
        put_rows(np.eye(rows, 16, dtype=np.float32), 16, packer.weights, 0, operand, Range(0, rows))
        out = np.empty((rows, 2**12), np.float32)
        product(operand, packer.weights, 0, Target(out, STORE), Part(0, 1))
        expected = numbers.reshape(2**12, 16)[:, :rows].float()
        if dtype == torch.bfloat16 and knows_bf16():  # whose products take denormal numbers as 0
            expected = torch.where(expected.abs() < torch.finfo(dtype).tiny, 0.0, expected)
        assert np.array_equal(out, expected.numpy().T)


def test_every_number_of_fp8_is_widened_exactly() -> None:
    bits = torch.arange(2**8, dtype=torch.int32).to(torch.uint8)
    numbers = torch.where(bits & 0x7F == 0x7F, 0, bits).view(torch.float8_e4m3fn)
    packer = Packer([MatrixShape(2**8, 16, runs=((2**3, 16),))], torch.float8_e4m3fn)
    scales = torch.rand(2**8) + 0.5
    packer.put_forms(0, None, numbers[:, None].repeat(1, 16), scales[:, None], None)
    for rows in (1, 2, 3, 16):
        operand = Operand(
            np.zeros((rows + TILE_ROWS) * 16, np.float32),
            np.ones(rows, np.float32),
            np.empty(2 * TILE_ROWS * UNIT, np.float32),
            NO_AMX,
            product_code(packer.weights),
            np.empty(wide_size(packer.weights), np.float32),
        )
        put_rows(np.eye(rows, 16, dtype=np.float32), 16, packer.weights, 0, operand, Range(0, rows))
        out = np.empty((rows, 2**8), np.float32)
        product(operand, packer.weights, 0, Target(out, STORE), Part(0, 1))
        assert np.array_equal(out, (numbers.float() * scales).repeat(rows, 1).numpy())


def test_spilled_vectors_are_aligned() -> None:
    """The function that contains a tile aligns its stack frame to vectors."""
    tile: Any = multiply_tile

    def multiply(a: Address, b: Address, sums: Address, depth: int) -> None:
        tile(TileProduct(Matrix(a, 256), Matrix(b, 256), Matrix(sums, 128)), depth, 12, 2, np.float32(0))

    untyped: Any = numba
    compiled = untyped.njit(**OPTIONS)(multiply)
    compiled.compile("void(intp, intp, intp, intp)")
    assert "andq\t$-64, %rsp" in next(iter(compiled.inspect_asm().values()))


def test_a_rank_may_have_no_outputs_of_a_matrix() -> None:
    packer = Packer([MatrixShape(0, 64)], torch.int64)
    of_groups = torch.empty(0, 2)
    packer.put_steps(0, torch.empty(0, 64).byte(), torch.empty(0), of_groups.byte(), of_groups.char(), None)
    assert not packer.weights.packed.size
