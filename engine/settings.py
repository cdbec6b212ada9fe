"""Settings of one engine that need no torch: names of dtypes and encodings, memory for KV, the scheduler's limits, CUDA
graphs, speculation.
"""

from dataclasses import dataclass
from pathlib import Path

from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, KV_DTYPE_BYTES
from mesh.domain.kv_groups import KVGroups

DTYPES = ("auto", *DTYPE_BYTES)
KV_DTYPES = ("auto", *KV_DTYPE_BYTES)
STORED_ENCODING = "fp8"
"""An encoding that is only taken from checkpoints: settings need not name it."""
QUANTIZATIONS = ("none", "int8", "int4")
"""Quantisations that the engine computes, as settings name them: none, and encodings (`engine/models/encodings.py`)."""
MATRIX_ENCODINGS = (*QUANTIZATIONS[1:], STORED_ENCODING)
"""Encodings of matrices other than float, which multiply in a form of their own (`engine/models/encodings.py`)."""
LAYERS_PER_GROUP = 8
"""Layers whose KV is announced together, by default."""
LOAD_FORMATS = ("auto", "dummy")
ATTENTION_BACKENDS = ("auto", "flash", "triton", "torch", "cpu")
"""Attention of the eager decoder: "auto", and the backends of `engine/attention/select.py`."""
_CHOICES = {
    "dtype": DTYPES,
    "kv_dtype": KV_DTYPES,
    "load_format": LOAD_FORMATS,
    "quantize": (*QUANTIZATIONS, STORED_ENCODING),
    "attention": ATTENTION_BACKENDS,
}


def require_known(settings: object) -> None:
    """Raise ConfigurationError if one of the settings in `_CHOICES` has an unknown value."""
    for name, choices in _CHOICES.items():
        if (value := getattr(settings, name)) not in choices:
            raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """Limits of the scheduler, and the facts of the model that it must know."""

    block_size: int
    max_batch_tokens: int  # tokens of a step
    max_num_seqs: int  # sequences that run at the same time
    max_model_len: int
    prefix_caching: bool = True
    whole_prompts: bool = False
    """An encoder reads prompts: their tokens attend to each other, so a prompt is computed in one step, and shares KV
    only with equal prompts."""
    max_in_flight: int = 1  # batches that are computed at the same time, one in each pipeline stage; 1 with a state
    max_step_stretch: float = 0.0
    """Limit on the time of a step with prompts, as a multiple of the time of a step without them, as PromptPace
    estimates both; 0: no limit. It protects sequences whose prompts another worker has computed."""
    adapters: frozenset[str] = frozenset()  # digests of the LoRA adapters that requests may use
    state_blocks: int = 0  # this and the next two: see KVLayout
    windows: tuple[int, ...] = ()
    windows_are_chunks: bool = False

    def __post_init__(self) -> None:
        for name in ("block_size", "max_batch_tokens", "max_num_seqs", "max_model_len", "max_in_flight"):
            if getattr(self, name) < 1:
                raise ConfigurationError(f"{name} must be >= 1, got {getattr(self, name)}")
        if self.max_batch_tokens < self.max_num_seqs:
            raise ConfigurationError(
                f"max_batch_tokens ({self.max_batch_tokens}) must be >= max_num_seqs ({self.max_num_seqs}): "
                "every running sequence needs one token a step"
            )
        if self.state_blocks and self.max_in_flight > 1:
            raise ConfigurationError("a model with recurrent layers computes one batch at a time")
        if self.windows and self.state_blocks:
            raise ConfigurationError("a model whose windows are freed has no recurrent layers")

    @property
    def groups(self) -> KVGroups:
        return KVGroups(self.block_size, self.windows or (0,), self.windows_are_chunks)


@dataclass(frozen=True, slots=True)
class KVMemorySettings:
    """Settings for a worker's share of the memory for KV.

    All workers on a device together use `fraction` of the memory that is free or holds KV. With `utilization` they use
    that fraction of the device's total memory, minus weights and all other memory in use. A worker gets one of `shares`
    equal parts, or, with 0 shares, half of what is left. `ledger` is the folder of the ledger: "" means the default
    folder, None disables the ledger. `owner` names the worker in messages.
    """

    fraction: float = 0.6
    utilization: float = 0.0
    shares: int = 0
    ledger: str | None = None
    owner: str = ""

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ConfigurationError(f"kv_memory_fraction must be in (0, 1], got {self.fraction}")
        if not 0.0 <= self.utilization <= 1.0:
            raise ConfigurationError(f"memory_utilization must be in [0, 1], got {self.utilization}")
        if self.shares < 0:
            raise ConfigurationError(f"kv_memory_shares must be >= 0, got {self.shares}")


@dataclass(frozen=True, slots=True)
class GraphSettings:
    """CUDA graphs are captured for decode steps with these `sizes`, in sequences, of up to `max_tokens` tokens each;
    and for steps that verify up to `max_drafts` drafts of each.
    """

    sizes: tuple[int, ...] = ()
    max_tokens: int = 0
    max_drafts: int = 0


NO_GRAPHS = GraphSettings()
_USUAL_GRAPH_SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256)


def graph_sizes(value: str, max_num_seqs: int) -> tuple[int, ...]:
    """Batch sizes from a list such as "1,2,4", "auto" or "0" for none, as far as batches of `max_num_seqs` need them.
    Raises ConfigurationError.
    """
    if value == "0":
        return ()
    try:
        sizes = _USUAL_GRAPH_SIZES if value == "auto" else tuple(sorted({int(size) for size in value.split(",")}))
    except ValueError:
        sizes = ()
    if not sizes or sizes[0] < 1:
        raise ConfigurationError(f"cuda_graphs must be auto, batch sizes such as 1,2,4,8, or 0 for none, got {value!r}")
    num_smaller = sum(size < max_num_seqs for size in sizes)
    return sizes[: num_smaller + 1]


@dataclass(frozen=True, slots=True)
class Speculation:
    """`kind` is none, ngram, mtp, or draft, which needs a `draft_model`; `max_drafts` limits the drafts of a sequence
    in a step.
    """

    kind: str = "none"
    max_drafts: int = 0
    draft_model: Path | None = None


NO_SPECULATION = Speculation()
