"""Access checks of an HTTP request: its API key, its Host header, and the origin of the page that sent it.

The router checks the key of each call. The gateway checks the key earlier, by a cheap call to the router, so that a
request with an invalid key is refused before its body is read. Valid keys are cached for a few seconds.
"""

import asyncio
import ipaddress
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Coroutine
from hashlib import sha256
from urllib.parse import urlsplit

from starlette.datastructures import Headers

import tandem

# Errors about the key. Any other TandemError is about the router.
_REFUSALS = (tandem.Unauthenticated, tandem.PermissionDenied)
_BEARER = "bearer "
# AWS clients sign requests and send the access key id in clear: it is the API key. The signature is not verified.
_AWS_KEY_ID = re.compile(r"AWS4-HMAC-SHA256 Credential=([^/,\s]+)/", re.IGNORECASE)
_CACHE_S = 10.0
_MAX_CACHED = 1024
# The same limit as the router's (router/tenants.py).
MAX_KEY_CHARS = 1024
_CHECK_TIMEOUT_S = 5.0
_OPEN = (
    "the gateway listens beyond this machine, and the router asks for no API keys: "
    "nobody is served until the router has API keys, or allow_anonymous is set"
)


def key_in(headers: Headers) -> str | None:
    """Return the API key from `authorization: Bearer KEY`, an AWS signature, or `x-api-key`."""
    authorization = headers.get("authorization", "")
    if authorization[: len(_BEARER)].lower() == _BEARER:
        return _valid_key(authorization[len(_BEARER) :].strip())
    signed = _AWS_KEY_ID.match(authorization)
    return _valid_key(signed[1] if signed else headers.get("x-api-key", ""))


def _valid_key(key: str) -> str | None:
    """Return the key, or None if it is empty, or gRPC metadata could not hold it."""
    return key if 0 < len(key) <= MAX_KEY_CHARS and key.isascii() and key.isprintable() else None


class Gate:
    """Checks API keys against the router, and caches its verdicts.

    `allow_anonymous`: serve callers without a key even if the gateway listens beyond loopback. As a by-product of the
    last check, `models` holds the served models by name and by the names of their adapters, and `served_name` the
    default model's name. Adapters stay in `models`: a router that was started again lists none until its workers are
    back, and lets requests for them wait.
    """

    def __init__(
        self, client: tandem.AsyncClient, *, allow_anonymous: bool, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._client = client
        self._open_to_all = allow_anonymous
        self._clock = clock
        self.served_name = ""
        self.models: dict[str, tandem.Model] = {}
        self._valid_until_s: OrderedDict[bytes, float] = OrderedDict()
        self._operator_until_s: OrderedDict[bytes, float] = OrderedDict()
        self._checks: dict[bytes, asyncio.Task[None]] = {}
        self._router_is_open: bool | None = None
        self._is_open_until_s = 0.0

    async def check(self, key: str | None) -> None:
        """Raise Unauthenticated if the router refuses the key, or the error that kept the router from answering."""
        name = _key_digest(key)
        if self._valid_until_s.get(name, 0.0) <= self._clock():
            await self._run_once(name, lambda: self._ask_models(key))
            self._remember(self._valid_until_s, name)

    async def check_operator(self, key: str | None) -> None:
        """Raise Unauthenticated or PermissionDenied unless the key is an operator's.

        While the router is unreachable, a key that it accepted before stays valid, so that metrics can still be
        scraped. For an unknown key, raise the error that kept the router from answering.
        """
        name = _key_digest(key)
        if self._operator_until_s.get(name, 0.0) > self._clock():
            return
        try:
            await self._run_once(b"operator" + name, lambda: self._ask_operator(key))
        except tandem.TandemError as error:
            if isinstance(error, _REFUSALS):
                self._operator_until_s.pop(name, None)
            if name not in self._operator_until_s:
                raise
        self._remember(self._operator_until_s, name)

    async def is_open(self) -> bool:
        """True if the router accepts calls without a key, by its last answer. Raises TandemError before the first."""
        if self._is_open_until_s <= self._clock():
            try:
                await self._run_once(b"open", self._ask_without_key)
            except tandem.TandemError:
                if self._router_is_open is None:
                    raise
        return bool(self._router_is_open)

    async def _run_once(self, name: bytes, ask: Callable[[], Coroutine[object, object, None]]) -> None:
        """Run `ask`, or join the check of the same name that is already running."""
        check = self._checks.get(name)
        if check is None:
            check = self._checks[name] = asyncio.create_task(ask())
            check.add_done_callback(lambda _: self._checks.pop(name, None))
        await asyncio.shield(check)

    def _remember(self, trusted: OrderedDict[bytes, float], name: bytes) -> None:
        trusted[name] = self._clock() + _CACHE_S
        trusted.move_to_end(name)
        while len(trusted) > _MAX_CACHED:
            trusted.popitem(last=False)

    async def _ask_models(self, key: str | None) -> None:
        models = await self._client.acting_for(key).models(timeout=_CHECK_TIMEOUT_S)
        self.served_name = models[0].name if models else ""
        by_name = {model.name: model for model in models}
        former = {name: by_name[model.name] for name, model in self.models.items() if model.name in by_name}
        of_adapters = {adapter: model for model in models for adapter in model.adapters}
        self.models = former | of_adapters | by_name
        await self._require_closed()

    async def _ask_operator(self, key: str | None) -> None:
        await self._client.acting_for(key).mesh(timeout=_CHECK_TIMEOUT_S)
        await self._require_closed()

    async def _ask_without_key(self) -> None:
        try:
            await self._client.acting_for(None).models(timeout=_CHECK_TIMEOUT_S)
            self._router_is_open = True
        except tandem.Unauthenticated:
            self._router_is_open = False
        self._is_open_until_s = self._clock() + _CACHE_S

    async def _require_closed(self) -> None:
        """Raise PermissionDenied if the router accepts calls without a key and the gateway must not."""
        if not self._open_to_all and await self.is_open():
            raise tandem.PermissionDenied(_OPEN)


def _key_digest(key: str | None) -> bytes:
    return sha256((key or "").encode()).digest()


def is_known_host(host: str, allowed_names: Collection[str]) -> bool:
    """True if the Host header cannot come from DNS rebinding, where a foreign page's own name resolves to our address.

    Known hosts are IP addresses, loopback names, and `allowed_names`. No host at all is fine: browsers always send one.
    """
    if not host or "*" in allowed_names:
        return True
    try:
        name = (urlsplit(f"//{host}").hostname or "").removesuffix(".")
    except ValueError:
        return False
    if name == "localhost" or name.endswith(".localhost") or name in allowed_names:
        return True
    try:
        return bool(ipaddress.ip_address(name))
    except ValueError:
        return False


def is_foreign_page(headers: Headers, allowed_origins: Collection[str]) -> bool:
    """True if a browser sent the request for another site's page, which must not act with its user's access."""
    origin = headers.get("origin")
    if origin is None or origin in allowed_origins or "*" in allowed_origins:
        return False
    try:
        return urlsplit(origin).netloc != headers.get("host", "")
    except ValueError:
        return True
