"""Layer: one layer of the eager decoder, built from its parameters."""

from dataclasses import dataclass

from engine.models.facts import BLOCKS, ModelConfig
from engine.models.layers import ACTIVATIONS, Norm
from engine.models.linear import make_linear
from engine.models.linear_parameters import Parameters
from engine.models.mlp import DenseMlp, Experts, Mlp, SharedExpert
from engine.models.ops import LinearLayer


@dataclass(frozen=True, slots=True)
class Layer:
    """Attention projections, MLP and norms of a layer; see engine.models.facts.BLOCKS.

    `post_norm` is applied before the MLP; it is the same object as `input_norm` if attention and MLP share one norm.
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

    @property
    def shares_norm(self) -> bool:
        """True if attention and MLP take the same normed rows."""
        return self.post_norm is self.input_norm and self.qkv.ops is self.mlp.ops


def take_layer(parameters: Parameters, index: int, config: ModelConfig) -> Layer:
    """Take the parameters of layer `index`, and build it."""
    prefix = f"layers.{index}."
    norms = {name: take_norm(parameters, prefix + name, config) for name in BLOCKS[config.block]}
    return Layer(
        parallel=config.block.startswith("parallel"),
        input_norm=norms["input_norm"],
        qkv=_take_linear(parameters, f"{prefix}qkv"),
        q_norm=_take_head_norm(parameters, f"{prefix}q_norm", config),
        k_norm=_take_head_norm(parameters, f"{prefix}k_norm", config),
        o=_take_linear(parameters, f"{prefix}o"),
        attn_out_norm=norms.get("attn_out_norm"),
        post_norm=norms.get("post_norm", norms["input_norm"]),
        mlp=_take_any_mlp(parameters, index, config),
        mlp_out_norm=norms.get("mlp_out_norm"),
    )


def take_norm(parameters: Parameters, name: str, config: ModelConfig) -> Norm:
    """Take a norm of the residual, of the kind that `config` selects."""
    centred = config.norm == "layer"
    return Norm(parameters.take(name), parameters.take_optional(f"{name}_bias"), config.norm_eps, centred)


def _take_head_norm(parameters: Parameters, name: str, config: ModelConfig) -> Norm | None:
    return Norm(parameters.take(name), None, config.norm_eps) if config.qk_norm else None


def _take_linear(parameters: Parameters, name: str) -> LinearLayer:
    return make_linear(parameters.take_linear(name))


def _take_mlp(parameters: Parameters, prefix: str, config: ModelConfig) -> DenseMlp:
    up = _take_linear(parameters, prefix + ("gate_up" if config.gated else "up"))
    down = _take_linear(parameters, f"{prefix}down")
    return DenseMlp(up, down, ACTIVATIONS[config.activation], gated=config.gated)


def _take_any_mlp(parameters: Parameters, index: int, config: ModelConfig) -> Mlp:
    prefix, facts = f"layers.{index}.", config.experts
    if facts is None or not facts.layers[index]:
        return _take_mlp(parameters, prefix, config)
    router = parameters.take(f"{prefix}router")
    mlps = [_take_mlp(parameters, f"{prefix}experts.{expert}.", config) for expert in range(facts.num_experts)]
    experts = Experts(facts, router, mlps)
    if not facts.shared_size:
        return experts
    shared = _take_mlp(parameters, f"{prefix}shared.", config)
    return SharedExpert(experts, shared, parameters.take_optional(f"{prefix}shared_gate"))
