"""Ask one question. Start a mesh first: tandem up"""

import asyncio

import tandem


async def main() -> None:
    async with tandem.AsyncClient("127.0.0.1:50051") as client:
        await client.wait_ready()
        result = await client.generate(prompt="The capital of France is", max_new_tokens=16)
        print(result.text)
        print(result.finish_reason, result.usage, f"confidence {result.confidence:.2f}")


asyncio.run(main())
