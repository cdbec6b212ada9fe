"""Types of kernel arguments: arrays, addresses, the parts of threads, the named tuples of products and attention.

numba ignores the annotations. The innermost loops take addresses instead of arrays, because an array is a counted
reference and counting costs as much as a small tile.
"""

from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Address: TypeAlias = int
"""Byte address of an array's element, from `vectors.address`. Nothing checks the bounds."""
Element: TypeAlias = np.generic
"""Any element of an array. Kernels look at its dtype only, at compile time."""
Array: TypeAlias = NDArray[np.generic]
Floats: TypeAlias = NDArray[np.float32]
Halves: TypeAlias = NDArray[np.uint16]
"""bf16 or fp16 numbers as their 16 bits: numba has neither type on CPU."""
Bytes: TypeAlias = NDArray[np.uint8]
Int32s: TypeAlias = NDArray[np.int32]
Int64s: TypeAlias = NDArray[np.int64]
UInt64s: TypeAlias = NDArray[np.uint64]

SILU, GELU, GELU_TANH, RELU, RELU2, XIELU, CLAMPED_SWIGLU = range(7)
"""Activations of MLPs, which `activations.py` computes."""
SWIGLU_ALPHA, SWIGLU_LIMIT = 1.702, 7.0
"""CLAMPED_SWIGLU: (up + 1) * gate * sigmoid(SWIGLU_ALPHA * gate); gate up to the limit, up from minus it to it."""
SOFTMAX, SIGMOID, SPARSE_MIXER = range(3)
"""How a router's outputs become scores, which `routing.py` computes."""
INPUT_NORM, POST_NORM, ATTENTION_OUT_NORM, MLP_OUT_NORM = range(4)
INPUT_OUT_NORM, MLP_ONLY_NORM, ROUTER_NORM, EXPERTS_NORM, EXPERTS_OUT_NORM = range(4, 9)
"""Norms of a layer, in `ModelConstants.norms`: all layers have the first two, a sandwich four, Gemma 4 all."""
HIDDEN = -1e30
"""The score of keys that a query does not see. Finite, because compiled code takes for granted that numbers are."""


class Part(NamedTuple):
    """The part of the work that one thread does: number `number` of `num_parts` equal parts."""

    number: int
    num_parts: int


class Range(NamedTuple):
    """A range of rows, tokens, heads or units: [first, end)."""

    first: int
    end: int


class Matrix(NamedTuple):
    """A matrix in memory: the address of its first row (packed weights: panel) and the bytes from one to the next."""

    address: Address
    step: int


WEIGHT_AT, COLUMN_AT, DEPTH, NUM_COLUMNS, GROUP, ORDER_END, NUMBERS = range(7)
"""Columns of `Weights.matrices`: index of the matrix's first weight, index of its first column, elements of a row of
`Operand.a`, columns to store, inputs that share a scale (int4; else 0), end of its order in `orders` (0: its inputs are
in order), what its numbers are (int4, see FOUR_BITS; else 0).
"""


class Weights(NamedTuple):
    """All matrices of a model. Columns are padded to whole units."""

    packed: Array  # flat, panels of 16 columns: see packing.DTYPES, and for int4 nibbles.py and steps.py
    scales: Floats  # flat, one for each column
    offsets: Int32s  # flat, one for each column: what the zero point of `Operand.a` adds to int32 sums
    biases: Floats  # flat, one for each column
    matrices: Int64s  # [num_matrices, 7]: see WEIGHT_AT
    orders: Int32s  # flat: of a matrix with an order, the input that each place of a row of `a` holds
    units: Int64s  # fp8: [num_units, 2], bytes of the matrix before each unit, and the unit's form; else [0, 2]


NO_WINDOW = int(np.iinfo(np.int32).max)
"""A sliding window that no context reaches."""


class Window(NamedTuple):
    """A query at position p sees the tokens from `p // step * step + 1 - size` on. A sliding window has steps of 1, a
    chunk of `step` tokens the size 1.
    """

    size: int
    step: int = 1


Cache: TypeAlias = Array
"""A KV cache as a flat array: of its dtype, or of bytes, as kernels get it."""


class HeadShape(NamedTuple):
    """Heads of a model and slots of its cache."""

    num_heads: int
    num_kv_heads: int
    head_dim: int  # a multiple of KEYS
    row_bytes: int  # bytes of one head of one token in the cache, keys or values
    block_size: int
    num_slots: int
    num_planes: int  # arrays of a layer's cache: keys and values, or rows that are both
    scale: np.float32  # factor of the scores, times log2(e): softmax uses powers of two
    softcap: np.float32 = np.float32(0.0)  # of the scores, times log2(e); 0: none


class KernelRotations(NamedTuple):
    """How heads are rotated: cosines and sines for each kind of layers, and which of them a token has."""

    rows: Int64s  # [num_tokens]: of the arrays below
    cos: Floats  # [kinds of layers, rows, largest head_dim]; no kind without rotary positions
    sin: Floats  # like cos; the first half is negated
    query_factors: Floats  # [kinds of layers, rows], of rotated queries; no kind without


_NO_ANGLES: Floats = np.empty((0, 0, 0), np.float32)
NO_ROTATIONS = KernelRotations(np.empty(0, np.int64), _NO_ANGLES, _NO_ANGLES, np.empty((0, 0), np.float32))


class Batch(NamedTuple):
    """A step's tokens, flattened. A sequence's tokens are rows [query_starts[seq], query_starts[seq + 1]). Layers of a
    group find a token in the same slot.
    """

    slots: Int64s  # [num_tokens, groups]
    segments: Int64s  # [num_seqs, groups * max_blocks * block_size / KEYS]: first slot of each KEYS tokens
    context_lens: Int32s  # [num_seqs]: tokens of each sequence, those of this step included
    prompt_lens: Int32s  # [num_seqs]: tokens of the prompt among them
    query_starts: Int32s  # [num_seqs + 1]
    rotations: KernelRotations


class Queries(NamedTuple):
    """Query rows and attention's result. TILE_ROWS rows past the last row may be read."""

    rows: Floats  # flat [num_tokens, step]; the first num_heads * head_dim numbers of a row are read
    step: int
    out: Floats  # flat [num_tokens, out_step]; the first num_heads * head_dim numbers of a row are written
    out_step: int


class AttentionScratch(NamedTuple):
    """Memory of one thread, made by `Buffers.attention`. All arrays are flat. Its size does not grow with the context.

    Prompts in fp32 use `keys` and `values`; prompts in bf16 use `keys16`, `values16` and `rows16`. The unused arrays
    are empty, and `keys16` decides at run time. `block`: keys of a prompt that are packed at once, see keys_at_once.
    """

    scores: Floats  # prompts: [queries of a tile, block + KEY_TILE]; decode: [query heads, keys of a split]
    keys: Floats  # panels of one head: [block / 16, head_dim, 16]
    values: Floats  # [head_dim / 16, block, 16]
    keys16: Halves  # [block / 16, head_dim / 2, 16, 2]
    values16: Halves  # [head_dim / 16, block / 2, 16, 2]
    rows16: Halves  # queries of a tile or their weights, or a segment before it is packed
    tile: Floats  # sums of a tile [queries, KEY_TILE], or rows of KV [keys, head_dim] as they are converted
    factors: Floats  # prompts: scale down what each query of a tile has summed; decode: scale each head's scores
    peaks: Floats  # of a prompt: each query's highest score so far, for the heads that share keys
    totals: Floats  # like peaks: sums of powers so far
    prepared: Bytes  # queries for the products with KV: decode_rounding.prepare_queries, shared_rows.attend_shared


class Splits(NamedTuple):
    """Results of decode attention for each split of a context, where it has several: see decode.py. Shared by threads.

    `rows` is [splits, num_heads, head_dim]: values weighted by 2^(score - peak). `peaks` and `totals` are
    [splits, num_heads]: highest score, in powers of two, and sum of these weights.
    """

    rows: Floats
    peaks: Floats
    totals: Floats


NO_SLOPES: Floats = np.empty(0, np.float32)
NO_SINKS: Floats = np.empty((0, 0), np.float32)


class CacheCode(NamedTuple):
    """The code for a type of KV: addresses of pieces (pieces.py)."""

    attend_prompt: Address  # of batch.attend_prompt
    attend_token: Address  # of batch.attend_token
    write_token: Address  # of cache_rows.write_token


class Attending(NamedTuple):
    """One thread's arguments of attention in layers with heads of this shape."""

    queries: Queries
    shape: HeadShape
    batch: Batch
    scratch: AttentionScratch
    splits: Splits
    code: CacheCode
    slopes: Floats = NO_SLOPES  # of ALiBi, for each query head, times log2(e); empty without
    sinks: Floats = NO_SINKS  # [num_layers, num_heads], times log2(e); [0, 0] without


class AttentionMemory(NamedTuple):
    """The addresses of what `Attending` holds, made by `batch.memory_of`, and what else small functions need.

    Small functions get these: to pass on a tuple of arrays is to count the references of all of them.
    """

    query_rows: Address
    query_bytes: int  # from row to row
    out: Address
    out_bytes: int
    segments: Address  # first slot of each segment in the layer's group, int64
    num_segments: int  # of a sequence
    segments_bytes: int  # from sequence to sequence
    num_seqs: int
    scores: Address
    keys: Address  # packed, in fp32 or bf16; the same for values
    values: Address
    rows16: Address
    tile: Address
    factors: Address
    peaks: Address
    totals: Address
    prepared: Address
    split_rows: Address
    split_peaks: Address
    split_totals: Address
    in_bf16: bool
    slopes: Address  # 0 without ALiBi
    sinks: Address  # of the layer; 0 without


class LayerPlace(NamedTuple):
    """A layer of the model, and the place of the KV that it reads."""

    layer: int
    number: int  # of the layer of the cache
    group: int  # see Batch
    is_own: bool  # the layer writes this KV; False: an earlier one does


class LayerKV(NamedTuple):
    """Keys and values of one layer in the cache."""

    keys: Address
    values: Address
    element: Element
    window: Window


class ProductCode(NamedTuple):
    """The code of products for weights of a type: addresses of pieces (pieces.py), and bytes of a number."""

    multiply: Int64s  # addresses of matmul.multiply for each kind of numbers (FOUR_BITS, ...); 0: no matrix has it
    put: Address  # of operand_rows.put_values
    weight_bytes: int
    operand_bytes: int


_NOT_WIDE: Floats = np.empty(0, np.float32)


class Operand(NamedTuple):
    """The left operand of products, and a thread's sums."""

    a: Array  # flat: bytes of numbers as in packing.operand_dtypes. TILE_ROWS rows past the last row may be read
    factors: Floats  # [rows], of each row's result
    sums: Array  # [2 * TILE_ROWS, UNIT] int32 or fp32, not shared with other threads
    amx: Bytes  # 64 bytes that configure the tile registers; empty: no AMX, as for all types but int8 and bf16
    code: ProductCode  # for the weights
    wide: Floats = _NOT_WIDE  # the weights of a unit, widened, not shared either; too small: not widened ahead


class Routing(NamedTuple):
    """The routers of a model (routing.py), and the facts of engine.models.experts_config.ExpertsConfig that they
    have.
    """

    routers: Floats  # [num_layers, panels, hidden, 16]: outputs of the router in panels
    router_biases: Floats  # [num_layers, num_experts]; [num_layers, 0] without
    choice_biases: Floats  # [num_layers, num_experts]; [num_layers, 0] without
    shared_gates: Floats  # [num_layers, 1, hidden]; [num_layers, 0, hidden]: the shared expert's weight is 1
    expert_factors: Floats  # [num_layers, num_experts], of the weights of chosen experts; [num_layers, 0] without
    num_experts: int
    top_k: int
    normalised: bool
    scoring: int  # SOFTMAX, SIGMOID or SPARSE_MIXER
    num_groups: int
    top_groups: int
    group_best: int
    biases_outputs: bool  # choice_biases are added to outputs, not to scores
    routed_scale: np.float32
    mixer_range: np.float32
    share_floor: np.float32


class RoutedRows(NamedTuple):
    """Buffers of a layer with experts, which all threads share. A copy is a row of one expert: first those that were
    routed, expert by expert, then one of each token for the shared expert.
    """

    normed: Floats  # [num_tokens, hidden]
    scores: Floats  # [num_tokens, experts, padded to whole panels]
    chosen: Int64s  # [num_tokens, top_k]
    weights: Floats  # [num_tokens, top_k + 1]: of the chosen experts, then of the shared one
    gate_up: Floats  # flat: panels of gates and ups of all copies; [0] with SILU
    inner: Floats  # flat: inner rows of all copies
    results: Floats  # [copies, hidden]
