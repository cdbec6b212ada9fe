"""PrefixChain: which part of a prompt workers have cached."""

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from mesh.domain.block_hashes import BlockHash, next_hash, root_hash, state_hash
from router.workers.membership import WorkerView


class PrefixChain:
    """Block hashes of a prompt, computed lazily as far as some worker has them cached, and only once."""

    def __init__(self, token_ids: Sequence[int], kv_scope: str, whole_prompt: Sequence[int] = ()) -> None:
        self._token_ids = token_ids
        self._root = root_hash(kv_scope, whole_prompt)
        self._hashes: list[BlockHash] = []
        self._states: dict[int, BlockHash] = {}

    def num_cached_tokens(self, view: WorkerView) -> int:
        """Number of leading prompt tokens whose blocks this worker has cached."""
        if not view.cached:
            return 0
        size = view.info.layout.block_size
        num_blocks = 0
        while (num_blocks + 1) * size <= len(self._token_ids) and self._hash(num_blocks, size) in view.cached:
            num_blocks += 1
        return num_blocks * size

    def num_reusable_tokens(self, view: WorkerView) -> int:
        """Number of leading prompt tokens that this worker need not compute: the cached ones, with a recurrent state
        those up to a snapshot of it.
        """
        num_tokens, size = self.num_cached_tokens(view), view.info.layout.block_size
        if view.info.layout.state_blocks:
            while num_tokens and self._state(num_tokens // size - 1) not in view.cached:
                num_tokens -= size
        return num_tokens

    def num_reusable_at(self, views: Sequence[WorkerView]) -> npt.NDArray[np.int64]:
        """`num_reusable_tokens` of each worker."""
        return self._at(views, self.num_reusable_tokens)

    def num_cached_at(self, views: Sequence[WorkerView]) -> npt.NDArray[np.int64]:
        """`num_cached_tokens` of each worker."""
        return self._at(views, self.num_cached_tokens)

    def _at(self, views: Sequence[WorkerView], count: Callable[[WorkerView], int]) -> npt.NDArray[np.int64]:
        """The count for each worker. The first block tells most of them apart."""
        num_tokens = np.zeros(len(views), np.int64)
        size = views[0].info.layout.block_size if views else 0
        if views and size <= len(self._token_ids):
            first = self._hash(0, size)
            for row, view in enumerate(views):
                if first in view.cached:
                    num_tokens[row] = count(view)
        return num_tokens

    def _state(self, index: int) -> BlockHash:
        """The hash that announces the state at the end of a block whose own hash is known."""
        if index not in self._states:
            self._states[index] = state_hash(self._hashes[index])
        return self._states[index]

    def _hash(self, index: int, size: int) -> BlockHash:
        if index == len(self._hashes):
            parent = self._hashes[-1] if self._hashes else self._root
            self._hashes.append(next_hash(parent, self._token_ids[index * size : (index + 1) * size]))
        return self._hashes[index]
