"""The identity of a model: two workers may exchange KV only if theirs are equal."""

from collections.abc import Mapping
from hashlib import blake2b
from pathlib import Path

from engine.checkpoint import StoredTensor, open_checkpoint
from engine.models.config import AnyConfig, load_config

_SAMPLE_BYTES = 64


def fingerprint(model_dir: Path, load_format: str = "auto", seed: int = 0, quantize: str = "none") -> str:
    """Stable hash of the configuration and of the weights; the same however the checkpoint is sharded.

    Of each tensor its name, dtype, shape and a sample from its middle are hashed, so that it costs milliseconds.
    """
    config = load_config(model_dir)
    weights = f"dummy:{seed}".encode() if load_format == "dummy" else _sample(open_checkpoint(model_dir))
    digest = _digest(config, weights)
    return digest if quantize == "none" else f"{digest}-{quantize}"  # for people who read why two workers differ


def _digest(config: AnyConfig, weights: bytes) -> str:
    return blake2b(repr(config).encode() + weights, digest_size=16, person=b"tandem-model").hexdigest()


def _sample(stored: Mapping[str, StoredTensor]) -> bytes:
    digest = blake2b(digest_size=16)
    for name in sorted(stored):
        tensor = stored[name]
        digest.update(f"{name}:{tensor.dtype}:{tensor.shape}".encode())
        with tensor.path.open("rb") as file:
            file.seek(tensor.offset + max(0, tensor.num_bytes - _SAMPLE_BYTES) // 2)
            digest.update(file.read(min(_SAMPLE_BYTES, tensor.num_bytes)))
    return digest.digest()
