"""quantization_config of folders that `tandem convert` makes of GGUF, the format of llama.cpp, and the types of GGUF
whose blocks such a folder keeps. Needs no torch.
"""

from collections.abc import Mapping
from typing import NamedTuple

from engine.quantized_formats.members import RawConfig, member, target_names
from engine.quantized_formats.storage import Format, MatrixStorage, ModuleGroup, Quantization
from mesh.domain.errors import ConfigurationError

GGUF = "gguf"
"""The quant_method."""
GGUF_GROUP = 32
"""Inputs that share a scale in int4, and in int8 in groups, of matrices in any type."""


class GgufType(NamedTuple):
    """Inputs and bytes of a block, the inputs that share a scale, and the bits of a number."""

    block_inputs: int
    block_bytes: int
    group: int
    num_bits: int
    has_minima: bool = False


GGUF_TYPES: Mapping[Format, GgufType] = {
    "Q4_0": GgufType(32, 18, 32, 4),
    "Q4_1": GgufType(32, 20, 32, 4, has_minima=True),
    "Q5_0": GgufType(32, 22, 32, 5),
    "Q5_1": GgufType(32, 24, 32, 5, has_minima=True),
    "Q8_0": GgufType(32, 34, 32, 8),
    "Q2_K": GgufType(256, 84, 16, 2, has_minima=True),
    "Q3_K": GgufType(256, 110, 16, 3),
    "Q4_K": GgufType(256, 144, 32, 4, has_minima=True),
    "Q5_K": GgufType(256, 176, 32, 5, has_minima=True),
    "Q6_K": GgufType(256, 210, 16, 6),
}
"""By their names in llama.cpp."""


def gguf_config(types: Mapping[str, list[str]]) -> dict[str, object]:
    """quantization_config of a folder whose modules are in these types."""
    return {"quant_method": GGUF, "types": dict(types)}


def gguf(raw: RawConfig) -> Quantization:
    types, groups = member(raw, "types"), []
    if unknown := [name for name in types if name not in GGUF_TYPES]:
        raise ConfigurationError(
            f"type {unknown[0]!r:.100} is not supported; supported: {', '.join(GGUF_TYPES)}: convert the GGUF file "
            "again"
        )
    for name, facts in GGUF_TYPES.items():
        if name in types:
            storage = MatrixStorage(name, facts.num_bits, block_inputs=facts.group, is_symmetric=not facts.has_minima)
            groups.append(ModuleGroup(target_names(types[name], name), storage))
    return Quantization(f"{GGUF} {' and '.join(types)}", tuple(groups))
