"""Facts on which a worker and its ranks on other machines must agree."""

import torch

import tandem
from mesh.domain.worker import PROTOCOL_VERSION

RANK_KEEPALIVE_MS = 8_000
"""A machine that vanishes is noticed within 1.5 times this time. Shorter than in the rest of the mesh: all ranks wait
for the one that is lost.
"""


def versions() -> str:
    """The versions that must be equal in all ranks. They divide the model by the same code, and gloo has no version."""
    return f"tandem {tandem.__version__}, protocol {PROTOCOL_VERSION}, torch {torch.__version__.partition('+')[0]}"
