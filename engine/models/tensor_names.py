"""TensorNames: names and layout of the tensors in a family's checkpoints. Data only, no tensors."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without `.weight` and `.bias`. The defaults are Llama's; a family overrides the names that differ.

    Names from `input_norm` on belong to a layer and follow the prefix `layer`, in which `{}` is the layer's number.
    ModelConfig decides which of the tensors a model has.
    """

    embed: str = "model.embed_tokens"
    embed_norm: str = ""
    positions: str = ""
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}"

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three tensors, or one with all three projections; see `grouped_qkv`."""
    q_norm: str = "self_attn.q_norm"
    k_norm: str = "self_attn.k_norm"
    o: str = "self_attn.o_proj"
    attn_out_norm: str = ""
    post_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up projection, in one tensor or two; for a plain MLP, its up projection."""
    down: str = "mlp.down_proj"
    mlp_out_norm: str = ""

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    """`{}` is the expert's number; `expert_up` and `expert_down` follow this prefix, or the prefix `shared_expert`."""
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    shared_expert: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"

    grouped_qkv: bool = False
    """The qkv tensor holds, per key/value head, its query heads, its key and its value; otherwise all queries, then all
    keys, then all values."""
    transposed: bool = False
    """Matrices of layers are stored as [inputs, outputs]."""
    interleaved_rotary: bool = False
    """Rotary dimensions 2i and 2i + 1 are paired, rather than i and i + rotary_dim / 2."""
    norm_offset: float = 0.0
    """Value added to the stored weights of norms."""
    unit_lm_head: bool = False
    """Rows of the output matrix are divided by their lengths at loading."""
    first_position: int = 0
    """Row of the learned positions for position 0."""


LLAMA_NAMES = TensorNames()
