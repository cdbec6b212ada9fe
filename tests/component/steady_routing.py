"""Mixtures whose tokens choose the same experts however numbers are rounded.

The experts of a random mixture rank close to each other, so rounding activations makes some tokens choose another one,
which changes more than rounding does. Here each expert has a channel of the residual that only the embedding writes,
high for the tokens that choose the expert and low for all others, and the router reads nothing else.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from checkpoint.tensors import StoredTensor
from engine.loading.stored_parameters import open_stored, stored_name
from engine.models.experts_config import ExpertsConfig
from engine.models.parameters import Source, parameter_specs
from engine.models.read_config import load_decoder_config
from tests.component.weights.quantized import numbers_of

_HIGH = 1.0
_GAIN = 2.0
_WRITERS = (".o", ".down", ".recurrent_out")
_BIASES = tuple(f"{name}_bias" for name in _WRITERS)


def steady(model_dir: Path, out: Path) -> Path:
    """A copy of a checkpoint in one file whose routing is steady. Returns `out`."""
    config = load_decoder_config(model_dir)
    assert config.experts is not None
    shutil.copytree(model_dir, out)
    specs, tensors = parameter_specs(config), load_file(model_dir / "model.safetensors")
    stored = open_stored(model_dir, specs)
    levels = _levels(config.experts, config.vocab_size) / config.embed_scale
    channels = slice(0, config.experts.num_experts)
    for spec in specs:
        for source in spec.sources:
            numbers = _view(tensors, source, stored)
            if spec.name == "embed":
                numbers[:, channels] = levels
            elif spec.name.endswith((*_WRITERS, *_BIASES)):
                numbers[channels] = 0
            elif spec.name.endswith(".router"):
                numbers.zero_()
                numbers[channels, channels] = _GAIN * torch.eye(config.experts.num_experts)
            elif spec.name.endswith(("choice_bias", "router_bias")):
                numbers.mul_(0.1)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def _levels(experts: ExpertsConfig, vocab_size: int) -> Tensor:
    """[vocab_size, num_experts]: those that a token chooses are in groups that it may have."""
    generator = torch.Generator().manual_seed(5)
    levels = torch.empty(vocab_size, experts.num_experts)
    for token in levels:
        groups = torch.randperm(experts.num_groups, generator=generator)[: experts.top_groups]
        members = torch.arange(experts.num_experts).view(experts.num_groups, -1)[groups].flatten()
        chosen = members[torch.randperm(len(members), generator=generator)[: experts.top_k]]
        token.fill_(-_HIGH)
        token[chosen] = _HIGH * (1 + 0.5 * torch.rand(len(chosen), generator=generator))
    return levels


def _view(tensors: dict[str, Tensor], source: Source, stored: dict[str, StoredTensor]) -> Tensor:
    """The numbers of a source, outputs first, where they lie in the tensors of the file."""
    name = stored_name(source.name, stored)
    place = stored[name]
    if place.whole is None:
        tensor = tensors[name] if source.member is None else tensors[name][source.member]
        return tensor.t() if source.transposed else tensor
    return numbers_of(tensors, place)
