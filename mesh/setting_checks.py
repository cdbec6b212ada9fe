"""Checks of values, for classes of settings."""

from mesh.domain.errors import ConfigurationError


def require_at_least(settings: object, least: int, *names: str) -> None:
    """Raise ConfigurationError if one of these settings is less than `least`, or NaN. None is allowed."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not value >= least:
            raise ConfigurationError(f"{name} must be >= {least}, got {value}")


def require_above_zero(settings: object, *names: str) -> None:
    """Raise ConfigurationError unless these settings are above 0 and finite. None is allowed."""
    for name in names:
        value = getattr(settings, name)
        if value is not None and not 0 < value < float("inf"):
            raise ConfigurationError(f"{name} must be > 0, got {value:g}")
