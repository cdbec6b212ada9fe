"""openai-python: a streamed chat, with the log-prob of each token and the token counts."""

import math
import os

from openai import OpenAI

url = os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8080")
client = OpenAI(base_url=f"{url}/v1", api_key=os.environ.get("TANDEM_API_KEY", "none"))
model = client.models.list().data[0].id

stream = client.chat.completions.create(
    model=model,
    messages=[{"role": "user", "content": "What is 27 + 45?"}],
    temperature=0,
    logprobs=True,
    stream=True,
    stream_options={"include_usage": True},
)
for chunk in stream:
    for choice in chunk.choices:
        for token in (choice.logprobs and choice.logprobs.content) or []:
            print(f"{token.token!r:12} {math.exp(token.logprob):.2f}")
    if chunk.usage:
        print(f"{chunk.usage.prompt_tokens} + {chunk.usage.completion_tokens} tokens")
