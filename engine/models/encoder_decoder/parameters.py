"""Maps the tensors of a checkpoint of T5 and its kind to the parameters of EncoderDecoder."""

from engine.models.encoder_decoder.config import EncoderDecoderConfig
from engine.models.parameters import ParameterSpec, Source


def encoder_decoder_specs(config: EncoderDecoderConfig, *, own_lm_head: bool) -> list[ParameterSpec]:
    """Specs of all parameters; without `own_lm_head` the output matrix is tied to the embedding."""
    hidden, vocab = config.hidden_size, config.vocab_size
    specs = [_table_spec("embed", (vocab, hidden), "shared")]
    if own_lm_head:
        specs.append(_matrix_spec("lm_head", (vocab, hidden), "lm_head"))
    for stack, num_layers in (("encoder", config.num_encoder_layers), ("decoder", config.num_layers)):
        bias = f"{stack}.block.0.layer.0.SelfAttention.relative_attention_bias"
        specs += [
            _table_spec(f"{stack}.distances", (config.num_buckets, config.num_heads), bias),
            _norm_spec(config, f"{stack}.final_norm", f"{stack}.final_layer_norm", is_last=stack == "decoder"),
        ]
        for layer in range(num_layers):
            specs += _layer_specs(config, stack, layer)
    return specs


def _layer_specs(config: EncoderDecoderConfig, stack: str, layer: int) -> list[ParameterSpec]:
    source, target = f"{stack}.block.{layer}.layer", f"{stack}.{layer}"
    specs = _attention_specs(config, f"{source}.0", f"{target}.self", "SelfAttention", ("qkv",))
    if stack == "decoder":
        specs += _attention_specs(config, f"{source}.1", f"{target}.cross", "EncDecAttention", ("q", "kv"))
    return specs + _mlp_specs(config, f"{source}.{2 if stack == 'decoder' else 1}", f"{target}.mlp")


def _attention_specs(
    config: EncoderDecoderConfig, source: str, target: str, attention: str, matrices: tuple[str, ...]
) -> list[ParameterSpec]:
    """Specs of one attention; each entry of `matrices` names, by letters, the projections merged to one matrix."""
    hidden, inner = config.hidden_size, config.num_heads * config.head_dim
    projections = [
        _matrix_spec(
            f"{target}.{letters}",
            (len(letters) * inner, hidden),
            *(f"{source}.{attention}.{letter}" for letter in letters),
        )
        for letters in matrices
    ]
    return [
        _norm_spec(config, f"{target}.norm", f"{source}.layer_norm"),
        *projections,
        _matrix_spec(f"{target}.o", (hidden, inner), f"{source}.{attention}.o"),
    ]


def _mlp_specs(config: EncoderDecoderConfig, source: str, target: str) -> list[ParameterSpec]:
    hidden, inner = config.hidden_size, config.intermediate_size
    ups = [f"{source}.DenseReluDense.{name}" for name in (("wi_0", "wi_1") if config.gated else ("wi",))]
    return [
        _norm_spec(config, f"{target}.norm", f"{source}.layer_norm"),
        _matrix_spec(f"{target}.up", (len(ups) * inner, hidden), *ups),
        _matrix_spec(f"{target}.down", (hidden, inner), f"{source}.DenseReluDense.wo", wide=True),
    ]


def _norm_spec(config: EncoderDecoderConfig, name: str, source: str, *, is_last: bool = False) -> ParameterSpec:
    """The last one brings its result into the output matrix's scale."""
    shape = (config.hidden_size,)
    factor = config.logit_scale if is_last else 1.0
    return ParameterSpec(name, shape, (Source(f"{source}.weight", shape),), factor, wide=True)


def _table_spec(name: str, shape: tuple[int, int], source: str) -> ParameterSpec:
    return ParameterSpec(name, shape, (Source(f"{source}.weight", shape),))


def _matrix_spec(name: str, shape: tuple[int, int], *sources: str, wide: bool = False) -> ParameterSpec:
    """A matrix stacked from sources of equal size."""
    part = (shape[0] // len(sources), shape[1])
    stacked = tuple(Source(f"{source}.weight", part) for source in sources)
    return ParameterSpec(name, shape, stacked, is_matrix=True, wide=wide)
