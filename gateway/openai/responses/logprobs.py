"""Which of an answer's tokens belong to its texts. A response has log-probs of those, none of reasoning and calls."""

from collections import defaultdict

from gateway.openai.answer_parser import Block, BlockAdded
from gateway.openai.requests import ChatBody
from gateway.openai.response_parts import StreamTokens, chat_logprobs
from gateway.schema import Json
from tandem import Token, TokenEvent


class TextLogprobs:
    """Assigns tokens to the texts of one answer: `begin_event`, then `of_step` for each piece that the event adds."""

    def __init__(self, chat: ChatBody) -> None:
        self._chat = chat
        self._stream = StreamTokens()
        self._tokens: list[Token] = []  # whose text has not been a step yet
        self._of_blocks: defaultdict[int, list[Json]] = defaultdict(list)

    def begin_event(self, event: TokenEvent) -> None:
        self._tokens += self._stream.take(event)

    def of_step(self, step: BlockAdded) -> list[Json]:
        """The entries of the tokens whose text the step adds; none where that is reasoning or a call."""
        tokens, self._tokens = self._tokens, []
        if step.block.kind != "text":
            return []
        if not self._of_blocks[step.block.index]:
            tokens = _those_with(tokens, step.text)
        logprobs = chat_logprobs(tokens, self._chat)
        entries: list[Json] = [] if logprobs is None else logprobs["content"]
        self._of_blocks[step.block.index] += entries
        return entries

    def of_block(self, block: Block) -> list[Json]:
        """The entries of a text so far."""
        return self._of_blocks[block.index]


def _those_with(tokens: list[Token], text: str) -> list[Token]:
    """The last tokens that hold this text. A mark in front of it, or white space that was cut off, is no part of it."""
    first, num_left = len(tokens), len(text)
    while first > 0 and num_left > 0:
        first -= 1
        num_left -= len(tokens[first].text)
    return tokens[first:]
