"""The hashes that name blocks of KV.

Prefix caches and KV-aware placement name full blocks by chained hashes. A block's hash covers the block's tokens and
the parent block's hash; through the parent it covers all earlier tokens and the scope (model, tenant and adapter).
Equal hashes therefore mean equal KV. (Automatic prefix caching as in vLLM; Kwon et al. 2023.) An encoder attends to
later tokens as well. For encoders every hash covers the whole prompt, and only equal prompts share KV.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

BlockHash = bytes
_HASH_BYTES = 16


def root_hash(scope: str, whole_prompt: Sequence[int] = ()) -> BlockHash:
    """Return the parent hash of the first block. `scope` is a request's `kv_scope`. Pass `whole_prompt` if KV depends
    on the whole prompt."""
    root = blake2b(scope.encode(), digest_size=_HASH_BYTES, person=b"tandem-prefix").digest()
    return next_hash(root, whole_prompt) if whole_prompt else root


def next_hash(parent: BlockHash, token_ids: Sequence[int]) -> BlockHash:
    """Return the hash of the block that holds `token_ids` and follows the block with hash `parent`."""
    return blake2b(parent + array("I", token_ids).tobytes(), digest_size=_HASH_BYTES).digest()


def state_hash(block_hash: BlockHash) -> BlockHash:
    """Return the hash that announces a recurrent state at the end of this block, beside the block's own."""
    return next_hash(block_hash, ())


def state_block_hashes(block_hash: BlockHash, state_blocks: int) -> list[BlockHash]:
    """Return the hashes that name the blocks of this state one by one."""
    return [next_hash(state_hash(block_hash), (place,)) for place in range(state_blocks)]


def group_hash(block_hash: BlockHash, group: int) -> BlockHash:
    """Return the hash of the block of this group of layers for the same tokens: group 0 has the tokens' own."""
    if group == 0:
        return block_hash
    return blake2b(block_hash + bytes((group,)), digest_size=_HASH_BYTES, person=b"tandem-group").digest()


def block_hashes(
    token_ids: Sequence[int], block_size: int, scope: str, whole_prompt: Sequence[int] = ()
) -> list[BlockHash]:
    """Return the hashes of all full blocks of `token_ids`, in order. For `whole_prompt` see `root_hash`."""
    hashes: list[BlockHash] = []
    parent = root_hash(scope, whole_prompt)
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = next_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes
