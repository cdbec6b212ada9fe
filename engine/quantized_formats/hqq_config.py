"""quantization_config of HQQ, as transformers writes it. Needs no torch."""

from engine.quantized_formats.members import RawConfig, group_size, member, require, target_names
from engine.quantized_formats.storage import MatrixStorage, ModuleGroup, Quantization


def hqq(raw: RawConfig) -> Quantization:
    """`quant_config` is one description for all modules, or has one for each kind of them, such as self_attn.q_proj."""
    stated = member(raw, "quant_config")
    if "weight_quant_params" in stated:
        groups = [ModuleGroup(("Linear",), _storage(stated))]
    else:
        groups = [
            ModuleGroup(target_names([_pattern(tag)], "quant_config"), _storage(member(stated, tag))) for tag in stated
        ]
    return Quantization("hqq", tuple(groups))


def _pattern(tag: str) -> str:
    """Tags are names without numbers, "model" and "layers"."""
    return r"re:(?:.*\.)?" + r"\.(?:\d+\.)*".join(tag.split(".")) + "$"


def _storage(stated: RawConfig) -> MatrixStorage:
    facts = member(stated, "weight_quant_params")
    for name in ("scale_quant_params", "zero_quant_params"):
        require(stated, name, None)
    require(stated, "offload_meta", False, default=False)
    require(facts, "channel_wise", True, default=True)
    size, is_by_inputs = group_size(facts), require(facts, "axis", 0, 1, default=1) == 1
    return MatrixStorage(
        "hqq",
        require(facts, "nbits", 8, 4, 3, 2, 1),
        block_rows=1 if is_by_inputs else size,
        block_inputs=size if is_by_inputs else 1,
        is_symmetric=False,
        has_real_zeros=True,
    )
