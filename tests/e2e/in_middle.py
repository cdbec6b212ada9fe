"""Requests of all kinds, and streams that are hit in their middle."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import pytest

import tandem

MAX_TRIES = 30  # a busy machine may give one stream all of its tokens before it gives another its first
_T = TypeVar("_T")


def mixed_requests(count: int, num_tokens: int) -> list[dict[str, Any]]:
    """Greedy and seeded ones, with penalties, all with log-probs."""
    return [
        {
            "token_ids": [(7 * i + j) % 256 for j in range(20 + 9 * i)],
            "temperature": 0.8 if i % 2 else 0.0,
            "seed": i,
            "frequency_penalty": 0.3 if i % 3 == 0 else 0.0,
            "top_logprobs": 2,
            "max_new_tokens": num_tokens,
            "ignore_eos": True,
        }
        for i in range(count)
    ]


async def stream_and_hit(
    client: tandem.AsyncClient, requests: Sequence[Mapping[str, Any]], hit: Callable[[], _T]
) -> tuple[list[list[tandem.TokenEvent]], _T]:
    """Stream all requests at once and call `hit` when no stream is at its beginning or its end. Return the events of
    each stream and the result of `hit`.

    On a busy machine one stream may end before another begins; then all are tried again, MAX_TRIES times in all.
    """
    for _ in range(MAX_TRIES):
        in_middle = [asyncio.Event() for _ in requests]

        async def follow(request: Mapping[str, Any], has_begun: asyncio.Event) -> list[tandem.TokenEvent]:
            events = []
            async for event in client.stream(**request):
                events.append(event)
                if len(events) == 10:
                    has_begun.set()
            return events

        streams = [
            asyncio.create_task(follow(request, has_begun))
            for request, has_begun in zip(requests, in_middle, strict=True)
        ]
        await asyncio.gather(*(event.wait() for event in in_middle))
        if not any(stream.done() for stream in streams):
            result = hit()
            return await asyncio.gather(*streams), result
        await asyncio.gather(*streams)
    pytest.fail(f"in {MAX_TRIES} tries a stream ended before all had begun")
