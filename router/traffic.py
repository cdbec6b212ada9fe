"""Names that stand for several revisions of a model, and the share of new requests that each revision gets.

    chat: chat-v1 90, chat-v2 10     a request for `chat` goes to one of the two; one for `chat-v2` is pinned to it

Revisions are models of the router like any others, with workers, limits and a queue of their own. So KV never passes
from one to the other, and a replay stays where its stream began.

The choice is a weighted rendezvous (highest random weight, Thaler and Ravishankar 1998) of the request's beginning: all
routers that know the same shares choose alike, the turns of a conversation stay together, and when shares change only
those conversations move that must.

Traffic counts the requests that each revision begins, so that operators see what comes of the shares.
"""

import json
import math
import time
from array import array
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import structlog

from mesh.domain.errors import ConfigurationError, InvalidRequest, MeshError
from router.text.chat import ChatPrompt, Prompt, TextPrompt

log = structlog.get_logger(__name__)

_MAX_NAME_CHARS = 128
_NOT_IN_NAMES = "=:,;"  # they separate the parts of shares in words
_HASH_BYTES = 8
_RECENT_S, _RECENT_STEP_S = 300.0, 10.0

Shares = Mapping[str, float]
"""The weights of the revisions of one name, above 0."""


@dataclass(frozen=True, slots=True)
class TrafficTable:
    """All shares, by public name. `set_at`: microseconds since the epoch when an operator set those of a name; those of
    the other names are from the settings."""

    shares: Mapping[str, Shares]  # none for a name that an operator has removed
    set_at: Mapping[str, int] = field(default_factory=dict)

    def joined(self, other: "TrafficTable") -> "TrafficTable":
        """The shares of each name that an operator has set last, here or there."""
        newer = {name: at for name, at in other.set_at.items() if at > self.set_at.get(name, 0)}
        shares = {name: other.shares[name] for name in newer}
        return TrafficTable({**self.shares, **shares}, {**self.set_at, **newer})


@dataclass(frozen=True, slots=True)
class RoutedRequests:
    """Requests for one name in the last `span_s` seconds, by the revision that began them."""

    counts: Mapping[str, int]
    span_s: float


class _Recent:
    """The requests for one name in the last five minutes, or since its shares changed."""

    def __init__(self, since_s: float) -> None:
        self._since_s = since_s
        self._steps: deque[tuple[float, Counter[str]]] = deque(maxlen=round(_RECENT_S / _RECENT_STEP_S))

    def add(self, model: str, now_s: float) -> None:
        if not self._steps or now_s >= self._steps[-1][0] + _RECENT_STEP_S:
            self._steps.append((now_s, Counter()))
        self._steps[-1][1][model] += 1

    def routed(self, now_s: float) -> RoutedRequests:
        counts = (count for began_s, count in self._steps if began_s > now_s - _RECENT_S)
        return RoutedRequests(sum(counts, Counter()), min(_RECENT_S, now_s - self._since_s))


class Traffic:
    """The names of one router that stand for several revisions.

    `models` are the names of the served models; `is_alive` says whether one has workers now. `clock` returns monotonic
    seconds.
    """

    def __init__(
        self,
        table: TrafficTable,
        models: Sequence[str],
        is_alive: Callable[[str], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigurationError for shares of models that are not served."""
        self.table = table
        self.num_routed: Counter[tuple[str, str]] = Counter()
        """Requests begun since the router's start, by name and revision."""
        self._models = models
        self._is_alive = is_alive
        self._clock = clock
        self._away: set[str] = set()
        self._recent = {name: _Recent(clock()) for name in table.shares}
        for name, shares in table.shares.items():
            try:
                self._require_valid(name, shares)
            except MeshError as error:
                raise ConfigurationError(f"traffic: {error}") from None

    def share_out(self, name: str, shares: Shares) -> None:
        """Give the revisions of a name these shares from the next request on. A name of which all get 0 is removed.
        Raises InvalidRequest."""
        kept = _above_zero(shares)
        if kept or not shares or not self.table.shares.get(name):
            self._require_valid(name, kept)
        set_at = max(self.table.set_at.get(name, 0) + 1, time.time_ns() // 1000)
        self.adopt(TrafficTable({name: kept}, {name: set_at}))

    def adopt(self, table: TrafficTable) -> None:
        """Use what an operator has told this or another router."""
        joined = self.table.joined(table)
        for name, shares in joined.shares.items():
            if shares != self.table.shares.get(name):
                change = "traffic is shared out" if shares else "a name stands for no revisions any more"
                log.warning(change, model=name, shares=dict(shares))
                self._recent[name] = _Recent(self._clock())
        self.table = joined

    def revisions(self, name: str) -> list[str]:
        """The revisions of a name that are served here, that with the largest share first; empty for other names. A
        model of that name goes before: other routers may lack it, and know its name for another purpose.
        """
        shares = {} if name in self._models else self.table.shares.get(name, {})
        return sorted((model for model in shares if model in self._models), key=lambda model: -shares[model])

    def public_names(self) -> list[str]:
        """The names that stand for revisions, then the models that are no revision of any."""
        names = [name for name in self.table.shares if self.revisions(name)]
        revisions = {model for name in names for model in self.table.shares[name]}
        return [*names, *(model for model in self._models if model not in revisions)]

    def choose(self, name: str, key: bytes) -> str:
        """The revision for a request that asks for `name` and begins with `key`; `name` itself if it has none.

        The share of a revision without workers goes to the others. If none has any, requests wait as they would for one
        model.
        """
        revisions = self.revisions(name)
        if not revisions:
            return name
        alive = [model for model in revisions if self._is_alive(model)]
        if alive:
            self._note_away(name, {model for model in revisions if model not in alive})
        shares = self.table.shares[name]
        return min(alive or revisions, key=lambda model: _cost(key, model, shares[model]))

    def began(self, name: str, model: str) -> None:
        """Count a request for `name` that its revision `model` has begun."""
        self.num_routed[name, model] += 1
        self._recent[name].add(model, self._clock())

    def routed(self, name: str) -> RoutedRequests:
        """Where the requests for a name of the table went: in the last five minutes, or since its shares changed."""
        return self._recent[name].routed(self._clock())

    def _note_away(self, name: str, away: set[str]) -> None:
        """Log once for each time that a revision is without workers."""
        revisions = self.revisions(name)
        for model in away - self._away:
            others = [other for other in revisions if other not in away]
            log.warning("a revision has no workers: others get its share", model=name, revision=model, others=others)
        for model in (self._away & set(revisions)) - away:
            log.info("a revision has workers again", model=name, revision=model)
        self._away = (self._away - set(revisions)) | away

    def _require_valid(self, name: str, shares: Shares) -> None:
        shown = repr(name[:_MAX_NAME_CHARS])
        served = ", ".join(self._models)
        if not name or len(name) > _MAX_NAME_CHARS or name in self._models:
            raise InvalidRequest(f"{shown} cannot stand for revisions: it must be a name that no model has ({served})")
        if any(char in name for char in _NOT_IN_NAMES):
            raise InvalidRequest(f"{shown} is no name for revisions: it has one of {' '.join(_NOT_IN_NAMES)}")
        if name != name.strip() or not name.isprintable():
            raise InvalidRequest(f"{shown} is no name for revisions: it has blanks around it, or control characters")
        if not shares:
            raise InvalidRequest(f"{shown} needs a revision with a share above 0, as in {self._models[0]}=100")
        for model, weight in shares.items():
            if model not in self._models:
                raise InvalidRequest(f"{model[:_MAX_NAME_CHARS]!r} is not served here; served: {served}")
            if not 0 < weight < math.inf:
                raise InvalidRequest(f"the share of {model} must be above 0, or 0 for none, got {weight:g}")


def _above_zero(shares: Shares) -> Shares:
    return {model: weight for model, weight in shares.items() if weight != 0}


def parse_traffic(text: str) -> TrafficTable:
    """Read `chat=v1:90,v2:10;other=...`; a share of 0 is none. Raises ConfigurationError, also for a name or a revision
    of a name that is there twice."""
    shares: dict[str, Shares] = {}
    for entry in filter(None, text.split(";")):
        name, _, revisions = entry.partition("=")
        try:
            pairs = [revision.rpartition(":") for revision in revisions.split(",")]
            weights = [(model.strip(), float(weight)) for model, _, weight in pairs]
        except ValueError:
            raise ConfigurationError(f"traffic must be NAME=MODEL:SHARE,MODEL:SHARE;NAME=..., got {entry!r}") from None
        name = name.strip()
        if name in shares or len(dict(weights)) < len(weights):
            twice = name if name in shares else "a revision"
            raise ConfigurationError(f"traffic has {twice} twice: {entry!r}")
        shares[name] = _above_zero(dict(weights))
    return TrafficTable(shares)


def traffic_to_json(table: TrafficTable) -> str:
    """The shares that operators have set, for other routers."""
    return json.dumps({name: {"set_at": at, "shares": dict(table.shares[name])} for name, at in table.set_at.items()})


def traffic_from_json(text: str) -> TrafficTable:
    """The inverse of `traffic_to_json`. Raises InvalidRequest."""
    try:
        entries = json.loads(text)
        shares = {name: entry["shares"] for name, entry in entries.items()}
        return TrafficTable(shares, {name: entry["set_at"] for name, entry in entries.items()})
    except (AttributeError, LookupError, TypeError, ValueError):
        raise InvalidRequest("its content is that of another version") from None


def conversation_key(prompt: Prompt | None, tenant: str) -> bytes:
    """Identify the conversation of a prompt: by all up to the first message of the user, which later turns repeat. A
    text or token ids count as a whole.
    """
    if isinstance(prompt, ChatPrompt):
        first_user = next((n for n, message in enumerate(prompt.messages) if message.role == "user"), 0)
        beginning = prompt.messages[: first_user + 1]
        content = repr([(message.role, message.content, message.extra_json) for message in beginning]).encode(
            errors="replace"
        )
    elif isinstance(prompt, TextPrompt):
        content = prompt.text.encode(errors="replace")
    else:
        content = b"" if prompt is None else array("Q", prompt.ids).tobytes()
    return blake2b(content, key=blake2b(tenant.encode(errors="replace")).digest()).digest()


def _cost(key: bytes, model: str, weight: float) -> float:
    """An exponential random number with the rate `weight`. Of several models, one has the smallest with the probability
    weight / total."""
    digest = blake2b(model.encode(), key=key, digest_size=_HASH_BYTES).digest()
    uniform = (int.from_bytes(digest) + 0.5) / 2 ** (8 * _HASH_BYTES)
    return -math.log(uniform) / weight
