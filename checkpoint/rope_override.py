"""RopeOverride: settings that replace the rotary positions of config.json, to serve longer sequences. Standard library
only.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from checkpoint.config_json import is_positive, kept_rope, rope_section, section
from mesh.domain.errors import ConfigurationError
from mesh.domain.json_text import parse_json

_ROPE_FORM = 'rope_scaling must be a JSON object such as {"rope_type": "linear", "factor": 2.0}'


@dataclass(frozen=True, slots=True)
class RopeOverride:
    """Settings that replace the checkpoint's rotary positions. `scaling` is JSON text like `rope_scaling` in
    config.json; `theta` is the base of the frequencies.

    Empty text and 0 keep the checkpoint's value. The constructor validates both.
    """

    scaling: str = ""
    theta: float = 0.0

    def __post_init__(self) -> None:
        if not (self.theta >= 0 and math.isfinite(self.theta)):
            raise ConfigurationError(f"rope_theta must be a number > 0, got {self.theta}")
        scaling = self._parsed()
        if self.scaling and not isinstance(scaling.get("rope_type") or scaling.get("type"), str):
            raise ConfigurationError(f"{_ROPE_FORM}, with a rope_type, got {self.scaling}")
        for key in ("factor", "rope_theta"):
            value = scaling.get(key, 1.0)
            if not is_positive(value):
                raise ConfigurationError(f"rope_scaling: {key} must be a number > 0, got {value!r}")

    @property
    def base(self) -> float:
        """The base of the frequencies, 0 for the checkpoint's. With another base, the maximum length in config.json no
        longer applies.
        """
        return self.theta or float(self._parsed().get("rope_theta") or 0.0)

    def __bool__(self) -> bool:
        return bool(self.scaling) or self.theta > 0

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return a copy of config.json with this scaling.

        Gemma 3 has separate angles for sliding-window layers and for full-attention layers; only the latter change.
        """
        if not self.scaling:
            return dict(config)
        stored = rope_section(config)
        nested = section(stored, "full_attention") if "full_attention" in stored else None
        current = stored if nested is None else nested
        scaling = kept_rope(current) | self._parsed()
        changed = {key: value for key, value in config.items() if key != "rope_scaling"}
        if "original_max_position_embeddings" in scaling:
            changed.pop("original_max_position_embeddings", None)
        changed["rope_parameters"] = scaling if nested is None else {**stored, "full_attention": scaling}
        return changed

    def _parsed(self) -> dict[str, Any]:
        if not self.scaling:
            return {}
        try:
            parsed = parse_json(self.scaling)
        except ValueError as error:
            raise ConfigurationError(f"{_ROPE_FORM}, got {self.scaling}: {error}") from error
        if not isinstance(parsed, dict):
            raise ConfigurationError(f"{_ROPE_FORM}, got {self.scaling}")
        return parsed


NO_ROPE_OVERRIDE = RopeOverride()
