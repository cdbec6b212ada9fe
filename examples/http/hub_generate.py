"""huggingface_hub's InferenceClient: TGI's text generation with details, and a streamed chat."""

import os

from huggingface_hub import InferenceClient

client = InferenceClient(os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8080"), token=os.environ.get("TANDEM_API_KEY"))

answer = client.text_generation("Once upon a time", max_new_tokens=12, details=True, return_full_text=False)
if answer.details:
    print(f"{answer.generated_text!r}: {answer.details.finish_reason} after {answer.details.generated_tokens} tokens")

for chunk in client.chat_completion([{"role": "user", "content": "What is 6 times 7?"}], stream=True, temperature=0):
    if chunk.choices:
        print(chunk.choices[0].delta.content or "", end="", flush=True)
print()
