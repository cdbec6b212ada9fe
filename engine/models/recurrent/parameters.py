"""The parameters of a recurrent layer between its norms, and the tensors that have them."""

from typing import TYPE_CHECKING

from engine.models.row_orders import fused_rows

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig
    from engine.models.parameters import RowOrder, SpecBuilder

UNQUANTIZED = (".in_proj_a.weight", ".in_proj_b.weight", ".in_proj_ba.weight")
"""Strengths and decays, which makers of quantised checkpoints leave as they are: few outputs, whose errors add up in
the state.
"""


def add_recurrent(builder: "SpecBuilder", config: "ModelConfig") -> None:
    """Add those of a layer."""
    facts, module = config.recurrent, config.tensors.recurrent
    assert facts is not None
    name, conv, factor = "conv1d", (facts.channels, 1, facts.kernel), config.residual_scale
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
