"""Requests with defaults that tests may override."""

from collections.abc import Iterable
from typing import Any

from mesh.domain.request import SamplingParams, SequenceSpec


def make_request(request_id: str, token_ids: Iterable[int], *, max_new_tokens: int = 8, **changes: Any) -> SequenceSpec:
    """A greedy request; `changes` go to SequenceSpec, `sampling` fields as `sampling={...}`."""
    ids = tuple(token_ids)
    sampling = SamplingParams(max_new_tokens=max_new_tokens, seed=0, **changes.pop("sampling", {}))
    values = {"attempt": 0, "num_prompt_tokens": len(ids), "sampling": sampling} | changes
    return SequenceSpec(request_id=request_id, token_ids=ids, **values)
