"""Reads quant_method bitnet (ternary weights) in config.json as transformers does. Needs no torch."""

import re

from engine.quantized_formats.members import RawConfig, flag, require, target_names
from engine.quantized_formats.storage import Format, MatrixStorage, ModuleGroup, Quantization
from mesh.domain.errors import ConfigurationError

_OUTPUT = "lm_head"
_BOUNDARY = r"(?:(?<=\.)|(?=\.|$))"


def bitnet(raw: RawConfig) -> Quantization:
    """`linear_class` says whether scales multiply or divide; in the mode online the weights are stored in floating
    point, and rounded when they are loaded.
    """
    linear_class = require(raw, "linear_class", "bitlinear", "autobitlinear", default="bitlinear")
    mode = require(raw, "quantization_mode", "offline", "online", default="offline")
    if flag(raw, "use_rms_norm", default=False):
        raise ConfigurationError(
            "use_rms_norm, which norms the inputs of every matrix once more, is not supported: serve a checkpoint "
            "without it"
        )
    kind: Format = "bitlinear" if linear_class == "bitlinear" else "autobitlinear"
    is_online = kind == "autobitlinear" and mode == "online"  # transformers' BitLinear knows no modes
    kept = raw.get("modules_to_not_convert")
    names = (_OUTPUT,) if kept is None else target_names(kept, "modules_to_not_convert")
    ignored = tuple(rf"re:(?:{name}){_BOUNDARY}|.*{re.escape(name)}$" for name in names)
    ignored = target_names(list(ignored), "modules_to_not_convert")
    if is_online and not any(re.match(pattern.removeprefix("re:"), _OUTPUT) for pattern in ignored):
        raise ConfigurationError(
            f"modules_to_not_convert {list(names)!r:.100} does not name {_OUTPUT}, and ternary output matrices are not "
            "supported: add it, or leave the list out"
        )
    storage = MatrixStorage("bitnet-online" if is_online else kind, 2, block_rows=0, int8_rows=True)
    return Quantization("bitnet", (ModuleGroup(("Linear",), storage),), ignored)
