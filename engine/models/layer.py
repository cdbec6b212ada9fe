"""One layer of the decoder, put together from its parameters."""

from dataclasses import dataclass

from torch import Tensor

from engine.models.facts import BLOCKS, ModelConfig
from engine.models.layers import ACTIVATIONS, Norm
from engine.models.mlp import DenseMlp, Experts, Mlp, SharedExpert
from engine.models.ops import LinearLayer, Ops

Parameters = dict[str, Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention's projections, the MLP, and the norms before and after them; see engine.models.facts.BLOCKS.

    `post_norm` comes before the MLP; it is `input_norm` itself where both share one.
    """

    parallel: bool
    input_norm: Norm
    qkv: LinearLayer
    q_norm: Norm | None
    k_norm: Norm | None
    o: LinearLayer
    attn_out_norm: Norm | None
    post_norm: Norm
    mlp: Mlp
    mlp_out_norm: Norm | None


def take_layer(parameters: Parameters, index: int, config: ModelConfig, ops: Ops) -> Layer:
    """Layer number `index`; its parameters leave the dictionary."""
    prefix = f"layers.{index}."
    norms = {name: take_norm(parameters, prefix + name, config) for name in BLOCKS[config.block]}
    return Layer(
        parallel=config.block.startswith("parallel"),
        input_norm=norms["input_norm"],
        qkv=_take_linear(parameters, f"{prefix}qkv", ops),
        q_norm=_take_head_norm(parameters, f"{prefix}q_norm", config),
        k_norm=_take_head_norm(parameters, f"{prefix}k_norm", config),
        o=_take_linear(parameters, f"{prefix}o", ops),
        attn_out_norm=norms.get("attn_out_norm"),
        post_norm=norms.get("post_norm", norms["input_norm"]),
        mlp=_take_any_mlp(parameters, index, config, ops),
        mlp_out_norm=norms.get("mlp_out_norm"),
    )


def take_norm(parameters: Parameters, name: str, config: ModelConfig) -> Norm:
    """A norm of the residual."""
    centred = config.norm == "layer"
    return Norm(parameters.pop(name), parameters.pop(f"{name}_bias", None), config.norm_eps, centred)


def _take_head_norm(parameters: Parameters, name: str, config: ModelConfig) -> Norm | None:
    return Norm(parameters.pop(name), None, config.norm_eps) if config.qk_norm else None


def _take_linear(parameters: Parameters, name: str, ops: Ops) -> LinearLayer:
    return ops.linear(parameters.pop(name), parameters.pop(f"{name}_bias", None))


def _take_mlp(parameters: Parameters, prefix: str, config: ModelConfig, ops: Ops) -> DenseMlp:
    up = _take_linear(parameters, prefix + ("gate_up" if config.gated else "up"), ops)
    down = _take_linear(parameters, f"{prefix}down", ops)
    return DenseMlp(up, down, ACTIVATIONS[config.activation], ops, gated=config.gated)


def _take_any_mlp(parameters: Parameters, index: int, config: ModelConfig, ops: Ops) -> Mlp:
    prefix, facts = f"layers.{index}.", config.experts
    if facts is None or not facts.layers[index]:
        return _take_mlp(parameters, prefix, config, ops)
    router = parameters.pop(f"{prefix}router")
    each = [_take_mlp(parameters, f"{prefix}experts.{expert}.", config, ops) for expert in range(facts.num_experts)]
    experts = Experts(facts, router, each, ops)
    if not facts.shared_size:
        return experts
    shared = _take_mlp(parameters, f"{prefix}shared.", config, ops)
    return SharedExpert(experts, shared, parameters.pop(f"{prefix}shared_gate", None), ops)
