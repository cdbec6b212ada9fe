"""The load generator counts every token."""

import asyncio
from collections.abc import Callable

from bench.load import Workload, run_closed_loop


async def test_tokens_of_concurrent_clients_add_up() -> None:
    async def send(prompt: list[int], max_new_tokens: int, on_token: Callable[[], None]) -> int:
        for _ in range(max_new_tokens):
            await asyncio.sleep(0)
            on_token()
        return max_new_tokens

    measured = await run_closed_loop(Workload(num_clients=8, requests_per_client=3, output_tokens=5), send)
    assert measured.num_tokens == 8 * 3 * 5
    assert (len(measured.ttft_s), len(measured.gaps_s)) == (24, 24 * 4)
