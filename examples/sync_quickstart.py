"""Ask one question without asyncio, and continue the answer until it is complete. Start a mesh first: tandem up"""

import tandem

with tandem.Client("127.0.0.1:50051") as client:
    client.wait_ready()
    question = [{"role": "user", "content": "What is the capital of France?"}]
    result = client.generate_until_done(messages=question, max_new_tokens=16)
    print(result.text)
    print(result.finish_reason, result.usage)
