"""The numbers of a model that its memory and time follow from."""

from dataclasses import dataclass
from math import prod

from engine.models.kv_groups import group_windows, num_kv_layers
from engine.models.model_config import ModelConfig
from engine.models.parameters import parameter_specs

_OUTSIDE_LAYERS = ("embed", "positions", "layer_inputs", "lm_head")


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a decoder-only model that determine memory and time.

    `linear_params` counts all linear layers, with all experts, but without the output matrix. `vocabulary_params`
    counts the embedding; the output matrix is as large, and is the same matrix if `tied`. `input_params` counts the
    table of what layers add for the token itself. `vector_params` counts all vectors and learned positions.
    `expert_params` counts the routed experts, of which a token uses `experts_per_token` out of `num_experts` per layer.
    `kv_planes`: see ModelConfig. `num_recurrent_layers` have no KV; a sequence's states there take `state_bytes`.
    `kv_windows`: those of the groups of layers if KV is freed behind windows, see KVLayout, each with room for
    `kv_group_layers` layers.
    """

    linear_params: int
    vocabulary_params: int
    vector_params: int
    tied: bool
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    expert_params: int = 0
    num_experts: int = 1
    experts_per_token: int = 1
    kv_planes: int = 2
    num_recurrent_layers: int = 0
    state_bytes: int = 0
    kv_windows: tuple[int, ...] = ()
    kv_group_layers: int = 0
    windows_are_chunks: bool = False
    input_params: int = 0

    @property
    def num_kv_layers(self) -> int:
        return self.num_layers - self.num_recurrent_layers

    @property
    def params(self) -> int:
        """All parameters, each counted once."""
        of_tables = self.input_params + self.vocabulary_params * (1 if self.tied else 2)
        return self.linear_params + self.vector_params + of_tables

    @property
    def step_params(self) -> int:
        """Parameters of the linear layers, with all experts, and of the output matrix."""
        return self.linear_params + self.vocabulary_params

    @property
    def active_linear_params(self) -> float:
        """Parameters of the linear layers that one token uses."""
        inactive = 1 - self.experts_per_token / self.num_experts
        return self.linear_params - self.expert_params * inactive

    @property
    def active_params(self) -> float:
        """Parameters of the linear layers and of the output matrix that one token uses."""
        return self.active_linear_params + self.vocabulary_params

    def read_params(self, num_rows: float) -> float:
        """Parameters that a pass of `num_rows` rows reads, with the experts that at least one row uses.

        If each row chooses k of E experts at random, E x (1 - (1 - k/E)^rows) experts are expected to be used.
        """
        untouched = (1 - self.experts_per_token / self.num_experts) ** num_rows
        return self.step_params - self.expert_params * untouched

    def kv_bytes_per_token(self, kv_dtype_bytes: float, scale_bytes: float = 0) -> float:
        """2 (keys, values; 1 if both are one) x layers x KV heads x (head_dim x bytes + the scale of a row). "Efficient
        Memory Management for LLM Serving with PagedAttention" (Kwon et al. 2023), section 3."""
        num_rows = self.kv_planes * self.num_kv_layers * self.num_kv_heads
        return num_rows * (self.head_dim * kv_dtype_bytes + scale_bytes)

    def held_tokens(self, num_tokens: float) -> float:
        """Tokens of a sequence whose KV is held, on average over all layers: some have left the windows of theirs."""
        if not self.kv_windows:
            return num_tokens
        of_groups = sum(min(num_tokens, window or num_tokens) for window in self.kv_windows)
        return of_groups * self.kv_group_layers / self.num_kv_layers

    def attention_flops(self, num_queries: float, context_tokens: float) -> float:
        """Scores and weighted sum, all layers: 2 x 2 x layers x heads x head_dim x queries x context."""
        return 4 * self.num_kv_layers * self.num_heads * self.head_dim * num_queries * context_tokens


def model_size(config: ModelConfig) -> ModelSize:
    """The size of a model, from the parameters that the engine loads for `config`."""
    shapes = {spec.name: spec.shape for spec in parameter_specs(config)}
    matrices = {name: prod(shape) for name, shape in shapes.items() if len(shape) == 2}
    linear = sum(size for name, size in matrices.items() if name not in _OUTSIDE_LAYERS)
    windows = group_windows(config)
    experts = sum(size for name, size in matrices.items() if ".experts." in name)
    vectors = sum(prod(shape) for shape in shapes.values() if len(shape) != 2)
    vectors += matrices.get("positions", 0)
    return ModelSize(
        linear_params=linear,
        vocabulary_params=config.vocab_size * config.embed_width,
        vector_params=vectors,
        tied=config.tied,
        num_layers=config.num_layers,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        expert_params=experts,
        num_experts=config.experts.num_experts if config.experts else 1,
        experts_per_token=config.experts.top_k if config.experts else 1,
        kv_planes=config.kv_planes,
        num_recurrent_layers=config.num_layers - config.num_kv_layers,
        state_bytes=config.recurrent.num_bytes if config.recurrent else 0,
        kv_windows=windows,
        kv_group_layers=num_kv_layers(config, windows) if windows else 0,
        windows_are_chunks=bool(windows) and config.windows_are_chunks,
        input_params=matrices.get("layer_inputs", 0),
    )
