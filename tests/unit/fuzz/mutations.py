"""Bytes that are nearly right: valid messages with bits, lengths and pieces changed. And how often to try.

TANDEM_FUZZ_EXAMPLES=1000000 python -m pytest --timeout 0 tests/unit/fuzz
"""

import os
import random
from collections.abc import Sequence

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

_FEW = 150
_EXAMPLES = int(os.environ.get("TANDEM_FUZZ_EXAMPLES", _FEW))


def _try(max_examples: int) -> settings:
    """The tests that everybody runs try the same examples each time; long runs try others."""
    is_long = _EXAMPLES > _FEW
    return settings(max_examples=max_examples, suppress_health_check=list(HealthCheck), derandomize=not is_long)


fuzzed = _try(_EXAMPLES)
fuzzed_slowly = _try(max(_EXAMPLES // 4, 1))
"""For what takes milliseconds."""

_INTERESTING = (b"\x00", b"\xff", b"\x80", b"\x7f", b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01", b"\x08", b"\x0a")
_KINDS = ("flip", "insert", "cut", "double", "number")
_edits = st.lists(
    st.tuples(st.sampled_from(_KINDS), st.integers(0, 1 << 16), st.binary(max_size=4)),
    min_size=1,
    max_size=4,
)


def near(messages: Sequence[bytes]) -> st.SearchStrategy[bytes]:
    """Random bytes, or one of `messages` with a few edits."""
    return st.one_of(
        st.binary(max_size=200), st.tuples(st.sampled_from(messages), _edits).map(lambda made: _edit(*made))
    )


def edit_at_random(rng: random.Random, raw: bytes) -> bytes:
    """`raw` with a few edits."""
    edits = [
        (rng.choice(_KINDS), rng.randrange(1 << 16), rng.randbytes(rng.randrange(5))) for _ in range(rng.randint(1, 4))
    ]
    return _edit(raw, edits)


def _edit(raw: bytes, edits: Sequence[tuple[str, int, bytes]]) -> bytes:
    data = bytearray(raw)
    for kind, where, extra in edits:
        at = where % (len(data) + 1)
        if kind == "flip" and at < len(data):
            data[at] ^= 1 << (where % 8)
        elif kind == "insert":
            data[at:at] = extra
        elif kind == "cut":
            del data[at : at + 1 + len(extra)]
        elif kind == "double":
            data += data[at:]
        else:
            data[at : at + 1] = _INTERESTING[where % len(_INTERESTING)]
    return bytes(data[:4096])
