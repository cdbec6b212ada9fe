"""Who calls: the API key of an HTTP request, and whether the router knows it.

The router checks the key of each call it gets. The gate is before that: a request whose key the router does not know is
refused before its body is read. A key the router has taken lately is let by, so that it costs no call.
"""

import asyncio
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers

import tandem

_BEARER = "bearer "
# AWS clients sign requests. The access key id, which they send as it is, is the API key; signatures are not looked at.
_AWS_KEY_ID = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/", re.IGNORECASE)
_TRUST_S = 10.0
_MAX_TRUSTED = 1024
_CHECK_TIMEOUT_S = 5.0
_OPEN = "the router asks for no API keys, so the gateway serves this machine only; see allow_anonymous"


def key_in(headers: Headers) -> str | None:
    """The key of `authorization: Bearer KEY`, of an AWS signature, or of `x-api-key`."""
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return _fit(authorization[len(_BEARER) :].strip())
    signed = _AWS_KEY_ID.match(authorization)
    return _fit(signed[1] if signed else headers.get("x-api-key", ""))


def _fit(key: str) -> str | None:
    """What can stand in gRPC metadata; anything else is no key."""
    return key if key and key.isascii() and key.isprintable() else None


class Gate:
    """Lets known keys by. `open_to_all`: callers of other machines need no key, if the router asks for none.

    `served_name` is the model that is meant by those who name none, `tool_call_formats` each model's by its name, as
    the router has told it last.
    """

    def __init__(
        self, client: tandem.AsyncClient, *, open_to_all: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._open_to_all = open_to_all
        self._clock = clock
        self.served_name = ""
        self.tool_call_formats: dict[str, str] = {}
        self._trusted: OrderedDict[bytes, float] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[None]] = {}

    async def check(self, key: str | None) -> None:
        """Raises Unauthenticated, or what keeps the router from saying."""
        name = sha256((key or "").encode()).digest()
        if self._trusted.get(name, 0.0) > self._clock():
            return
        check = self._checks.get(name)
        if check is None:
            check = self._checks[name] = asyncio.create_task(self._ask(key))
            check.add_done_callback(lambda _: self._checks.pop(name, None))
        await asyncio.shield(check)
        self._trusted[name] = self._clock() + _TRUST_S
        self._trusted.move_to_end(name)
        while len(self._trusted) > _MAX_TRUSTED:
            self._trusted.popitem(last=False)

    async def _ask(self, key: str | None) -> None:
        models = await self._client.acting_for(key).models(timeout=_CHECK_TIMEOUT_S)
        self.served_name = models[0].name if models else ""
        self.tool_call_formats = {model.name: model.tool_call_format for model in models}
        if not self._open_to_all:
            await self._require_closed()

    async def _require_closed(self) -> None:
        """Raise PermissionDenied if the router takes calls without a key."""
        try:
            await self._client.acting_for(None).models(timeout=_CHECK_TIMEOUT_S)
        except tandem.Unauthenticated:
            return
        raise tandem.PermissionDenied(_OPEN)


def is_loopback(host: str) -> bool:
    """True if only this machine can reach `host`."""
    try:
        return host == "localhost" or ipaddress.ip_address(host.strip("[]")).is_loopback
    except ValueError:
        return False


def is_foreign_page(headers: Headers, allowed_origins: Collection[str]) -> bool:
    """True for requests that a browser sends for a page of another site: it must not reach what only its user can."""
    origin = headers.get("origin")
    if origin is None or origin in allowed_origins or "*" in allowed_origins:
        return False
    return urlsplit(origin).netloc != headers.get("host", "")
