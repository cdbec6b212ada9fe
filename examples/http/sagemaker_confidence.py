"""The confidence of an answer: boto3, a streamed answer with details, and the mean log-prob of its tokens.

    export AWS_ENDPOINT_URL_SAGEMAKER_RUNTIME=http://127.0.0.1:8080 AWS_DEFAULT_REGION=us-east-1
    export AWS_ACCESS_KEY_ID=none AWS_SECRET_ACCESS_KEY=none

The code is the same for an endpoint of SageMaker with an LMI container.
"""

import json
import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import boto3

endpoint = os.environ.get("TANDEM_NAME", "tandem-small")
payload = {"inputs": "What is 27 + 45?", "parameters": {"max_new_tokens": 40, "details": True}}


def lines(stream: Iterable[Any]) -> Iterator[bytes]:
    """Complete lines. A part of the stream may end inside a line."""
    unread = b""
    for event in stream:
        *complete, unread = (unread + event["PayloadPart"]["Bytes"]).split(b"\n")
        yield from complete


runtime = boto3.client("sagemaker-runtime")
response = runtime.invoke_endpoint_with_response_stream(
    EndpointName=endpoint, Body=json.dumps(payload), ContentType="application/json"
)
logprobs = []
for line in lines(response["Body"]):
    answer = json.loads(line)
    if answer["token"].get("text") is not None:
        logprobs.append(answer["token"]["log_prob"])
    elif answer["generated_text"] is not None:
        generated_text = answer["generated_text"]

print(generated_text)
print(f"confidence {math.exp(sum(logprobs) / len(logprobs)):.2f}")
