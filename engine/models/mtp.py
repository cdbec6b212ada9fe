"""Multi-token prediction (DeepSeek-V3, 2024): a layer that checkpoints have behind the model's own, used to draft.

From the hidden state of a token and the embedding of the next one it computes the hidden state of that next token, and
so logits of the token after it. It is loaded as a model of one layer (`mtp_config`), whose input is made of both
(MtpInput). Embedding and output matrix are the model's own.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Self

import torch
from torch import Tensor
from torch.nn.functional import linear

from engine.models.encodings import Parameters
from engine.models.model_config import ModelConfig
from engine.models.norms import Norm
from engine.models.parameters import ParameterSpec, Source, parameter_specs
from mesh.domain.errors import ConfigurationError


@dataclass(frozen=True, slots=True)
class MtpNames:
    """Names of the tensors without `.weight`. Those of the layer itself follow `layer`. In `{}` is the number of layers
    before it.
    """

    layer: str
    embed_norm: str
    hidden_norm: str
    projection: str
    final_norm: str


_QWEN = MtpNames("mtp.layers.0", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.fc", "mtp.norm")
_BEHIND = MtpNames(
    "model.layers.{}",
    "model.layers.{}.enorm",
    "model.layers.{}.hnorm",
    "model.layers.{}.eh_proj",
    "model.layers.{}.shared_head.norm",
)
_NAMES: Mapping[str, MtpNames] = MappingProxyType(
    dict.fromkeys(("Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM", "Qwen3NextForCausalLM"), _QWEN)
    | dict.fromkeys(("DeepseekV3ForCausalLM", "Glm4MoeForCausalLM", "Glm4MoeLiteForCausalLM"), _BEHIND)
)

_NOT_READ: Mapping[str, str] = MappingProxyType(
    {"ExaoneMoeForCausalLM": "mtp.", "MellumForCausalLM": "mtp.", "HYV3ForCausalLM": "model.layers.{}."}
)
"""What tensors of layers begin with that no draft is made by."""


def mtp_names(config: ModelConfig) -> MtpNames:
    """The names in this model's checkpoint. Raises ConfigurationError for families without such a layer."""
    names = _NAMES.get(config.architecture)
    if names is None:
        raise ConfigurationError(
            f"speculative=mtp does not fit {config.architecture}: layers of multi-token prediction are read for "
            f"{', '.join(_NAMES)}"
        )
    fields = {name: getattr(names, name).format(config.num_layers) for name in MtpNames.__slots__}
    return MtpNames(**fields)


def mtp_config(config: ModelConfig) -> ModelConfig:
    """The layer as a model of its own. Raises ConfigurationError for families without such a layer."""
    names, experts = mtp_names(config), config.experts
    if experts is not None:  # it is like the model's last layer
        experts = replace(experts, layers=experts.layers[-1:]) if experts.layers[-1] else None
    return replace(
        config,
        num_layers=1,
        windows=(None,),
        recurrent=None,
        experts=experts,
        tensors=replace(config.tensors, layer=names.layer, final_norm=names.final_norm),
    )


def drafts_by_layer(config: ModelConfig) -> bool:
    """True if the layer of this family's checkpoints can be read."""
    return config.architecture in _NAMES


def mtp_tensors(config: ModelConfig, stored: Iterable[str]) -> list[str]:
    """The tensors of such layers, as far as a checkpoint has `stored` them."""
    if drafts_by_layer(config):
        prefix = mtp_names(config).projection.rpartition(".")[0] + "."
    elif config.architecture in _NOT_READ:
        prefix = _NOT_READ[config.architecture].format(config.num_layers)
    else:
        return []
    return [name for name in stored if name.startswith(prefix)]


def own_specs(config: ModelConfig) -> list[ParameterSpec]:
    """The layer's parameters, without those of embedding and output matrix."""
    return [spec for spec in parameter_specs(config) if spec.name.startswith("layers.") or spec.name == "final_norm"]


def input_specs(config: ModelConfig) -> list[ParameterSpec]:
    """The parameters of MtpInput, for the model with this config."""
    names, hidden, offset = mtp_names(config), config.hidden_size, config.tensors.norm_offset
    specs = [
        ParameterSpec(name, (hidden,), (Source(f"{stem}.weight", (hidden,)),), offset=offset, in_fp32=True)
        for name, stem in (("embed_norm", names.embed_norm), ("hidden_norm", names.hidden_norm))
    ]
    shape = (hidden, 2 * hidden)
    return [*specs, ParameterSpec("projection", shape, (Source(f"{names.projection}.weight", shape),))]


@dataclass(frozen=True, slots=True)
class MtpInput:
    """The layer's input: embedded tokens beside the hidden states of the tokens before them, each normed, projected."""

    embed_norm: Norm
    hidden_norm: Norm
    projection: Tensor  # [hidden_size, 2 * hidden_size]

    @classmethod
    def take(cls, parameters: Parameters, config: ModelConfig) -> Self:
        embed_norm, hidden_norm = (
            Norm(parameters.take(name), None, config.norm_eps) for name in ("embed_norm", "hidden_norm")
        )
        return cls(embed_norm, hidden_norm, parameters.take("projection"))

    def __call__(self, embedded: Tensor, previous: Tensor) -> Tensor:
        """embedded, previous: [num_tokens, hidden_size] -> the same shape and type as `embedded`."""
        joined = torch.cat((self.embed_norm(embedded.float()), self.hidden_norm(previous)), 1)
        return linear(joined.to(self.projection.dtype), self.projection).to(embedded.dtype)
