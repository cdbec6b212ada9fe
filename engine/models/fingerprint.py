"""The model fingerprint: two workers may exchange KV only if their fingerprints are equal."""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from checkpoint.model_files import NO_ROPE_OVERRIDE, RopeOverride
from checkpoint.tensors import StoredTensor, open_checkpoint, read_sample
from engine.models.config import AnyConfig, load_config


def fingerprint(
    model_dir: Path,
    load_format: str = "auto",
    seed: int = 0,
    quantize: str = "none",
    rope: RopeOverride = NO_ROPE_OVERRIDE,
) -> str:
    """Stable hash of the configuration and the weights, independent of how the checkpoint is sharded.

    It covers the name, dtype and shape of each tensor and a sample from its middle, so it takes milliseconds.
    """
    config = load_config(model_dir, rope)
    weights = f"dummy:{seed}".encode() if load_format == "dummy" else _sample(open_checkpoint(model_dir))
    digest = _digest(config, weights)
    return digest if quantize == "none" else f"{digest}-{quantize}"  # readable in messages about differing workers


def _digest(config: AnyConfig, weights: bytes) -> str:
    return blake2b(repr(config).encode() + weights, digest_size=16, person=b"tandem-model").hexdigest()


def _sample(stored: Mapping[str, StoredTensor]) -> bytes:
    digest = blake2b(digest_size=16)
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{name}:{tensor.dtype}:{tensor.shape}".encode())
        digest.update(read_sample(tensor))
    return digest.digest()
