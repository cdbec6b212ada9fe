"""The parameters that Gemma 4 has besides those of other families, and the tensors that have them."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from engine.models.model_config import ModelConfig
    from engine.models.parameters import SpecBuilder


def add_mixed(model: "SpecBuilder", config: "ModelConfig") -> None:
    """Add those of the model and of all layers."""
    facts = config.mixed
    assert facts is not None
    width, total = facts.input_width, config.num_layers * facts.input_width
    if width:
        model.stored("layer_inputs", "model.embed_tokens_per_layer.weight", (facts.input_vocab, total))
        projection = [("model.per_layer_model_projection", total, None)]
        model.linear("layer_inputs_projection", projection, config.hidden_size, has_bias=False)
        model.stored("layer_inputs_norm", "model.per_layer_projection_norm.weight", (width,))
    for layer in range(config.num_layers):
        builder = model.nested(f"layers.{layer}.", config.tensors.layer.format(layer) + ".")
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


def _add_beside(builder: "SpecBuilder", config: "ModelConfig", num_experts: int) -> None:
    """Add the MLP beside the experts, and what norms and weights the results of both."""
    builder.mlp(config.tensors.up, config.tensors.down, config.intermediate_size)
    builder.norm("mlp_only_norm", "post_feedforward_layernorm_1")
    builder.norm("experts_norm", "pre_feedforward_layernorm_2")
    builder.norm("experts_out_norm", "post_feedforward_layernorm_2")
    builder.stored("router_norm", "router.scale", (config.hidden_size,))
    builder.stored("expert_factors", "router.per_expert_scale", (num_experts,))
