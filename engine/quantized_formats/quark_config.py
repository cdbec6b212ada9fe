"""quantization_config of AMD's Quark. Needs no torch."""

from engine.quantized_formats.members import RawConfig, member, require, wildcard_names
from engine.quantized_formats.storage import MatrixStorage, ModuleGroup, Quantization
from mesh.domain.errors import ConfigurationError


def quark(raw: RawConfig) -> Quantization:
    if raw.get("export"):
        require(member(raw, "export"), "weight_format", "real_quantized", default="real_quantized")
    for name in ("layer_type_quant_config", "algo_config"):
        _require_simple(raw, name)
    layers = member(raw, "layer_quant_config") if raw.get("layer_quant_config") else {}
    # The first pattern that describes a layer counts.
    groups = [
        ModuleGroup(wildcard_names([pattern], "layer_quant_config"), _storage(member(layers, pattern)))
        for pattern in layers
    ]
    groups.append(ModuleGroup(("Linear",), _storage(member(raw, "global_quant_config"))))
    return Quantization("quark", tuple(groups), wildcard_names(raw.get("exclude") or [], "exclude"))


def _require_simple(raw: RawConfig, name: str) -> None:
    """Raise ConfigurationError for classes of modules with a quantisation of their own, and for rotations, which change
    activations.
    """
    value = raw.get(name) or []
    entries = [value] if isinstance(value, dict) else value
    names = [entry.get("name") if isinstance(entry, dict) else entry for entry in entries]
    if name != "algo_config" and names:
        raise ConfigurationError(f"{name} is not supported: serve a checkpoint that names layers, or the original one")
    if rotations := [entry for entry in names if str(entry).lower() in ("rotation", "quarot", "spinquant")]:
        raise ConfigurationError(
            f"{name} {rotations[0]!r} is not supported: serve a checkpoint that was quantised without rotations"
        )


def _storage(layer: RawConfig) -> MatrixStorage | None:
    if layer.get("weight") is None:
        return None
    weight = member(layer, "weight")
    dtype = require(weight, "dtype", "fp8_e4m3", "fp4", "int8")
    if dtype == "fp4":
        for name, value in (("qscheme", "per_group"), ("group_size", 32), ("scale_format", "e8m0")):
            require(weight, name, value)
        return MatrixStorage("mxfp4-plain", 4, block_inputs=32, is_float=True)
    require(weight, "symmetric", True, None)
    scheme = require(weight, "qscheme", "per_tensor", "per_channel")
    if scheme == "per_channel":
        require(weight, "ch_axis", 0)
    inputs = member(layer, "input_tensors") if layer.get("input_tensors") else {}
    return MatrixStorage(
        "plain",
        8,
        block_rows=1 if scheme == "per_channel" else 0,
        is_float=dtype != "int8",
        int8_rows=dtype == "int8" and inputs.get("dtype") == "int8",
    )
