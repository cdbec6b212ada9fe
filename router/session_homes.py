"""Where the sessions of clients are: a conversation goes on at the worker that has its KV."""

from collections import OrderedDict

from mesh.domain.request import SequenceSpec

_MAX_SESSIONS = 65_536


class SessionHomes:
    """The decode worker that each session used last, for the latest sessions of one model at this router."""

    def __init__(self, max_sessions: int = _MAX_SESSIONS) -> None:
        self._max_sessions = max_sessions
        self._incarnations: OrderedDict[tuple[str, str], str] = OrderedDict()

    def find(self, request: SequenceSpec) -> str:
        """The incarnation of the worker; empty if the request has no session, or a new one."""
        return self._incarnations.get(_session_of(request), "")

    def note(self, request: SequenceSpec, incarnation: str) -> None:
        if request.cache_hints.session_id:
            self._incarnations[_session_of(request)] = incarnation
            self._incarnations.move_to_end(_session_of(request))
            if len(self._incarnations) > self._max_sessions:
                self._incarnations.popitem(last=False)


def _session_of(request: SequenceSpec) -> tuple[str, str]:
    return request.cache_namespace, request.cache_hints.session_id
