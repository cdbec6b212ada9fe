"""TensorNames: names and layout of the tensors in checkpoints of a family."""

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class TensorNames:
    """Names without `.weight` and `.bias`. The defaults are Llama's; a family overrides the names that differ.

    Names from `input_norm` on belong to a layer and follow the prefix `layer`, in which `{}` is the layer's number.
    ModelConfig decides which of the tensors a model has.
    """

    embed: str = "model.embed_tokens"
    embed_norm: str = ""
    project_in: str = field(default="", repr=False)
    project_out: str = field(default="", repr=False)
    positions: str = ""
    final_norm: str = "model.norm"
    lm_head: str = "lm_head"
    layer: str = "model.layers.{}"

    input_norm: str = "input_layernorm"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    """Three tensors, or one with all three projections; see `grouped_qkv`. "": a layer does without this tensor."""
    q_norm: str = "self_attn.q_norm"
    """`{}` is the head's number, if each head's weights are a tensor; so in `k_norm`."""
    k_norm: str = "self_attn.k_norm"
    attention_gate: str = field(default="", repr=False)
    """Gates of attention's results, a tensor of their own; "": in that of queries they follow those of their head."""
    gates_heads: bool = field(default=False, repr=False)
    """The tensor has one gate for each head, not one for each number."""
    sinks: str = field(default="self_attn.sinks", repr=False)
    q_b: str = field(default="", repr=False)
    """Latent attention: the second projection of queries. `qkv` are the first one, that of KV, and that of its latent;
    `q_norm` and `k_norm` norm what the first ones compute."""
    o: str = "self_attn.o_proj"
    o_norm: str = field(default="self_attn.attn_sub_norm", repr=False)  # with ModelConfig.sub_norms, as is `down_norm`
    recurrent: str = field(default="", repr=False)
    """The module that recurrent layers have in place of attention; see `engine.models.parameters` for its tensors."""
    attn_out_norm: str = ""
    post_norm: str = "post_attention_layernorm"
    up: tuple[str, ...] = ("mlp.gate_proj", "mlp.up_proj")
    """Gate and up projection, in one tensor or two; for a plain MLP, its up projection."""
    down: str = "mlp.down_proj"
    down_norm: str = field(default="mlp.ffn_sub_norm", repr=False)
    mlp_out_norm: str = ""
    xielu: str = field(default="mlp.act_fn", repr=False)

    router: str = "mlp.gate"
    expert: str = "mlp.experts.{}"
    """`{}` is the expert's number; `expert_up` and `expert_down` follow this prefix, or the prefix `shared_expert`."""
    expert_up: tuple[str, ...] = ("gate_proj", "up_proj")
    expert_down: str = "down_proj"
    stacked_experts: bool = field(default=False, repr=False)  # see engine/models/families/gpt_oss.py
    stacked_up: str = field(default="mlp.experts.gate_up_proj", repr=False)
    """The whole names of tensors [num_experts, outputs, inputs] that may be stored instead of those of each expert."""
    stacked_down: str = field(default="mlp.experts.down_proj", repr=False)
    stacked_transposed: bool = field(default=False, repr=False)
    """They may be [num_experts, inputs, outputs], and are if both shapes are equal."""
    shared_expert: str = "mlp.shared_expert"
    shared_gate: str = "mlp.shared_expert_gate"
    choice_bias: str = field(default="mlp.gate.e_score_correction_bias", repr=False)
    """The whole name. `choice_bias_is_row`: it is stored as [1, num_experts]."""
    choice_bias_is_row: bool = field(default=False, repr=False)

    grouped_qkv: bool = False
    """The qkv tensor holds, per key/value head, its query heads, its key and its value; otherwise all queries, then all
    keys, then all values."""
    qkv_parts: int = field(default=0, repr=False)
    """Number of parts of the qkv tensor, each with queries of some heads, then their values, then their keys."""
    transposed: bool = False
    """Matrices of layers are stored as [inputs, outputs]."""
    interleaved_rotary: bool = False
    """Rotary dimensions 2i and 2i + 1 are paired, rather than i and i + rotary_dim / 2."""
    swapped_rotary: bool = field(default=False, repr=False)
    """Positions rotate the other way round, as if the halves of the rotated dimensions were swapped."""
    norm_offset: float = 0.0  # added to the stored weights of norms
    unit_lm_head: bool = False
    """Rows of the output matrix are divided by their lengths at loading."""
    first_position: int = 0  # row of the learned positions for position 0


LLAMA_NAMES = TensorNames()
