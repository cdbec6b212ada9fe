"""Ask one question. Start a mesh first: tandem up"""

import asyncio

import tandem


async def main() -> None:
    async with tandem.AsyncClient("127.0.0.1:50051") as client:
        await client.wait_ready()
        question = [{"role": "user", "content": "What is 17 + 25?"}]
        result = await client.generate(messages=question)
        print(result.text)
        print(result.finish_reason, result.usage, f"confidence {result.confidence:.2f}")


asyncio.run(main())
