"""Settings to load and run a model."""

from dataclasses import dataclass, field
from pathlib import Path

from checkpoint.adapters import AdapterFiles, adapters_bytes
from checkpoint.rope_override import NO_ROPE_OVERRIDE, RopeOverride
from engine.settings import LAYERS_PER_GROUP, NO_GRAPHS, GraphSettings, KVMemorySettings, require_known
from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import Degrees


@dataclass(frozen=True, slots=True)
class RunnerSettings:
    """The model to load, and how to run it; made from the settings of a worker (worker/runner_settings.py)."""

    model_dir: Path
    device: str = "cpu"  # "auto": CUDA if available
    dtype: str = "auto"
    """With "auto" the checkpoint's, but fp32 on CPU where the compiled decoder would have to round or cannot run."""
    load_format: str = "auto"
    seed: int = 0
    block_size: int = 16
    num_blocks: int | None = None
    """None: the worker's share of the device's memory once the weights are loaded, but at most `max_blocks`."""
    max_blocks: int | None = None
    companion_block_bytes: int = 0  # the draft model's, in addition to each block
    companion_bytes: int = 0  # other memory that the draft model takes on a GPU
    kv_memory: KVMemorySettings = field(default_factory=KVMemorySettings)
    attention: str = "auto"
    layers_per_group: int = LAYERS_PER_GROUP  # this and the next: see ModelRunner
    group_bytes: int = 0
    quantize: str = "none"
    kv_dtype: str = "auto"
    enforce_eager: bool = False
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    max_batch_tokens: int = 2048  # limit for several ranks, whose steps share memory, and for activations on a GPU
    max_sampled_rows: int = 64  # likewise on a GPU
    rope: RopeOverride = NO_ROPE_OVERRIDE
    adapters: tuple[AdapterFiles, ...] = ()
    max_loaded_adapters: int = 0  # in memory at once; 0: all
    graphs: GraphSettings = NO_GRAPHS
    keep_all_kv: bool = False  # also KV behind sliding windows, which is freed otherwise
    compile_all: bool = False  # see CompiledDecoder
    is_mtp: bool = False  # load the model's layer of multi-token prediction in place of the model

    def __post_init__(self) -> None:
        require_known(self)
        if self.block_size < 1 or self.layers_per_group < 1:
            raise ConfigurationError("block_size and layers_per_group must be at least 1")
        if self.num_blocks is not None and self.num_blocks < 1:
            raise ConfigurationError(f"num_blocks must be at least 1, got {self.num_blocks}")

    @property
    def degrees(self) -> Degrees:
        return Degrees(self.tensor_parallel, self.pipeline_parallel)

    @property
    def num_adapter_slots(self) -> int:
        return min(len(self.adapters), self.max_loaded_adapters or len(self.adapters))

    @property
    def adapter_bytes(self) -> int:
        """Memory for adapters in all ranks. The ranks of a stage divide only what adapters add to queries, keys and
        values, which is not taken off here.
        """
        return self.tensor_parallel * adapters_bytes(self.adapters, self.num_adapter_slots)

    @property
    def encoding(self) -> str:
        """The encoding of the weights, a key of engine.models.encodings.ENCODINGS."""
        return "float" if self.quantize == "none" else self.quantize
