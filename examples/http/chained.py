"""A long answer from several requests: as long as one ends for its length, the next goes on behind it."""

import json
import os
import urllib.request
from typing import Any

url = os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8080")
key = os.environ.get("TANDEM_API_KEY", "none")


def post(path: str, body: dict[str, Any]) -> Any:
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    request = urllib.request.Request(url + path, json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request) as response:
        return json.load(response)


# Token ids, not text: a text cut anywhere may be made of other tokens than the model made it of.
messages = [{"role": "user", "content": "Write the times table of 12."}]
ids = [token["id"] for token in post("/chat_tokenize", {"messages": messages})["tokenize_response"]]
request = {"max_tokens": 20, "temperature": 0, "return_token_ids": True}
text, num_requests, finish_reason = "", 0, "length"
while finish_reason == "length" and num_requests < 20:
    choice = post("/v1/completions", request | {"prompt": ids})["choices"][0]
    text += choice["text"]
    ids += choice["token_ids"]
    finish_reason = choice["finish_reason"]
    num_requests += 1
print(text)
print(f"{num_requests} requests, the last one ended with {finish_reason}")
