"""The KV cache: block pool, block tables, and the memory of the blocks.

block_pool.py          blocks by id: who holds them, and an index by content; eviction.py: which go first
block_tables.py        the blocks of each sequence; block_sharing.py, windows.py and snapshots.py are its parts
cache.py               the tensors that hold keys and values, of types in dtypes.py, with scales.py in fp8
page_commits.py        has the system map the cache's pages before they are written, on CPU
sharded_cache.py       the caches of several ranks as one
budget.py              how much memory KV gets
disk.py                where evicted blocks are kept; block_copies.py: blocks between a GPU and host memory

Blocks and tables are pure (ints and lists; no torch, no grpc).
"""
