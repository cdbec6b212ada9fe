"""The tokens that belong to the texts of an answer. A response has their log-probs, none of reasoning and calls."""

from codecs import getincrementaldecoder
from collections import defaultdict
from typing import NamedTuple

from gateway.answers import bytes_of
from gateway.openai.answer_parser import Block, BlockAdded
from gateway.openai.completion_members import StreamTokens, chat_logprobs
from gateway.openai.requests import ChatBody
from gateway.schema import Json
from tandem import Token, TokenEvent


class _Waiting(NamedTuple):
    """A token whose text has not been a step yet. `own` is the text of its own bytes, without the beginning of a
    character at its end, with which it `begins_more`.
    """

    token: Token
    own: str
    begins_more: bool


class TextLogprobs:
    """Assigns tokens to the texts of one answer: `begin_event`, then `of_step` for each piece that the event adds."""

    def __init__(self, chat: ChatBody) -> None:
        self._chat = chat
        self._stream = StreamTokens()
        self._decoder = getincrementaldecoder("utf-8")("replace")
        self._waiting: list[_Waiting] = []
        self._num_own = self._num_read = 0
        """Characters of all tokens so far, and of the text that the router has sent of them."""
        self._of_blocks: defaultdict[int, list[Json]] = defaultdict(list)

    def begin_event(self, event: TokenEvent) -> None:
        self._num_read += len(event.text)
        for token in self._stream.take(event) if self._chat.logprobs else ():
            own = self._decoder.decode(bytes_of(token))
            self._num_own += len(own)
            self._waiting.append(_Waiting(token, own, bool(self._decoder.getstate()[0])))

    def of_step(self, step: BlockAdded) -> list[Json]:
        """The entries of the tokens whose text the step adds; none where that is reasoning or a call."""
        waiting = "".join(each.own for each in self._waiting)
        # Harmony's parser begins a further message with a line feed.
        text = step.text if step.text in waiting else step.text.removeprefix("\n")
        entries = self._of_blocks[step.block.index]
        if step.block.kind != "text":
            self._take(waiting.find(text), text)
            return []
        # A text begins behind a mark and ends in front of one, which may hold the same characters.
        goes_on = bool(entries) and waiting.startswith(text)
        first = len(waiting) - (self._num_own - self._num_read) - step.num_behind - len(text)
        if first < 0 or not waiting.startswith(text, first):  # tokens that are not the text to the letter
            first = waiting.rfind(text)
        tokens = self._take(0 if goes_on else first, text)
        logprobs = chat_logprobs(tokens, self._chat)
        added: list[Json] = [] if logprobs is None else logprobs["content"]
        entries += added
        return added

    def of_block(self, block: Block) -> list[Json]:
        """The entries of a text so far."""
        return self._of_blocks[block.index]

    def _take(self, first: int, text: str) -> list[Token]:
        """Take the waiting tokens up to the end of this text, which begins at their character `first`. Returns those
        that hold it: a mark in front of it, or white space that was cut off, is no part of it. All are taken if `first`
        is -1, because the parser has made the text of others.
        """
        end = first + len(text) if first >= 0 else sum(len(each.own) for each in self._waiting)
        tokens: list[Token] = []
        begin = num_taken = 0
        for token, own, begins_more in self._waiting:
            if begin >= end:
                break
            if begin + len(own) + begins_more > max(0, first):
                tokens.append(token)
            begin, num_taken = begin + len(own), num_taken + 1
        del self._waiting[:num_taken]
        return tokens
