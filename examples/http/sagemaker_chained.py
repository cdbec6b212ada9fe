"""A long answer from several short requests: while the finish reason is "length", another request continues the text.

    export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME=http://127.0.0.1:8080 AWS_DEFAULT_REGION=us-east-1
    export AWS_ACCESS_KEY_ID=none AWS_SECRET_ACCESS_KEY=none

The code is the same for an endpoint of SageMaker with an LMI container. `chained.py` continues token ids instead of
text, which is exact with every tokenizer.
"""

import json
import os
from collections.abc import Iterable, Iterator
from typing import Any

import boto3

endpoint = os.environ.get("TANDEM_NAME", "tandem-small")
runtime = boto3.client("sagemaker-runtime")


def lines(stream: Iterable[Any]) -> Iterator[bytes]:
    """Complete lines. A part of the stream may end inside a line."""
    unread = b""
    for event in stream:
        *complete, unread = (unread + event["PayloadPart"]["Bytes"]).split(b"\n")
        yield from complete


def ask(prompt: str) -> tuple[str, str]:
    """The prompt with its continuation, and the finish reason."""
    payload = {"inputs": prompt, "parameters": {"max_new_tokens": 24, "details": True}}
    response = runtime.invoke_endpoint_with_response_stream(
        EndpointName=endpoint, Body=json.dumps(payload), ContentType="application/json"
    )
    for line in lines(response["Body"]):
        answer = json.loads(line)
        prompt += answer["token"]["text"]
        if answer["details"] is not None:
            return prompt, answer["details"]["finish_reason"]
    raise RuntimeError("the stream ended without a finish reason")


text, reason, num_requests = "Once upon a time", "length", 0
while reason == "length" and num_requests < 20:
    text, reason = ask(text)
    num_requests += 1
print(text)
print(f"{num_requests} requests, the last one ended with {reason}")
