"""Where conversations are: requests with the same session_id go to the decode worker that has their KV."""

from collections import OrderedDict

from mesh.domain.request import SequenceSpec

_MAX_CONVERSATIONS = 65_536


class ConversationHomes:
    """The decode worker that each conversation used last, for the latest ones of one model at this router."""

    def __init__(self, max_conversations: int = _MAX_CONVERSATIONS) -> None:
        self._max_conversations = max_conversations
        self._incarnations: OrderedDict[tuple[str, str], str] = OrderedDict()

    def find(self, request: SequenceSpec) -> str:
        """The incarnation of the worker; empty if the request belongs to no conversation, or to a new one."""
        return self._incarnations.get(_conversation_of(request), "")

    def note(self, request: SequenceSpec, incarnation: str) -> None:
        if request.cache_hints.session_id:
            self._incarnations[_conversation_of(request)] = incarnation
            self._incarnations.move_to_end(_conversation_of(request))
            if len(self._incarnations) > self._max_conversations:
                self._incarnations.popitem(last=False)


def _conversation_of(request: SequenceSpec) -> tuple[str, str]:
    return request.cache_namespace, request.cache_hints.session_id
