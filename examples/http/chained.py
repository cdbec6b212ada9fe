"""A long answer from several requests: while the finish reason is "length", another request continues the answer."""

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


# Continue with token ids, not text: tokenizing a cut text may give other tokens than the model generated.
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
