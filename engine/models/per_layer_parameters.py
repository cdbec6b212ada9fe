"""The parameters that only Gemma 4 and 3n have, and the tensors that have them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig
    from engine.models.parameters import SpecBuilder
    from engine.models.per_layer_config import PerLayerConfig


def add_per_layer(model: "SpecBuilder", config: "ModelConfig") -> None:
    """Add those of the model and of all layers."""
    facts = config.per_layer
    assert facts is not None
    width, total = facts.input_width, config.num_layers * facts.input_width
    if width:
        model.stored("layer_inputs", "model.embed_tokens_per_layer.weight", (facts.input_vocab, total))
        projection = [("model.per_layer_model_projection", total, None)]
        model.linear("layer_inputs_projection", projection, config.hidden_size, has_bias=False)
        model.stored("layer_inputs_norm", "model.per_layer_projection_norm.weight", (width,))
    for number in range(1, facts.num_streams):
        for name, stored in (("split", "altup_projections"), ("join", "altup_unembed_projections")):
            outputs = [(f"model.{stored}.{number - 1}", config.hidden_size, None)]
            model.linear(f"{name}.{number}", outputs, config.hidden_size, has_bias=False)
    for layer in range(config.num_layers):
        builder = model.nested(f"layers.{layer}.", config.tensors.layer.format(layer) + ".")
        if facts.num_streams > 1:
            _add_streams(builder, config.hidden_size, facts)
        else:
            builder.stored("scalar", "layer_scalar", (1,))
        for name in ("q_norm", "k_norm") if facts.layers[layer].kv_source == layer else ("q_norm",):
            builder.stored(name, f"self_attn.{name}.weight", (facts.layers[layer].head_dim,))
        if width:
            builder.linear("input_gate", [("per_layer_input_gate", width, None)], config.hidden_size, has_bias=False)
            outputs = [("per_layer_projection", config.hidden_size, None)]
            builder.linear("input_projection", outputs, width, has_bias=False)
            builder.norm("input_out_norm", "post_per_layer_input_norm")
        if config.experts is not None:
            _add_beside(builder, config.of_layer(layer), config.experts.num_experts)


def _add_streams(builder: "SpecBuilder", hidden_size: int, facts: "PerLayerConfig") -> None:
    """Add what mixes a layer's residuals, and the narrow matrices beside attention."""
    count = facts.num_streams
    builder.norm("streams_norm", "altup.router_norm")
    builder.stored("streams_router", "altup.modality_router.weight", (count, hidden_size))
    builder.stored("prediction", "altup.prediction_coefs.weight", (count * count, count))
    builder.stored("correction", "altup.correction_coefs.weight", (count, count))
    builder.stored("streams_scale", "altup.correct_output_scale", (hidden_size,))
    builder.linear("laurel_left", [("laurel.linear_left", facts.laurel_rank, None)], hidden_size, has_bias=False)
    outputs = [("laurel.linear_right", hidden_size, None)]
    builder.linear("laurel_right", outputs, facts.laurel_rank, has_bias=False)
    builder.norm("laurel_norm", "laurel.post_laurel_norm")


def _add_beside(builder: "SpecBuilder", config: "ModelConfig", num_experts: int) -> None:
    """Add the MLP beside the experts, and what norms and weights the results of both."""
    builder.mlp(config.tensors.up, config.tensors.down, config.intermediate_size)
    builder.norm("mlp_only_norm", "post_feedforward_layernorm_1")
    builder.norm("experts_norm", "pre_feedforward_layernorm_2")
    builder.norm("experts_out_norm", "post_feedforward_layernorm_2")
    builder.stored("router_norm", "router.scale", (config.hidden_size,))
    builder.stored("expert_factors", "router.per_expert_scale", (num_experts,))
