"""Valid values of the settings for weights and KV. Imports no torch."""

from mesh.domain.errors import ConfigurationError
from mesh.domain.kv import DTYPE_BYTES, KV_DTYPE_BYTES

DTYPES = ("auto", *DTYPE_BYTES)
KV_DTYPES = ("auto", *KV_DTYPE_BYTES)
QUANTIZATIONS = ("none", "int8")
LOAD_FORMATS = ("auto", "dummy")
_CHOICES = {"dtype": DTYPES, "kv_dtype": KV_DTYPES, "load_format": LOAD_FORMATS, "quantize": QUANTIZATIONS}


def require_known(settings: object) -> None:
    """Raise ConfigurationError if dtype, kv_dtype, load_format or quantize of `settings` has an unknown value."""
    for name, choices in _CHOICES.items():
        if (value := getattr(settings, name)) not in choices:
            raise ConfigurationError(f"{name} must be one of {', '.join(choices)}, got {value!r}")
