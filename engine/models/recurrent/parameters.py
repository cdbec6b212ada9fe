"""The parameters of a recurrent layer between its norms, and the tensors that have them."""

from typing import TYPE_CHECKING

from engine.models.row_orders import fused_rows

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig
    from engine.models.parameters import RowOrder, SpecBuilder
    from engine.models.recurrent.config import RecurrentConfig

UNQUANTIZED = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")
"""Strengths and decays, which makers of quantised checkpoints leave as they are: few outputs, whose errors add up in
the state.
"""


def add_recurrent(builder: "SpecBuilder", config: "ModelConfig") -> None:
    """Add those of a layer."""
    facts, module = config.recurrent, config.tensors.recurrent
    assert facts is not None
    if facts.kind == "channels":
        _add_channel_scan(builder, config, facts)
        return
    name, conv, factor = "conv1d", (facts.channels, 1, facts.kernel), config.out_factor
    tensors: list[tuple[str, int, RowOrder | None]]
    if facts.kind == "conv":
        name, tensors = "conv", [(f"{module}.in_proj", facts.projected, None)]
    elif facts.kind == "scan":
        tensors, factor = [(f"{module}.in_proj", facts.projected, None)], factor * facts.scan.out_factor
        builder.stored("skip", f"{module}.D", (facts.num_heads,), in_fp32=True)
    else:
        parts = (("qkv", facts.channels), ("z", facts.value_width), ("b", facts.num_heads), ("a", facts.num_heads))
        tensors = [(f"{module}.in_proj_{part}", width, None) for part, width in parts]
        if facts.is_fused:
            tensors = [(f"{module}.in_proj_{part}", len(rows), rows) for part, rows in fused_rows(facts)]
    builder.stored("conv", f"{module}.{name}.weight", conv)
    if facts.conv_bias:
        builder.stored("conv_bias", f"{module}.{name}.bias", conv[:1])
    if facts.kind != "conv":
        builder.stored("decay_log", f"{module}.A_log", (facts.num_heads,), in_fp32=True)
        builder.stored("decay_bias", f"{module}.dt_bias", (facts.num_heads,), in_fp32=True)
    if facts.norm_width:
        builder.stored("recurrent_norm", f"{module}.norm.weight", (facts.norm_width,))
    builder.linear("recurrent_in", tensors, config.hidden_size, has_bias=facts.bias)
    outputs = [(f"{module}.out_proj", config.hidden_size, None)]
    builder.linear("recurrent_out", outputs, facts.result_width, has_bias=facts.bias, factor=factor)


def _add_channel_scan(builder: "SpecBuilder", config: "ModelConfig", facts: "RecurrentConfig") -> None:
    """Add those of a layer of Mamba 1."""
    module, width, key_dim, rank = config.tensors.recurrent, facts.channels, facts.key_dim, facts.channel_scan.step_rank
    builder.stored("conv", f"{module}.conv1d.weight", (width, 1, facts.kernel))
    if facts.conv_bias:
        builder.stored("conv_bias", f"{module}.conv1d.bias", (width,))
    builder.stored("decay_log", f"{module}.A_log", (width, key_dim), in_fp32=True)
    builder.stored("decay_bias", f"{module}.dt_proj.bias", (width,), in_fp32=True)
    builder.stored("skip", f"{module}.D", (width,), in_fp32=True)
    builder.stored("inner", f"{module}.x_proj.weight", (rank + 2 * key_dim, width))
    builder.stored("steps", f"{module}.dt_proj.weight", (width, rank))
    for name, stored, size in (("step", "dt", rank), ("key", "b", key_dim), ("query", "c", key_dim)):
        if facts.channel_scan.norm == "weighted":
            builder.stored(f"{name}_norm", f"{module}.{stored}_layernorm.weight", (size,))
        elif facts.channel_scan.norm == "plain":
            builder.add(f"{name}_norm", (size,), (), offset=1.0)
    builder.linear("recurrent_in", [(f"{module}.in_proj", 2 * width, None)], config.hidden_size, has_bias=facts.bias)
    builder.linear("recurrent_out", [(f"{module}.out_proj", config.hidden_size, None)], width, has_bias=facts.bias)
