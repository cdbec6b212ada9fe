"""Settings of a switchable worker: those of a prefill and of a decode worker, and the role to begin with."""

from dataclasses import dataclass

from decode_worker.settings import DecodeSettings
from mesh.domain.errors import ConfigurationError
from mesh.domain.worker import WorkerRole
from mesh.settings import setting
from prefill_worker.settings import PrefillSettings

_ROLES = tuple(role.value for role in WorkerRole)


@dataclass(frozen=True, kw_only=True)
class SwitchableSettings(PrefillSettings, DecodeSettings):
    """Settings of both roles, and the role to begin with."""

    role: str = setting("decode", f"role to begin with, and after a restart: {' or '.join(_ROLES)}")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.role not in _ROLES:
            raise ConfigurationError(f"role must be {' or '.join(_ROLES)}, got {self.role!r}")
        if self.rank_listen:
            raise ConfigurationError(
                "rank_listen does not fit a switchable worker: ranks on other machines move KV in one role only"
            )
