"""Stream an answer. Print every token with its probability and the most probable alternatives. Start a mesh first:
tandem up
"""

import asyncio
import math

import tandem


async def main() -> None:
    async with tandem.AsyncClient("127.0.0.1:50051") as client:
        question = [{"role": "user", "content": "What is 869 x 671?"}]
        async for event in client.stream(messages=question, top_logprobs=3):
            if event.token is None or event.token.logprob is None:
                continue
            considered = ", ".join(f"{top.text!r} {math.exp(top.logprob):.2f}" for top in event.token.top)
            print(f"{event.token.text!r:16} {math.exp(event.token.logprob):.2f}   of {considered}")


asyncio.run(main())
