"""Says in time that a certificate in use is about to expire, and when it has: files are read at the start, and a
service that runs for months may outlive them.
"""

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

import structlog

log = structlog.get_logger(__name__)

_CHECK_S = 60.0
_DAY_S = 86_400
_WARN_DAYS = 14
_WARN_SHARE = 0.1
"""Warnings begin so many days before the end, or with this share of the lifetime left if that is less."""


@dataclass(frozen=True, slots=True)
class Validity:
    """When the certificate in a file begins and ceases to be valid, in seconds since 1970."""

    path: str
    begins_s: float
    ends_s: float

    @property
    def warn_s(self) -> float:
        """The moment from which its end is near."""
        return self.ends_s - min(_WARN_DAYS * _DAY_S, _WARN_SHARE * (self.ends_s - self.begins_s))

    @property
    def end(self) -> str:
        return f"{datetime.fromtimestamp(self.ends_s, UTC):%Y-%m-%d %H:%M} UTC"


class ExpiryReports:
    """Warns of the end of a certificate once a day when it is near. `remedy` says what to do."""

    def __init__(self, remedy: str) -> None:
        self._remedy = remedy
        self._reported: dict[Validity, int] = {}

    def warn(self, validity: Validity, now_s: float) -> None:
        """Warn of this certificate if its end is near, and no warning of it was logged today."""
        days_left = int((validity.ends_s - now_s) // _DAY_S)
        if validity.warn_s <= now_s < validity.ends_s and self._reported.get(validity) != days_left:
            self._reported[validity] = days_left
            log.warning(f"{validity.path} expires on {validity.end}: {self._remedy}", days_left=days_left)


async def watch_mesh_certificates(validities: Sequence[Validity]) -> None:
    """Warn of the end of each certificate, and report it once when it is there, until cancelled."""
    reports = ExpiryReports("replace the file and restart this service before, or it will reach no other one")
    expired: set[Validity] = set()
    while True:
        now_s = time.time()
        for validity in validities:
            reports.warn(validity, now_s)
            if validity.ends_s <= now_s and validity not in expired:
                expired.add(validity)
                log.error(
                    f"{validity.path} expired on {validity.end}: services refuse connections with it; replace the file "
                    "and restart this service"
                )
        await asyncio.sleep(_CHECK_S)
