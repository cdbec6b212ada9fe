"""quantization_config of torchao, as transformers writes it: a class of torchao's with its members. Needs no torch."""

from collections.abc import Callable, Mapping
from typing import Any

from engine.quantized_formats.members import RawConfig, block_sizes, group_size, member, require, target_names
from engine.quantized_formats.storage import MatrixStorage, ModuleGroup, Quantization
from mesh.domain.errors import ConfigurationError

_BY_NAME = ("FqnToConfig", "ModuleFqnToConfig")
_INTEGERS = {f"int{bits}": bits for bits in range(1, 9)}
_FLOATS = ("float8_e4m3fn", "float8_e5m2")


def torchao(raw: RawConfig) -> Quantization:
    quant_type = raw.get("quant_type")
    if not isinstance(quant_type, dict) or not isinstance(stated := quant_type.get("default"), dict):
        raise ConfigurationError(
            f"quant_type {quant_type!r:.100} is not supported; supported: an object with a class of torchao's as "
            '"default": save the model again with transformers 5'
        )
    if stated.get("_type") not in _BY_NAME:
        return Quantization(f"torchao {stated.get('_type')}", (ModuleGroup(("Linear",), _storage(stated)),))
    facts = member(stated, "_data")
    by_name = member(facts, "fqn_to_config" if facts.get("fqn_to_config") else "module_fqn_to_config")
    groups = []
    for name in by_name:
        own = None if by_name[name] is None else _storage(member(by_name, name))
        groups.append(ModuleGroup(target_names([_target(name)], "fqn_to_config"), own))
    return Quantization("torchao", tuple(groups))


def _target(name: str) -> str:
    """Keys are names or patterns of modules, or of their weights; a pattern describes the whole name."""
    if name == "_default":
        return "Linear"
    if not name.startswith("re:"):
        return name.removesuffix(".weight")
    pattern = name.removeprefix("re:").removesuffix(".weight").removesuffix("\\")
    return f"re:(?:{pattern})$"


def _storage(stated: RawConfig) -> MatrixStorage:
    kind = stated.get("_type")
    if not isinstance(kind, str) or kind not in _CLASSES:
        listed = ", ".join((*_CLASSES, *_BY_NAME))
        raise ConfigurationError(f"class {kind!r:.100} is not supported; supported: {listed}")
    return _CLASSES[kind](member(stated, "_data"))


def _int8_weights(facts: RawConfig) -> MatrixStorage:
    if size := group_size(facts):
        return MatrixStorage("torchao", 8, block_inputs=size)
    rows, inputs = _sizes(_of_weights(facts.get("granularity")))
    return MatrixStorage("torchao", 8, rows, inputs)


def _int8(facts: RawConfig) -> MatrixStorage:
    rows, inputs = _sizes(_of_weights(facts.get("granularity")))
    return MatrixStorage("torchao", 8, rows, inputs, int8_rows=True)


def _intx(facts: RawConfig, prefix: str = "") -> MatrixStorage:
    _require(facts, "intx_packing_format", "unpacked_to_int8")
    dtype = _require(facts, "weight_dtype", *_INTEGERS)
    kinds = ("symmetric", "symmetric_no_clipping_err", "asymmetric")
    kind = _require(facts, f"{prefix}mapping_type", *kinds, default=kinds[0])
    rows, inputs = _sizes(facts.get(f"{prefix}granularity"))
    return MatrixStorage("torchao", _INTEGERS[dtype], rows, inputs, is_symmetric=kind != kinds[-1])


def _int4(facts: RawConfig) -> MatrixStorage:
    packing = _value(facts, "int4_packing_format")
    if packing != "plain":
        raise ConfigurationError(
            f"int4_packing_format {packing!r:.100} is not supported; supported: plain: others have the order in which "
            "one kind of GPU reads them; serve the original checkpoint with --quantize int4, or one in awq or gptq"
        )
    size = group_size({"group_size": 128, **facts})
    return MatrixStorage("torchao", 4, block_inputs=size, is_symmetric=False, has_real_zeros=True)


def _fp8(facts: RawConfig) -> MatrixStorage:
    _require(facts, "weight_dtype", *_FLOATS, default=_FLOATS[0])
    _require(facts, "packing_format", "plain", default="plain")
    rows, inputs = _sizes(_of_weights(facts.get("granularity")))
    return MatrixStorage("torchao", 8, rows, inputs, is_float=True)


_CLASSES: Mapping[str, Callable[[RawConfig], MatrixStorage]] = {
    "Int8WeightOnlyConfig": _int8_weights,
    "Int8DynamicActivationInt8WeightConfig": _int8,
    "Int8StaticActivationInt8WeightConfig": _int8,
    "IntxWeightOnlyConfig": _intx,
    "Int8DynamicActivationIntxWeightConfig": lambda facts: _intx(facts, "weight_"),
    "Int4WeightOnlyConfig": _int4,
    "Float8DynamicActivationInt4WeightConfig": _int4,
    "Float8WeightOnlyConfig": _fp8,
    "Float8DynamicActivationFloat8WeightConfig": _fp8,
    "Float8StaticActivationFloat8WeightConfig": _fp8,
}


def _require(facts: RawConfig, name: str, *accepted: str, default: str | None = None) -> str:
    value = _value(facts, name)
    found: str = require({name: default if value is None else value}, name, *accepted)
    return found


def _value(facts: RawConfig, name: str) -> Any:
    """A name of torch's or torchao's: a text, or an object with it."""
    value = facts.get(name)
    value = value.get("_data") if isinstance(value, dict) else value
    return value.lower() if isinstance(value, str) else value


def _of_weights(granularity: object) -> object:
    """The second of a pair, the first of which is for activations."""
    return granularity[1] if isinstance(granularity, list) and len(granularity) == 2 else granularity


def _sizes(granularity: object) -> tuple[int, int]:
    """Outputs and inputs that share a scale; 0: all of them. Raises ConfigurationError."""
    if granularity is None:
        return 1, 0
    stated: RawConfig = granularity if isinstance(granularity, dict) else {"_type": granularity}
    kind, members = stated.get("_type"), stated.get("_data")
    facts: RawConfig = members if isinstance(members, dict) else {}
    if kind == "PerTensor":
        return 0, 0
    if kind == "PerRow" and facts.get("dim", -1) in (-1, 1):
        return 1, 0
    if kind == "PerAxis" and facts.get("axis") == 0:
        return 1, 0
    if kind == "PerGroup":
        return 1, group_size(facts)
    if kind == "PerBlock":
        return block_sizes(facts, "block_size")
    raise ConfigurationError(
        f"granularity {granularity!r:.100} is not supported; supported: PerRow, PerAxis (0), PerTensor, PerGroup, "
        "PerBlock"
    )
