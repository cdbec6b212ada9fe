"""The text of one choice as its tokens arrive: detokenising, then stop strings."""

from router.text.detokenizer import IncrementalDetokenizer
from router.text.stop import StopMatcher


class TextStream:
    """Both stages of one choice. Linear in the text."""

    def __init__(self, detokenizer: IncrementalDetokenizer, matcher: StopMatcher) -> None:
        self._detokenizer = detokenizer
        self._matcher = matcher
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Text that may go out now. Sets `stopped` if a stop string was met; nothing may be pushed after that."""
        text, self.stopped = self._matcher.push(self._detokenizer.push(token_id))
        return text

    def flush(self) -> str:
        """The rest: there will be no more tokens."""
        if self.stopped:
            return ""
        text, self.stopped = self._matcher.push(self._detokenizer.flush())
        return text if self.stopped else text + self._matcher.flush()
