"""Joins the answers of several requests. Each request sends the token ids of the prompt and of all generated text, so
that generation continues exactly where it stopped.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol, Unpack

from tandem._fields import wrong_value
from tandem._requests import STRUCTURES, GenerateArguments, TokenizeArguments, generate_request, has_structure
from tandem._retries import Deadline
from tandem.exceptions import InvalidRequest
from tandem.models import Choice, FinishReason, Model, Result, Token, Usage

_NUM_SEEDS = 2**64
_REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class Generator(Protocol):
    """The methods of AsyncClient that are needed here."""

    async def generate(self, **arguments: Unpack[GenerateArguments]) -> Result: ...

    async def tokenize(self, **arguments: Unpack[TokenizeArguments]) -> tuple[Token, ...]: ...

    async def model(self, name: str = "", *, timeout: float | None = None) -> Model: ...


@dataclass
class _JoinedAnswer:
    """The joined answer of all rounds so far."""

    rounds: list[Result] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    tokens: list[Token] = field(default_factory=list)

    def add(self, result: Result, num_kept: int) -> None:
        """Add the first `num_kept` tokens of a round. The next round generates the others again."""
        dropped = result.tokens[num_kept:]
        num_dropped_chars = sum(len(token.text) for token in dropped)
        self.rounds.append(result)
        self.texts.append(result.text[: len(result.text) - num_dropped_chars])
        self.tokens.extend(result.tokens[:num_kept])

    def result(self) -> Result:
        first, last = self.rounds[0], self.rounds[-1]
        usage = Usage(first.usage.prompt_tokens, len(self.tokens), first.usage.cached_tokens)
        choice = Choice(0, "".join(self.texts), tuple(self.tokens), last.finish_reason, usage)
        return Result(first.request_id, (choice,), first.prompt_tokens, first.model)


async def continue_until_done(
    client: Generator, arguments: GenerateArguments, *, max_rounds: int, max_total: int | None, deadline: Deadline
) -> Result:
    """Send requests while the finish reason is "length". See AsyncClient.generate_until_done."""
    for name, limit in (("max_rounds", max_rounds), ("max_total", 1 if max_total is None else max_total)):
        if not isinstance(limit, int):
            raise wrong_value(name, "an integer", limit)
        if limit < 1:
            raise InvalidRequest("max_rounds and max_total must be at least 1")
    if (arguments.get("n") or 1) != 1 or (arguments.get("best_of") or 1) != 1:
        raise InvalidRequest("generate_until_done continues one choice: n and best_of must be 1")
    if used := [name for name in STRUCTURES if has_structure(name, arguments)]:
        raise InvalidRequest(
            f"generate_until_done cannot continue a structure, which begins anew with each round: {used[0]}"
        )
    truncation = arguments.get("truncate_prompt_tokens")
    if isinstance(truncation, int) and truncation < 1:
        raise InvalidRequest(f"truncate_prompt_tokens must be at least 1, got {truncation}")
    arguments = _repeatable(arguments)
    generate_request(arguments)  # refuses arguments of wrong types before they are taken apart
    least = arguments.get("min_new_tokens") or 0
    if max_total is not None and least > max_total:
        raise InvalidRequest(f"min_new_tokens ({least}) must be <= max_total ({max_total})")
    model = await client.model(arguments.get("model") or "", timeout=deadline.remaining_s())
    prompt_ids = await _prompt_ids(client, arguments, deadline)
    prompt_ids = prompt_ids[-truncation:] if truncation else prompt_ids
    answer = _JoinedAnswer()
    for num_rounds in range(1, max_rounds + 1):
        ids = [*prompt_ids, *(token.id for token in answer.tokens)]
        left = _left(arguments, len(answer.tokens), max_total, model.max_total_tokens - len(ids))
        result = await client.generate(**_round(arguments, ids, len(answer.tokens), left, deadline))
        num_generated = len(answer.tokens) + len(result.tokens)
        is_last = (
            result.finish_reason is not FinishReason.LENGTH
            or num_rounds == max_rounds
            or num_generated == max_total
            or _is_full(len(prompt_ids) + num_generated, model)
        )
        complete = result.tokens if is_last else complete_characters(result.tokens) or result.tokens
        answer.add(result, num_kept=len(complete))
        if is_last:
            break
        if result.model:
            arguments = {**arguments, "model": result.model}
    return answer.result()


def _repeatable(arguments: GenerateArguments) -> GenerateArguments:
    """The arguments with lists in place of iterators, which the first request would use up."""
    lists = {name: list(value) for name, value in arguments.items() if isinstance(value, Iterator)}
    return GenerateArguments(**{**arguments, **lists})  # type: ignore[typeddict-item]


def complete_characters(tokens: Sequence[Token]) -> tuple[Token, ...]:
    """`tokens` without those of an incomplete last character, whose text is U+FFFD at the end of a request."""
    if not tokens or not tokens[-1].text.endswith(_REPLACEMENT):
        return tuple(tokens)
    length = len(tokens) - 1
    while length and not tokens[length - 1].text and not tokens[length - 1].special:
        length -= 1
    return tuple(tokens[:length])


async def _prompt_ids(client: Generator, arguments: GenerateArguments, deadline: Deadline) -> list[int]:
    token_ids = arguments.get("token_ids")
    if token_ids is not None:
        return list(token_ids)
    names = TokenizeArguments(
        prompt=arguments.get("prompt"),
        add_special_tokens=arguments.get("add_special_tokens"),
        messages=arguments.get("messages"),
        tools=arguments.get("tools"),
        chat_template_kwargs=arguments.get("chat_template_kwargs"),
        add_generation_prompt=arguments.get("add_generation_prompt"),
        continue_final_message=arguments.get("continue_final_message"),
        model=arguments.get("model"),
        timeout=deadline.remaining_s(),
    )
    return [token.id for token in await client.tokenize(**names)]


def _left(arguments: GenerateArguments, num_generated: int, max_total: int | None, capacity: int) -> int | None:
    """The most tokens of the next round; None lets the router choose. `capacity` is what the model's context has left.
    Less than 1 counts as 1, so that the router refuses a prompt that is too long in its own words.
    """
    limits = [arguments.get("max_new_tokens"), max_total and max_total - num_generated]
    given = [limit for limit in limits if limit is not None]
    return min(*given, max(1, capacity)) if given else None


def _round(
    arguments: GenerateArguments, ids: list[int], num_generated: int, left: int | None, deadline: Deadline
) -> GenerateArguments:
    """The arguments of the next request, for `left` tokens at most. The first round of a conversation sends its
    messages: their answer begins a turn, and does not continue the text of the prompt.
    """
    following = arguments.copy()
    if num_generated or arguments.get("messages") is None:
        following.update({"prompt": None, "messages": None, "token_ids": ids, "truncate_prompt_tokens": None})
    following["timeout"] = deadline.remaining_s()
    following["max_new_tokens"] = left
    following["min_new_tokens"] = _still_needed(arguments.get("min_new_tokens"), num_generated, left)
    following["seed"] = _seed(arguments.get("seed"), num_generated)
    if num_generated:
        following.update({"echo": None, "prompt_logprobs": None, "ttft_target": None})
    return following


def _still_needed(min_new_tokens: int | None, num_generated: int, left: int | None) -> int | None:
    """The rest of the whole answer's `min_new_tokens`, for a round of at most `left` tokens."""
    if min_new_tokens is None:
        return None
    still_needed = max(0, min_new_tokens - num_generated)
    return still_needed if left is None else min(still_needed, left)


def _seed(seed: int | None, num_generated: int) -> int | None:
    """A seed per round. Random draws start anew with each request, so equal seeds would repeat the same draws."""
    return None if seed is None else (seed + num_generated) % _NUM_SEEDS


def _is_full(num_tokens: int, model: Model) -> bool:
    """True if a prompt of `num_tokens` tokens leaves no capacity for another token."""
    return num_tokens > model.max_input_tokens or num_tokens >= model.max_total_tokens
