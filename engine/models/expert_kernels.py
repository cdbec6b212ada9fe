"""Triton kernels of a mixture of experts: products of rows with the matrices of the experts that they have chosen.

Imported only where Triton is installed; see engine/attention/triton_kernels.py for its interpreter and its compiler. A
row makes `top_k` choices. Choice c is made by row c // top_k, and names an expert. Matrices of experts lie apart, each
where it was loaded: `weights` is the first one, and `offsets` say how many numbers after it each begins.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["first_expert", "num_choices", "max_rows"])
def list_choices(chosen, listed, counts, first_expert, num_choices, max_rows, AT_ONCE: tl.constexpr):
    """List the choices that name an expert, in their order. Grid: (experts,), the first of which is `first_expert`.

    chosen: [num_choices] int64. listed: [experts, max_rows] int32, of which `counts` [experts] int32 are written.
    """
    expert = tl.program_id(0)
    count = 0
    for first in range(0, num_choices, AT_ONCE):
        choice = first + tl.arange(0, AT_ONCE)
        named = tl.load(chosen + choice, mask=choice < num_choices, other=-1)
        is_named = (named == first_expert + expert).to(tl.int32)
        at = count + tl.cumsum(is_named, 0) - 1
        tl.store(listed + expert * max_rows + at, choice, mask=is_named > 0)
        count += tl.sum(is_named, 0)
    tl.store(counts + expert, count)


@triton.jit(do_not_specialize=["max_rows"])
def multiply_chosen(
    x,
    out,
    weights,
    offsets,
    biases,
    shares,
    listed,
    counts,
    max_rows,
    CHOICES_PER_ROW: tl.constexpr,
    WIDTH: tl.constexpr,
    DEPTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STEP: tl.constexpr,
    HAS_BIASES: tl.constexpr,
    HAS_SHARES: tl.constexpr,
):
    """Multiply rows of x [.., DEPTH] with the matrices [WIDTH, DEPTH] of their experts -> out [choices, WIDTH]. Grid:
    (experts, tiles of COLUMNS outputs). Choice c reads row c // CHOICES_PER_ROW of x. Choices that are not listed are
    not written. With HAS_BIASES a product gets the expert's biases [experts, WIDTH]; then, with HAS_SHARES, it is
    multiplied by the choice's share.
    """
    expert = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    is_column = column < WIDTH
    step = tl.arange(0, STEP)
    count = tl.load(counts + expert)
    # Without the hint, numbers would be loaded one by one: the compiler cannot know how what it loads is aligned.
    weight = weights + tl.multiple_of(tl.load(offsets + expert), 16)
    weight_at = weight + column[:, None].to(tl.int64) * DEPTH + step[None, :]
    for first in range(0, count, ROWS):
        slot = first + tl.arange(0, ROWS)
        is_row = slot < count
        choice = tl.load(listed + expert * max_rows + slot, mask=is_row, other=0).to(tl.int64)
        x_at = x + (choice // CHOICES_PER_ROW)[:, None] * DEPTH + step[None, :]
        total = tl.zeros([ROWS, COLUMNS], tl.float32)
        for depth in range(0, DEPTH, STEP):
            is_step = (depth + step < DEPTH)[None, :]
            rows = tl.load(x_at + depth, mask=is_row[:, None] & is_step, other=0.0)
            matrix = tl.load(weight_at + depth, mask=is_column[:, None] & is_step, other=0.0)
            total = tl.dot(rows, tl.trans(matrix), total, input_precision="ieee")
        if HAS_BIASES:
            bias = tl.load(biases + expert * WIDTH + column, mask=is_column, other=0.0)
            total += bias.to(tl.float32)[None, :]
        if HAS_SHARES:
            total *= tl.load(shares + choice, mask=is_row, other=0.0).to(tl.float32)[:, None]
        out_at = out + choice[:, None] * WIDTH + column[None, :]
        tl.store(out_at, total.to(out.dtype.element_ty), mask=is_row[:, None] & is_column[None, :])
