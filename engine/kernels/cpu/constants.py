"""Sizes and number formats that several kernels share. A size of a vector or a cache line is a property of AVX-512."""

FLOAT_BYTES = 4
HALF_BYTES = 2
"""Bytes of a number in fp16 or bf16."""
VECTOR_BYTES = 64
CACHE_LINE_BYTES = 64
LANES = 16
"""fp32 or int32 numbers in a vector."""
GROUP = 4
"""Bytes that one VNNI instruction multiplies and adds up in one lane."""
KEYS = 16
"""Tokens of a KV segment: one score of each fills a vector. Block sizes and head_dim are multiples of it."""
PANEL = 16
"""Columns of a panel of packed weights."""
UNIT = 2 * PANEL
"""Columns of a unit: a thread's share of a product is a number of whole units."""
TILE_ROWS = 32
"""Maximum rows of a product's tile. Kernels may read this many rows past the last row of an operand."""
QUERY_TILE_ROWS = 12
"""Queries of a prompt that are multiplied at once in fp32."""
KEY_TILE = 2 * KEYS
"""Keys that are multiplied at once with a tile of queries."""
QUERY_BLOCK = 4 * QUERY_TILE_ROWS
"""Queries that share one pass over the keys, in fp32."""
AMX_QUERY_BLOCK = 32
"""Queries that share one pass over the keys, in bf16: two AMX tiles."""
AMX_DEPTH = 32
"""bf16 numbers in a row of an AMX tile; head_dim must be a multiple of it."""
MAX_QUERY_ROWS = 3
"""Maximum query rows that share one read of the cache in decode attention."""

INT8_LEVELS = 127.0
"""Largest magnitude of a quantised number."""
ZERO_POINT = 128
"""The unsigned byte that stands for 0 in quantised activations."""
LIMBS_TAIL_BYTES = 64
"""Bytes behind a query that was split into two bytes a number: what the keys' zero point adds to each sum."""
LOG2_E = 1.4426950408889634
