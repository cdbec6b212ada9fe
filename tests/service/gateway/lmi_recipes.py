"""The documented uses of LMI's generation details, with the loop over lines that LMI's documentation has: while bytes
are left over it looks for another line, for ever if the last one has no end. Reads without guards: a missing member is
an error. Prints what it found with each of these lengths, as a list in JSON.

    lmi_recipes.py confidence|chained PROMPT MAX_NEW_TOKENS...
"""

import io
import json
import math
import os
import sys
from typing import Any

import boto3

runtime = boto3.client("sagemaker-runtime")


class LineIterator:
    def __init__(self, stream: Any) -> None:
        self.byte_iterator = iter(stream)
        self.buffer = io.BytesIO()
        self.read_pos = 0

    def __iter__(self) -> "LineIterator":
        return self

    def __next__(self) -> bytes:
        while True:
            self.buffer.seek(self.read_pos)
            line = self.buffer.readline()
            if line and line[-1] == ord("\n"):
                self.read_pos += len(line)
                return line[:-1]
            try:
                chunk = next(self.byte_iterator)
            except StopIteration:
                if self.read_pos < self.buffer.getbuffer().nbytes:
                    continue
                raise
            self.buffer.seek(0, io.SEEK_END)
            self.buffer.write(chunk["PayloadPart"]["Bytes"])


def answers(prompt: str, max_new_tokens: int) -> Any:
    payload = {"inputs": prompt, "parameters": {"max_new_tokens": max_new_tokens, "details": True}}
    response = runtime.invoke_endpoint_with_response_stream(
        EndpointName=os.environ["TANDEM_NAME"], Body=json.dumps(payload), ContentType="application/json"
    )
    return map(json.loads, LineIterator(response["Body"]))


def confidence(prompt: str, max_new_tokens: int) -> Any:
    logprobs = []
    for resp in answers(prompt, max_new_tokens):
        if resp["token"]["text"] is not None:
            logprobs.append(resp["token"]["log_prob"])
        elif resp["generated_text"] is not None:
            generated_text = resp["generated_text"]
    return generated_text, math.exp(sum(logprobs) / len(logprobs)), len(logprobs)


def chained(prompt: str, max_new_tokens: int) -> Any:
    text, reason, num_requests = prompt, "length", 0
    while reason == "length":
        texts = []
        for resp in answers(text, max_new_tokens):
            texts.append(resp["token"]["text"])
            if resp["details"] is not None:
                reason = resp["details"]["finish_reason"]
                break
        text += "".join(texts)
        num_requests += 1
    return text, reason, num_requests


if __name__ == "__main__":
    recipe = {"confidence": confidence, "chained": chained}[sys.argv[1]]
    sys.stdout.write(json.dumps([recipe(sys.argv[2], int(length)) for length in sys.argv[3:]]))
