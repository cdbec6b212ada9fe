"""boto3's sagemaker-runtime: one call for a complete answer, and one that streams JSON lines.

The region does not matter. The access key id is the API key, if the mesh requires one.
"""

import json
import os
from typing import Any

import boto3

runtime = boto3.client(
    "sagemaker-runtime",
    region_name="us-east-1",
    endpoint_url=os.environ.get("TANDEM_HTTP", "http://127.0.0.1:8080"),
    aws_access_key_id=os.environ.get("TANDEM_API_KEY", "none"),
    aws_secret_access_key="none",
)
endpoint = os.environ.get("TANDEM_NAME", "tandem-small")  # the served model
payload = {"inputs": "Once upon a time", "parameters": {"max_new_tokens": 12, "details": True}}


def arguments(payload: dict[str, Any]) -> dict[str, Any]:
    return {"EndpointName": endpoint, "ContentType": "application/json", "Body": json.dumps(payload)}


answer = json.loads(runtime.invoke_endpoint(**arguments(payload))["Body"].read())
print(f"{answer['generated_text']!r}: {answer['details']['finish_reason']}")

response = runtime.invoke_endpoint_with_response_stream(**arguments(payload | {"stream": True}))
buffer = b""
for event in response["Body"]:  # a part may end inside a line
    *lines, buffer = (buffer + event["PayloadPart"]["Bytes"]).split(b"\n")
    for line in lines:
        print(json.loads(line)["token"]["text"], end="", flush=True)
print()
