"""Complete answers from events, for clients that do not stream."""

from dataclasses import dataclass, field

import tandem
from gateway.feed import Feed
from tandem import Choice, FinishReason, Timing, Token, TokenEvent, Usage


@dataclass
class _Growing:
    """A choice whose events are coming in."""

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
    """All choices of all prompts, in order. `prompt_tokens`, by the prompt's number, where they were asked for."""

    choices: tuple[Choice, ...]
    prompt_tokens: dict[int, tuple[Token, ...]]


async def collect(feed: Feed, num_choices: int = 1) -> Answer:
    """Read a feed to its end, and close it. Raises TandemError."""
    growing: dict[int, _Growing] = {}
    prompts: dict[int, tuple[Token, ...]] = {}
    try:
        async for events in feed.batches():
            for event in events:
                growing.setdefault(event.index, _Growing()).add(event)
                if event.prompt_tokens:
                    prompts[event.index // num_choices] = event.prompt_tokens
    finally:
        await feed.close()
    return Answer(tuple(_choice(index, each) for index, each in sorted(growing.items())), prompts)


def _choice(index: int, growing: _Growing) -> Choice:
    if growing.finish_reason is None:
        raise tandem.InternalError("an answer ended without a finish reason")
    text, tokens = "".join(growing.texts), tuple(growing.tokens)
    return Choice(index, text, tokens, growing.finish_reason, growing.usage, growing.timing)


def total_usage(choices: tuple[Choice, ...], num_choices: int) -> Usage:
    """Counts of all: each prompt once, all completions."""
    prompts = [choice.usage for choice in choices if choice.index % num_choices == 0]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        completion_tokens=sum(choice.usage.completion_tokens for choice in choices),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
    )
