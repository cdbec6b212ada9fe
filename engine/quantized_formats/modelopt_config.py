"""How NVIDIA's modelopt describes a checkpoint: quantization_config of config.json, or hf_quant_config.json. Needs no
torch.
"""

from collections.abc import Mapping

from engine.quantized_formats.members import RawConfig, member, require, wildcard_names
from engine.quantized_formats.storage import MatrixStorage, ModuleGroup, Quantization
from mesh.domain.errors import ConfigurationError

_NVFP4 = MatrixStorage("nvfp4-plain", 4, block_inputs=16, is_float=True)
_MXFP4 = MatrixStorage("mxfp4-plain", 4, block_inputs=32, is_float=True)
_FP8_BLOCKS = MatrixStorage("plain", 8, block_rows=128, block_inputs=128, is_float=True)
_STORAGES: Mapping[str, MatrixStorage] = {
    "FP8": MatrixStorage("plain", 8, block_rows=0, is_float=True),
    "FP8_PER_CHANNEL_PER_TOKEN": MatrixStorage("plain", 8, is_float=True),
    "FP8_PB_WO": _FP8_BLOCKS,
    "W8A16": MatrixStorage("plain", 8),
    "NVFP4": _NVFP4,
    "W4A16_NVFP4": _NVFP4,
    "W4A8_NVFP4_FP8": _NVFP4,
    "MXFP4": _MXFP4,
    "W4A8_MXFP4_FP8": _MXFP4,
}
"""By quant_algo, which also says what activations are rounded to; they are not rounded here."""
_MIXED = "MIXED_PRECISION"


def modelopt(raw: RawConfig) -> Quantization | None:
    """None if only KV is quantised."""
    if raw.get("producer"):
        require(member(raw, "producer"), "name", "modelopt")
    facts = member(raw, "quantization") if "quantization" in raw else raw
    algorithm = facts.get("quant_algo")
    if algorithm is None:
        return None
    groups = _mixed(facts) if algorithm == _MIXED else (ModuleGroup(("Linear",), _storage(facts)),)
    name = "exclude_modules" if "exclude_modules" in facts else "ignore"
    return Quantization(f"modelopt {algorithm}", groups, wildcard_names(facts.get(name) or [], name))


def _mixed(facts: RawConfig) -> tuple[ModuleGroup, ...]:
    layers, targets = member(facts, "quantized_layers"), dict[MatrixStorage, list[str]]()
    for name in layers:
        targets.setdefault(_storage(member(layers, name)), []).append(name)
    return tuple(ModuleGroup(wildcard_names(names, "quantized_layers"), storage) for storage, names in targets.items())


def _storage(facts: RawConfig) -> MatrixStorage:
    algorithm = facts.get("quant_algo")
    storage = _STORAGES.get(algorithm.upper()) if isinstance(algorithm, str) else None
    if storage is None:
        raise ConfigurationError(
            f"quant_algo {algorithm!r:.100} is not supported; supported: {', '.join((*_STORAGES, _MIXED))}"
        )
    if storage.num_bits == 4:
        require(facts, "group_size", storage.block_inputs, None)
    return storage
