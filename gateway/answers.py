"""Complete answers from events, for clients that do not stream."""

from dataclasses import dataclass, field

import tandem
from gateway.feed import Feed
from tandem import Choice, FinishReason, Timing, Token, TokenEvent, Usage


@dataclass
class _PartialChoice:
    """A choice whose events are still arriving."""

    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    usage: Usage = field(default_factory=Usage)
    timing: Timing | None = None

    def add(self, event: TokenEvent) -> None:
        self.texts.append(event.text)
        if event.token is not None:
            self.tokens.append(event.token)
        if event.finish_reason is not None:
            self.finish_reason, self.usage = event.finish_reason, event.usage or self.usage
            self.timing = event.timing


@dataclass(frozen=True, slots=True)
class Answer:
    """All choices of all prompts, in order.

    `prompt_tokens` maps a prompt's number to its tokens, if the request wants them. `in_reasoning` is true if a prompt
    ends inside a reasoning block.
    """

    choices: tuple[Choice, ...]
    prompt_tokens: dict[int, tuple[Token, ...]]
    in_reasoning: bool = False


async def collect(feed: Feed, num_choices: int = 1) -> Answer:
    """Read `feed` to its end and close it. Raises TandemError."""
    partial_choices: dict[int, _PartialChoice] = {}
    prompts: dict[int, tuple[Token, ...]] = {}
    in_reasoning = False
    try:
        async for events in feed.batches():
            for event in events:
                partial_choices.setdefault(event.index, _PartialChoice()).add(event)
                in_reasoning = in_reasoning or event.in_reasoning
                if event.prompt_tokens:
                    prompts[event.index // num_choices] = event.prompt_tokens
    finally:
        await feed.close()
    choices = tuple(_choice(index, partial) for index, partial in sorted(partial_choices.items()))
    return Answer(choices, prompts, in_reasoning)


def _choice(index: int, partial: _PartialChoice) -> Choice:
    if partial.finish_reason is None:
        raise tandem.InternalError("an answer ended without a finish reason")
    text, tokens = "".join(partial.texts), tuple(partial.tokens)
    return Choice(index, text, tokens, partial.finish_reason, partial.usage, partial.timing)


def total_usage(choices: tuple[Choice, ...], num_choices: int) -> Usage:
    """Sum the token counts, counting each prompt once however many choices it has."""
    prompts = [choice.usage for choice in choices if choice.index % num_choices == 0]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
    )
