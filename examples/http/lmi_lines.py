"""Reads LMI's JSON lines with a plain HTTP client, and computes the confidence of the answer: exp(mean log-prob)."""

import json
import math
import os
import urllib.request

url = os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8080")
key = os.environ.get("TANDEM_API_KEY", "none")
payload = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 12, "details": True}, "stream": True}
request = urllib.request.Request(
    f"{url}/invocations",
    json.dumps(payload).encode(),
    {"content-type": "application/json", "authorization": f"Bearer {key}"},
)

logprobs = []
with urllib.request.urlopen(request) as response:
    for line in response:
        chunk = json.loads(line)
        print(chunk["token"]["text"], end="", flush=True)
        logprobs.append(chunk["token"]["log_prob"])
print(f"\n{chunk['details']['finish_reason']}, confidence {math.exp(sum(logprobs) / len(logprobs)):.2f}")
