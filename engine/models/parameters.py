"""Which tensors of a checkpoint make up which parameters of the decoder.

Query, key and value projections become one matrix, and gate and up become one, so that a layer is four matrix
products. Names follow Llama; Mistral and Qwen use the same.
"""

from dataclasses import dataclass

from engine.models.config import ModelConfig


@dataclass(frozen=True, slots=True)
class ParameterSpec:
    """One parameter: `sources` are checkpoint tensors of the given numbers of rows, stacked along dimension 0."""

    name: str
    shape: tuple[int, ...]
    sources: tuple[tuple[str, int], ...]

    @property
    def is_scale(self) -> bool:
        """True for the weights of norms, which are near 1 rather than near 0."""
        return self.name.endswith("norm")

    @property
    def is_bias(self) -> bool:
        """True for biases."""
        return self.name.endswith("bias")


def parameter_specs(config: ModelConfig) -> list[ParameterSpec]:
    """Every parameter of the model; a tied output matrix is not listed."""
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = [
        _spec("embed", (vocab, hidden), ("model.embed_tokens.weight", vocab)),
        _spec("final_norm", (hidden,), ("model.norm.weight", hidden)),
    ]
    if not config.tied:
        specs.append(_spec("lm_head", (vocab, hidden), ("lm_head.weight", vocab)))
    for layer in range(config.num_layers):
        specs += _attention_specs(config, layer) + _mlp_specs(config, layer)
    return specs


def _spec(name: str, shape: tuple[int, ...], *sources: tuple[str, int]) -> ParameterSpec:
    return ParameterSpec(name, shape, sources)


def _attention_specs(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    hidden, head_dim = config.hidden_size, config.head_dim
    q_rows, kv_rows = config.num_heads * head_dim, config.num_kv_heads * head_dim
    rows = {"q": q_rows, "k": kv_rows, "v": kv_rows}
    qkv_rows = q_rows + 2 * kv_rows
    weights = [(f"{source}.self_attn.{p}_proj.weight", n) for p, n in rows.items()]
    specs = [
        _spec(f"{target}.input_norm", (hidden,), (f"{source}.input_layernorm.weight", hidden)),
        _spec(f"{target}.qkv", (qkv_rows, hidden), *weights),
        _spec(f"{target}.o", (hidden, q_rows), (f"{source}.self_attn.o_proj.weight", hidden)),
    ]
    if config.qkv_bias:
        biases = [(f"{source}.self_attn.{p}_proj.bias", n) for p, n in rows.items()]
        specs.append(_spec(f"{target}.qkv_bias", (qkv_rows,), *biases))
    if config.o_bias:
        specs.append(_spec(f"{target}.o_bias", (hidden,), (f"{source}.self_attn.o_proj.bias", hidden)))
    if config.qk_norm:
        specs += [
            _spec(f"{target}.{p}_norm", (head_dim,), (f"{source}.self_attn.{p}_norm.weight", head_dim)) for p in "qk"
        ]
    return specs


def _mlp_specs(config: ModelConfig, layer: int) -> list[ParameterSpec]:
    source, target = f"model.layers.{layer}", f"layers.{layer}"
    hidden, inner = config.hidden_size, config.intermediate_size
    weights = [(f"{source}.mlp.{p}_proj.weight", inner) for p in ("gate", "up")]
    specs = [
        _spec(f"{target}.post_norm", (hidden,), (f"{source}.post_attention_layernorm.weight", hidden)),
        _spec(f"{target}.gate_up", (2 * inner, hidden), *weights),
        _spec(f"{target}.down", (hidden, inner), (f"{source}.mlp.down_proj.weight", hidden)),
    ]
    if config.mlp_bias:
        biases = [(f"{source}.mlp.{p}_proj.bias", inner) for p in ("gate", "up")]
        specs.append(_spec(f"{target}.gate_up_bias", (2 * inner,), *biases))
        specs.append(_spec(f"{target}.down_bias", (hidden,), (f"{source}.mlp.down_proj.bias", hidden)))
    return specs
