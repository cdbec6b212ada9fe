"""quantization_config of Intel's auto-round, whose matrices are stored as those of GPTQ or AWQ. Needs no torch."""

import re

from engine.quantized_formats.members import RawConfig, flag, group_size, member, require, target_names
from engine.quantized_formats.storage import MatrixStorage, ModuleGroup, Quantization
from mesh.domain.errors import ConfigurationError

_PACKINGS = ("auto_round", "auto_round:auto_gptq", "auto_round:gptqmodel", "auto_round:auto_awq")
_WORDS = frozenset({"auto", "auto_round", "autoround", "gptq", "auto_gptq", "gptqmodel", "awq", "auto_awq"})
_KERNELS = frozenset({"exllama", "exllamav2", "triton", "tritonv2", "marlin", "gemm"})
"""Words of older names that say which kernel the matrices were packed for: all unpack the same."""
_NAME = re.compile(r"[\w.-]+")
"""Keys of extra_config that name a module; others are patterns."""


def auto_round(raw: RawConfig) -> Quantization:
    """`backend` and `block_name_to_quantize` are not needed: the tensors tell which modules are quantised."""
    packing = _packing(raw)
    if raw.get("rotation_config"):
        raise ConfigurationError("rotation_config is not supported: serve a checkpoint without rotations")
    groups = [ModuleGroup(("Linear",), _storage(raw, packing))]
    stated = member(raw, "extra_config") if raw.get("extra_config") else {}
    for name in stated:
        own = _storage({**raw, **member(stated, name)}, packing)
        targets = [name] if _NAME.fullmatch(name) else [f"re:.*(?:{name})"]  # searched anywhere in names
        groups.append(ModuleGroup(target_names(targets, "extra_config"), own))
    return Quantization(f"auto-round {packing}", tuple(groups))


def _packing(raw: RawConfig) -> str:
    """One of `_PACKINGS`. Before packing_format, `backend` had it."""
    name = "packing_format" if raw.get("packing_format") is not None else "backend"
    stated = raw.get(name) or "auto"
    words = stated.lower().split(":") if isinstance(stated, str) else []
    if not words or not set(words) <= _WORDS | _KERNELS:
        raise ConfigurationError(f"{name} {stated!r:.100} is not supported; supported: {', '.join(_PACKINGS)}")
    if {"awq", "auto_awq"} & set(words):
        return "auto_round:auto_awq"
    if "gptqmodel" in words:
        return "auto_round:gptqmodel"
    is_native = "auto" not in words and not {"gptq", "auto_gptq"} & set(words)
    return "auto_round" if is_native else "auto_round:auto_gptq"


def _storage(facts: RawConfig, packing: str) -> MatrixStorage | None:
    """None for modules that are not quantised: 16 bits and more."""
    bits = facts.get("bits", 4)
    if type(bits) is int and bits >= 16:
        return None
    require(facts, "data_type", "int", default="int")
    if facts.get("act_bits") is not None:
        require(facts, "act_bits", 16, 32)
    is_awq = packing == "auto_round:auto_awq"
    return MatrixStorage(
        "awq" if is_awq else "gptq",
        require(facts, "bits", *((4,) if is_awq else (2, 3, 4, 8)), default=4),
        block_inputs=group_size({"group_size": 128, **facts}),
        is_symmetric=flag(facts, "sym", default=True),
        zeros_minus_one=packing == "auto_round:auto_gptq",
    )
