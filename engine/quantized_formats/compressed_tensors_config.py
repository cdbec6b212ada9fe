"""quantization_config of compressed-tensors. Needs no torch."""

from collections.abc import Mapping
from dataclasses import replace

from engine.quantized_formats.members import RawConfig, block_sizes, flag, group_size, member, require, target_names
from engine.quantized_formats.storage import Format, MatrixStorage, ModuleGroup, Quantization
from mesh.domain.errors import ConfigurationError

_COMPRESSED_FORMATS: Mapping[str, Format] = {
    "int-quantized": "plain",
    "float-quantized": "plain",
    "naive-quantized": "plain",
    "pack-quantized": "packed",
    "nvfp4-pack-quantized": "nvfp4-packed",
    "mxfp4-pack-quantized": "mxfp4-packed",
}


def compressed_tensors(raw: RawConfig) -> Quantization:
    if raw.get("transform_config"):
        raise ConfigurationError("transform_config is not supported: serve a checkpoint without transforms")
    require(raw.get("sparsity_config") or {}, "format", "dense", default="dense")
    groups, formats = [], set()
    stated = member(raw, "config_groups")
    for group in stated:
        facts = member(stated, group)
        if facts.get("weights") is None:
            groups.append(ModuleGroup(target_names(facts.get("targets")), None))
            continue
        source = facts if facts.get("format") else raw
        if source.get("format") == "mixed-precision":
            raise ConfigurationError(f"format mixed-precision needs a format in {group:.100} of config_groups")
        formats.add(name := require(source, "format", *_COMPRESSED_FORMATS))
        storage = replace(_weights(member(facts, "weights"), name), int8_rows=_has_int8_inputs(facts))
        groups.append(ModuleGroup(target_names(facts.get("targets")), storage))
    method = f"compressed-tensors {' and '.join(sorted(formats))}"
    return Quantization(method, tuple(groups), target_names(raw.get("ignore") or [], "ignore"))


def _weights(weights: RawConfig, name: str) -> MatrixStorage:
    """The storage that compressed-tensors' QuantizationArgs describe."""
    if name in _FP4:
        return _fp4_weights(weights, name)
    kind = require(weights, "type", *_KINDS[name], default="int")
    num_bits = require(weights, "num_bits", *((4, 8) if name == "pack-quantized" else (8,)), default=8)
    size = group_size(weights)
    inferred = "group" if size else "channel" if weights.get("group_size") == -1 else "tensor"
    strategy = require({"strategy": weights.get("strategy") or inferred}, "strategy", *_STRATEGIES)
    if strategy == "group" and not size:
        raise ConfigurationError("strategy 'group' needs a group_size > 0")
    rows, inputs = {"tensor": (0, 0), "channel": (1, 0), "group": (1, size)}.get(strategy) or block_sizes(
        weights, "block_structure"
    )
    order = weights.get("actorder")
    return MatrixStorage(
        _COMPRESSED_FORMATS[name],
        num_bits,
        rows,
        inputs,
        is_float=kind == "float",
        is_symmetric=flag(weights, "symmetric", default=True),
        # Any other order was used while the matrix was rounded, and is not that of the file.
        has_group_index=order is True or str(order).lower() in ("group", "dynamic"),
    )


def _fp4_weights(weights: RawConfig, name: str) -> MatrixStorage:
    strategy, size = _FP4[name]
    for fact, value in (("type", "float"), ("num_bits", 4), ("strategy", strategy), ("group_size", size)):
        require(weights, fact, value)
    require(weights, "symmetric", True, default=True)
    return MatrixStorage(_COMPRESSED_FORMATS[name], 4, block_inputs=size, is_float=True)


_FP4 = {"nvfp4-pack-quantized": ("tensor_group", 16), "mxfp4-pack-quantized": ("group", 32)}
_STRATEGIES = ("tensor", "channel", "group", "block")
_KINDS: Mapping[str, tuple[str, ...]] = {
    "int-quantized": ("int",),
    "pack-quantized": ("int",),
    "float-quantized": ("float",),
    "naive-quantized": ("int", "float"),
}


def _has_int8_inputs(group: RawConfig) -> bool:
    if group.get("input_activations") is None:
        return False
    activations = member(group, "input_activations")
    return (activations.get("type", "int"), activations.get("num_bits", 8)) == ("int", 8)
