"""Triton kernels of TritonAttention: attention over the paged cache, and the write of a step's keys and values.

Imported only where Triton is installed. With TRITON_INTERPRET=1 in the environment at import, Triton's interpreter runs
them on CPU tensors, slowly; so tests compare them to torch without a GPU. The compiler accepts less of Python than the
interpreter, such as no `or` of three terms, and a variable that a loop carries keeps its type.

A tile is ROWS rows of scores: the `GROUP` query heads that read one KV head, for as many neighbouring queries as fit.
Keys are read in tiles of KEYS, which begin at multiples of KEYS in the sequence whatever else the step computes. With
them, softmax is computed online (Milakov and Gimelshein 2018), in base 2. With SPLIT, the keys of a sequence are cut at
multiples of SPLIT, and several programs attend to the parts (Flash-Decoding, Dao et al. 2023); `combine_splits` joins
them. So the result of a row depends on the length of its own sequence, and not on others in the batch.
"""

import triton
import triton.language as tl

_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _to_e4m3(numbers):
    """The bytes of fp8, rounded to nearest even. More than 448 becomes 448; NaN stays NaN. By whole numbers, because
    Triton converts to fp8 from compute capability 8.9 on, and its interpreter does not round right.
    """
    bits = numbers.to(tl.float32).to(tl.int32, bitcast=True)
    size = tl.minimum(bits & 0x7FFFFFFF, 0x43E00000)  # of 448
    # fp32 has 20 more bits of fraction, and its exponent counts from 127, not from 7.
    normal = ((size + 0x7FFFF + ((size >> 20) & 1)) >> 20) - (120 << 3)
    # Less than 2^-6 is a multiple of 2^-9, to which the sum with 2^14 is rounded.
    small = (size.to(tl.float32, bitcast=True) + 16384.0).to(tl.int32, bitcast=True) - 0x46800000
    rounded = tl.where(size < 0x3C800000, small, normal)
    rounded = tl.where((bits & 0x7FFFFFFF) > 0x7F800000, 0x7F, rounded)
    return (rounded | ((bits >> 24) & 0x80)).to(tl.uint8)


@triton.jit
def _of_e4m3(stored):
    """The numbers, in fp32, of bytes of fp8: as fp16, whose exponent counts from 15 and not from 7, they are too small
    by 2^8.
    """
    wide = stored.to(tl.uint16)
    half = (((wide & 0x80) << 8) | ((wide & 0x7F) << 7)).to(tl.float16, bitcast=True)
    return tl.where((wide & 0x7F) == 0x7F, float("nan"), half.to(tl.float32) * 256.0)


@triton.jit
def _load_cached(at, mask, dtype: tl.constexpr):
    """Numbers of the cache in this type, 0 outside of the mask. A cache of bytes is one in fp8."""
    stored = tl.load(at, mask=mask, other=0)
    if stored.dtype == tl.uint8:
        stored = _of_e4m3(stored)
    return stored.to(dtype)


@triton.jit
def write_rows(
    keys,
    values,
    cache,
    slots,
    key_stride,
    key_head_stride,
    value_stride,
    value_head_stride,
    values_at,
    ROW: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_ROW: tl.constexpr,
):
    """Write a token's keys and values to its slot. Grid: (num_tokens,). ROW: numbers of all KV heads of a token;
    values_at: distance from the keys of a slot to its values. A cache of bytes gets fp8.
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, PADDED_ROW)
    is_column = columns < ROW
    head, dim = columns // HEAD_DIM, columns % HEAD_DIM
    to = cache + tl.load(slots + token) * ROW + columns
    key = tl.load(keys + token * key_stride + head * key_head_stride + dim, mask=is_column)
    value = tl.load(values + token * value_stride + head * value_head_stride + dim, mask=is_column)
    if cache.dtype.element_ty == tl.float16:
        # As in `dtypes.pair_as_stored`: a key of 65,520 becomes infinity.
        largest = tl.max(tl.where(is_column, tl.abs(key.to(tl.float32)), 0.0), 0)
        value = tl.where(largest >= 65520.0, float("nan"), value.to(tl.float32))
    if cache.dtype.element_ty == tl.uint8:
        key = _to_e4m3(key)
        value = _to_e4m3(value)
    tl.store(to, key.to(cache.dtype.element_ty), mask=is_column)
    tl.store(to + values_at, value.to(cache.dtype.element_ty), mask=is_column)


@triton.jit
def _attend_keys(
    q,
    position,
    slope,
    start,
    end,
    cache,
    table,
    kv_head,
    values_at,
    scale,
    softcap,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
):
    """Largest scores [ROWS], sums of weights [ROWS] and weighted values [ROWS, PADDED_DIM] over the keys [start, end)
    of a sequence. q: [ROWS, PADDED_DIM]; position, slope: of its rows, [ROWS, 1]; table: the sequence's row of tables.
    """
    dims = tl.arange(0, PADDED_DIM)
    is_dim = (dims < HEAD_DIM)[None, :]
    largest = tl.full([ROWS], -float("inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    mixed = tl.zeros([ROWS, PADDED_DIM], tl.float32)
    for first_key in range(start // KEYS * KEYS, end, KEYS):
        key = first_key + tl.arange(0, KEYS)
        is_key = key < end
        block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        slot = block * BLOCK_SIZE + key % BLOCK_SIZE
        k_at = cache + ((slot * NUM_KV_HEADS + kv_head) * HEAD_DIM)[:, None] + dims[None, :]
        k = _load_cached(k_at, is_key[:, None] & is_dim, q.dtype)
        # "ieee": by default, products of fp32 would be rounded to TF32.
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        if HAS_SOFTCAP:
            # tanh, which Triton has in a library for CUDA only
            away = tl.exp2(tl.maximum(scores, -scores) / softcap * (-2 * _LOG2_E))
            scores = softcap * tl.where(scores < 0, away - 1, 1 - away) / (1 + away)
        if HAS_ALIBI:
            scores -= slope * (position - key[None, :])
        is_seen = is_key[None, :] & (key[None, :] <= position)
        if WINDOW:
            is_seen = is_seen & (key[None, :] > position - WINDOW)
        scores = tl.where(is_seen, scores * _LOG2_E, -float("inf"))
        now_largest = tl.maximum(largest, tl.max(scores, 1))
        # A row that has seen no key yet has no largest score, and infinity minus infinity is NaN.
        base = tl.where(now_largest == -float("inf"), 0.0, now_largest)
        weights = tl.exp2(scores - base[:, None])
        decay = tl.exp2(largest - base)
        total = total * decay + tl.sum(weights, 1)
        v = _load_cached(k_at + values_at, is_key[:, None] & is_dim, q.dtype)
        mixed = mixed * decay[:, None] + tl.dot(weights.to(q.dtype), v, input_precision="ieee")
        largest = now_largest
    return largest, total, mixed


@triton.jit(do_not_specialize=["first_seq", "max_queries", "num_splits", "table_stride"])
def attend_tiles(
    queries,
    out,
    partials,
    stats,
    cache,
    tables,
    context_lens,
    query_starts,
    slopes,
    sinks,
    scale,
    softcap,
    first_seq,
    max_queries,
    num_splits,
    table_stride,
    query_stride,
    query_head_stride,
    values_at,
    MIN_QUERIES: tl.constexpr,
    GROUP: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_ALIBI: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Attend from one tile of a sequence to its keys, or to some splits of them. Grid: (sequences, KV heads x tiles of
    the longest sequence, programs). Sequences with fewer than MIN_QUERIES or more than max_queries queries are skipped.

    SPLIT, WINDOW: 0 for none. With SPLIT, the programs take turns at the splits that the sequence has now, and write
    sums and maxima for `combine_splits` instead of the result: partials [sequences, max_queries, heads, num_splits,
    HEAD_DIM], stats [.., num_splits, 2], both fp32. So a grid for contexts that are much longer costs little.
    """
    seq = first_seq + tl.program_id(0)
    tile, kv_head = tl.program_id(1) // NUM_KV_HEADS, tl.program_id(1) % NUM_KV_HEADS
    first_row = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - first_row
    context_len = tl.load(context_lens + seq)
    first_query = tile * (ROWS // GROUP)
    if (first_query >= num_queries) | (num_queries < MIN_QUERIES) | (num_queries > max_queries):
        return

    # Keys [start, end) that some row of the tile sees.
    num_cached = context_len - num_queries
    start = 0
    end = tl.minimum(num_cached + first_query + ROWS // GROUP, context_len)
    if WINDOW:
        start = tl.maximum(num_cached + first_query - WINDOW + 1, 0)

    rows, dims = tl.arange(0, ROWS), tl.arange(0, PADDED_DIM)
    query, head = first_query + rows // GROUP, kv_head * GROUP + rows % GROUP
    is_row = (rows < ROWS // GROUP * GROUP) & (query < num_queries)
    is_out = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    position = (num_cached + query)[:, None]
    row = (first_row + query).to(tl.int64)
    q_at = row * query_stride + head * query_head_stride
    q = tl.load(queries + q_at[:, None] + dims[None, :], mask=is_out, other=0.0)
    slope = tl.zeros([ROWS, 1], tl.float32)
    if HAS_ALIBI:
        slope = tl.load(slopes + head, mask=is_row, other=0.0)[:, None]
    table = tables + seq * table_stride.to(tl.int64)

    if SPLIT:
        first_split = 0  # that the sequence's first query sees
        if WINDOW:
            first_split = tl.maximum(num_cached - WINDOW + 1, 0) // SPLIT
        past_split = (end + SPLIT - 1) // SPLIT - first_split
        for split in range(tl.program_id(2), past_split, tl.num_programs(2)):
            cut = (first_split + split) * SPLIT
            largest, total, mixed = _attend_keys(
                q,
                position,
                slope,
                tl.maximum(start, cut),
                tl.minimum(end, cut + SPLIT),
                cache,
                table,
                kv_head,
                values_at,
                scale,
                softcap,
                NUM_KV_HEADS,
                HEAD_DIM,
                PADDED_DIM,
                BLOCK_SIZE,
                ROWS,
                KEYS,
                WINDOW,
                HAS_SOFTCAP,
                HAS_ALIBI,
            )
            part = (tl.program_id(0) * max_queries + query).to(tl.int64) * (NUM_KV_HEADS * GROUP) + head
            at = part * num_splits + split
            tl.store(partials + at[:, None] * HEAD_DIM + dims[None, :], mixed, mask=is_out)
            tl.store(stats + 2 * at, largest, mask=is_row)
            tl.store(stats + 2 * at + 1, total, mask=is_row)
    else:
        largest, total, mixed = _attend_keys(
            q,
            position,
            slope,
            start,
            end,
            cache,
            table,
            kv_head,
            values_at,
            scale,
            softcap,
            NUM_KV_HEADS,
            HEAD_DIM,
            PADDED_DIM,
            BLOCK_SIZE,
            ROWS,
            KEYS,
            WINDOW,
            HAS_SOFTCAP,
            HAS_ALIBI,
        )
        if HAS_SINKS:
            total += tl.exp2(tl.load(sinks + head, mask=is_row, other=0.0) * _LOG2_E - largest)
        at = (row * (NUM_KV_HEADS * GROUP) + head) * HEAD_DIM
        result = mixed / tl.where(is_row, total, 1.0)[:, None]
        tl.store(out + at[:, None] + dims[None, :], result.to(out.dtype.element_ty), mask=is_out)


@triton.jit(do_not_specialize=["first_seq", "max_queries", "num_splits"])
def combine_splits(
    partials,
    stats,
    out,
    context_lens,
    query_starts,
    sinks,
    first_seq,
    max_queries,
    num_splits,
    NUM_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PADDED_DIM: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
    HAS_SINKS: tl.constexpr,
):
    """Join what `attend_tiles` wrote for one row and head. Grid: (sequences x max_queries, heads)."""
    index, head = tl.program_id(0), tl.program_id(1)
    seq, query = first_seq + index // max_queries, index % max_queries
    first_row = tl.load(query_starts + seq)
    num_queries = tl.load(query_starts + seq + 1) - first_row
    if (query >= num_queries) | (num_queries > max_queries):
        return
    num_cached = tl.load(context_lens + seq) - num_queries
    position = num_cached + query
    start, end = 0, position // SPLIT + 1
    if WINDOW:  # splits count from the first that the sequence's first query sees
        first_split = tl.maximum(num_cached - WINDOW + 1, 0) // SPLIT
        start = tl.maximum(position - WINDOW + 1, 0) // SPLIT - first_split
        end -= first_split
    dims = tl.arange(0, PADDED_DIM)
    is_dim = dims < HEAD_DIM
    largest = -float("inf")
    total = 0.0
    mixed = tl.zeros([PADDED_DIM], tl.float32)
    for first in range(start, end, SPLITS_AT_ONCE):
        split = first + tl.arange(0, SPLITS_AT_ONCE)
        is_split = split < end
        at = (index.to(tl.int64) * NUM_HEADS + head) * num_splits + split
        maxima = tl.load(stats + 2 * at, mask=is_split, other=-float("inf"))
        totals = tl.load(stats + 2 * at + 1, mask=is_split, other=0.0)
        sums = tl.load(partials + at[:, None] * HEAD_DIM + dims[None, :], mask=is_split[:, None] & is_dim, other=0.0)
        now_largest = tl.maximum(largest, tl.max(maxima, 0))
        weights, decay = tl.exp2(maxima - now_largest), tl.exp2(largest - now_largest)
        total = total * decay + tl.sum(weights * totals, 0)
        mixed = mixed * decay + tl.sum(weights[:, None] * sums, 0)
        largest = now_largest
    if HAS_SINKS:
        total += tl.exp2(tl.load(sinks + head) * _LOG2_E - largest)
    at = ((first_row + query).to(tl.int64) * NUM_HEADS + head) * HEAD_DIM
    tl.store(out + at + dims, (mixed / total).to(out.dtype.element_ty), mask=is_dim)
